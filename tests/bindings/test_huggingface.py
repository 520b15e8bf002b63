"""`attn_implementation="tilerank"`: unmodified transformers models against the same models in float64.

Random models use ``initializer_range=0.5``: at BERT's default of 0.02 attention is nearly uniform and a lost mask
moves a score by 4e-5.
"""

from __future__ import annotations

import contextlib
import json
from itertools import accumulate

import pytest
import torch
import transformers
from transformers import AttentionMaskInterface, BertConfig, BertForSequenceClassification, BertModel
from transformers.masking_utils import bidirectional_mask_function

import tilerank
from tilerank.kernels import huggingface, torch_ops

VOCABULARY = 60


@pytest.fixture(autouse=True)
def registered():
    tilerank.register()


@pytest.fixture
def kernel_calls(monkeypatch):
    """The keyword arguments of every call that reaches the operators."""
    calls = []
    for name in ("attention", "attention_varlen"):
        original = getattr(torch_ops, name)

        def record(*args, _name=name, _original=original, **kwargs):
            calls.append((_name, kwargs))
            return _original(*args, **kwargs)

        monkeypatch.setattr(torch_ops, name, record)
    return calls


def build(kind, config, attention="tilerank"):
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=attention).eval()


def bert_config(**changes):
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
        "num_labels": 1,
    }
    return BertConfig(**{**settings, **changes})


def tokens(batch, length):
    return torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padding_of(lengths, longest=None, side="right"):
    longest = max(lengths) if longest is None else longest
    rows = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return (rows if side == "right" else rows.flip(1)).long()


@torch.no_grad()
def compare(kind, config, seen=None, **inputs):
    """Our output and SDPA's, each against the same model in float64 at the positions ``seen``."""

    def run(attention, double=False):
        model = build(kind, config, attention)
        cast = {
            k: v.double() if double and torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()
        }
        out = (model.double() if double else model)(**cast)
        out = out.logits if hasattr(out, "logits") else out.last_hidden_state
        return out if seen is None else out[seen]

    exact = run("sdpa", double=True)  # eager takes its softmax in float32 in many models
    assert exact.isfinite().all()
    ours, own = ((run(name).double() - exact).abs().max().item() for name in ("tilerank", "sdpa"))
    assert ours <= 2 * own + 1e-6, f"{ours:.3g} from float64, SDPA {own:.3g}"
    return exact


@contextlib.contextmanager
def lost_mask(monkeypatch):
    """What a registration without its mask function would do."""
    with monkeypatch.context() as patch:
        patch.delitem(AttentionMaskInterface._global_mapping, "tilerank")
        yield


# --- real weights, real pairs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_pairs(scifact_dir, cross_encoder_dir):
    """A padded batch of real (claim, passage) pairs of mixed lengths, tokenised as the model was trained."""

    def lines(name):
        return map(json.loads, (scifact_dir / name).read_text(encoding="utf-8").splitlines())

    by_length = sorted((f"{x['title']} {x['text']}" for x in lines("corpus.jsonl")), key=len)
    passages = [by_length[i] for i in (40, 0, 800, 200, 10)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder_dir)
    claims = [x["text"] for x, _ in zip(lines("queries.jsonl"), passages, strict=False)]
    batch = tokenizer(claims, passages, padding=True, truncation="only_second", max_length=160, return_tensors="pt")
    assert batch["attention_mask"].sum(1).unique().numel() == len(passages), "lengths differ"
    return batch


@pytest.fixture(scope="module")
def real_logits(real_pairs, cross_encoder_dir):
    """Logits of the unmodified model over the padded batch: (float64, what fp32 may be off by).

    That is twice SDPA's error and four roundings of the largest logit: of five logits SDPA's may all be close by luck,
    and how close depends on the processor's matrix products.
    """

    @torch.no_grad()
    def run(dtype):
        model = load(cross_encoder_dir, "sdpa", dtype)
        return model(**real_pairs).logits.double()

    exact = run(torch.float64)
    own = (run(torch.float32) - exact).abs().max()
    return exact, (2 * own + 4 * torch.finfo(torch.float32).eps * exact.abs().max()).item()


def load(folder, attention, dtype=torch.float32):
    kind = transformers.AutoModelForSequenceClassification
    return kind.from_pretrained(folder, attn_implementation=attention, dtype=dtype).eval()


@torch.no_grad()
def test_real_model_padded(real_pairs, real_logits, cross_encoder_dir, kernel_calls, monkeypatch):
    exact, allowed = real_logits
    model = load(cross_encoder_dir, "tilerank")
    found = (model(**real_pairs).logits.double() - exact).abs().max().item()
    assert found <= allowed, f"{found:.3g} from float64"
    assert len(kernel_calls) == model.config.num_hidden_layers
    for name, arguments in kernel_calls:
        assert name == "attention"
        assert arguments["key_lengths"].tolist() == real_pairs["attention_mask"].sum(1).tolist()

    with lost_mask(monkeypatch):
        lost = (model(**real_pairs).logits.double() - exact).abs().max().item()
    assert not lost <= allowed, "a lost mask must turn this test red"


@torch.no_grad()
def test_real_model_packed(real_pairs, real_logits, cross_encoder_dir, kernel_calls):
    exact, allowed = real_logits
    model = load(cross_encoder_dir, "tilerank")
    seen = real_pairs["attention_mask"].bool()
    lengths = seen.sum(1).tolist()
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    hidden = model.bert(
        real_pairs["input_ids"][seen][None],
        token_type_ids=real_pairs["token_type_ids"][seen][None],
        position_ids=positions,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
    ).last_hidden_state
    logits = model.classifier(model.bert.pooler(hidden[0, bounds[:-1].long(), None]))
    found = (logits.double() - exact).abs().max().item()
    assert found <= allowed, f"{found:.3g} from float64"
    assert [name for name, _ in kernel_calls] == ["attention_varlen"] * model.config.num_hidden_layers


# --- masks ---------------------------------------------------------------------------------------------------


def test_padding_on_the_right_becomes_key_lengths(kernel_calls):
    compare(BertForSequenceClassification, bert_config(), input_ids=tokens(3, 9), attention_mask=padding_of([9, 1, 4]))
    assert len(kernel_calls) == 3
    assert all(call["key_lengths"].tolist() == [9, 1, 4] and call["mask"] is None for _, call in kernel_calls)


@pytest.mark.parametrize("mask", [None, torch.ones(3, 9), torch.ones(3, 9).bool()], ids=["absent", "ones", "bool ones"])
def test_nothing_padded_reaches_the_kernel_as_none(kernel_calls, mask):
    compare(BertForSequenceClassification, bert_config(), input_ids=tokens(3, 9), attention_mask=mask)
    assert all(call["key_lengths"] is None and call["mask"] is None for _, call in kernel_calls)
    assert len(kernel_calls) == 3


def test_padding_on_the_left_and_holes_are_masked(kernel_calls):
    left = padding_of([9, 1, 4], side="left")
    holes = padding_of([9, 7, 4])
    holes[0, 3:5] = 0
    for mask in (left, holes):
        compare(BertModel, bert_config(), mask.bool(), input_ids=tokens(3, 9), attention_mask=mask)
    assert all(call["key_lengths"] is None and call["mask"].shape == (3, 1, 9, 9) for _, call in kernel_calls)
    assert len(kernel_calls) == 6


@torch.no_grad()
def test_a_lost_mask_is_far_outside_the_bound(monkeypatch):
    model = build(BertForSequenceClassification, bert_config())
    inputs = {"input_ids": tokens(3, 9), "attention_mask": padding_of([9, 1, 4])}
    right = model(**inputs).logits
    with lost_mask(monkeypatch):
        lost = model(**inputs).logits
    assert (right - lost).abs().max() > 0.1


@torch.no_grad()
def test_a_sample_that_is_all_padding_stays_finite_and_harms_nobody():
    model = build(BertForSequenceClassification, bert_config())
    ids = tokens(3, 9)
    logits = model(input_ids=ids, attention_mask=padding_of([9, 0, 4])).logits
    assert logits.isfinite().all()
    alone = model(input_ids=ids[[0, 2]], attention_mask=padding_of([9, 4])).logits
    assert torch.equal(logits[[0, 2]], alone)


@torch.no_grad()
def test_what_stands_in_the_padding_does_not_matter():
    model = build(BertForSequenceClassification, bert_config())
    mask = padding_of([9, 1, 4])
    ids = tokens(3, 9)
    assert torch.equal(
        model(input_ids=ids, attention_mask=mask).logits,
        model(input_ids=ids.where(mask.bool(), 3), attention_mask=mask).logits,
    )


@torch.no_grad()
@pytest.mark.parametrize("four_d", ["boolean", "additive"])
def test_a_mask_prepared_by_the_caller(four_d):
    seen = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    seen[..., 0] = True
    additive = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    ids = tokens(3, 9)
    ours = build(BertModel, bert_config())(ids, attention_mask=seen if four_d == "boolean" else additive)
    exact = build(BertModel, bert_config(), "sdpa").double()(ids, attention_mask=seen)
    assert (ours.last_hidden_state - exact.last_hidden_state).abs().max() < 1e-4


def test_a_mask_that_lost_its_lengths_still_masks():
    """Models may slice or copy the mask: the lengths are gone then, the padding is not."""
    mask = huggingface.attention_mask(
        batch_size=2,
        q_length=4,
        kv_length=4,
        mask_function=bidirectional_mask_function,
        attention_mask=padding_of([4, 2]).bool(),
        allow_is_bidirectional_skip=True,
    )
    q = torch.randn(2, 4, 3, 8).transpose(1, 2)
    module = torch.nn.Module()
    with_lengths, _ = huggingface.attention_forward(module, q, q, q, mask)
    copied, _ = huggingface.attention_forward(module, q, q, q, mask.clone())
    assert torch.equal(with_lengths, copied)
    assert with_lengths.is_contiguous()
    assert not torch.equal(with_lengths, huggingface.attention_forward(module, q, q, q, None, is_causal=False)[0])


# --- packed --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_packed_equals_alone():
    model = build(BertModel, bert_config())
    lengths = [5, 1, 7]
    ids = [tokens(1, length) for length in lengths]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    arguments = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": 7,
        "max_length_k": 7,
    }
    packed = model(torch.cat(ids, 1), **arguments).last_hidden_state[0]
    alone = torch.cat([model(x).last_hidden_state[0] for x in ids])
    assert torch.allclose(packed, alone, atol=1e-5)

    del arguments["max_length_k"], arguments["cu_seq_lens_k"]
    with pytest.raises(ValueError, match=r"missing: cu_seq_lens_k, max_length_k"):
        model(torch.cat(ids, 1), **arguments)
    with pytest.raises(ValueError, match="packed input has batch 1, found 2"):
        model(tokens(2, 5), cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=7, max_length_k=7)


@torch.no_grad()
def test_packed_decoder():
    """transformers makes a mask of its own from position ids that restart: no sequence sees another."""
    model = build(transformers.LlamaModel, llama_config())
    lengths = [5, 1, 7]
    ids = [tokens(1, length) for length in lengths]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 7, "max_length_k": 7}
    alone = torch.cat([model(x, use_cache=False).last_hidden_state[0] for x in ids])
    found = model(torch.cat(ids, 1), position_ids=positions, use_cache=False, **packed).last_hidden_state[0]
    assert torch.allclose(found, alone, atol=1e-5)


@torch.no_grad()
def test_packed_sliding_window():
    model = build(transformers.ModernBertModel, modernbert_config())
    lengths = [25, 3, 11]
    ids = [tokens(1, length) for length in lengths]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 25, "max_length_k": 25}
    alone = torch.cat([model(x).last_hidden_state[0] for x in ids])
    found = model(torch.cat(ids, 1), position_ids=positions, **packed).last_hidden_state[0]
    assert torch.allclose(found, alone, atol=1e-4)


# --- other architectures -------------------------------------------------------------------------------------


def llama_config(**changes):
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.5,
    }
    return transformers.LlamaConfig(**{**settings, **changes})


def modernbert_config(**changes):
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    }
    return transformers.ModernBertConfig(**{**settings, **changes})


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_causal_decoder_with_grouped_heads(side):
    mask = None if side == "none" else padding_of([9, 3, 6], side=side)
    seen = None if mask is None else mask.bool()
    compare(transformers.LlamaModel, llama_config(), seen, input_ids=tokens(3, 9), attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("length", [6, 30])
def test_causal_sliding_window(length):
    settings = {key: value for key, value in llama_config().to_dict().items() if key != "model_type"}
    config = transformers.MistralConfig(**{**settings, "sliding_window": 8})
    mask = padding_of([length, 4])
    compare(transformers.MistralModel, config, input_ids=tokens(2, length), use_cache=False)
    compare(transformers.MistralModel, config, mask.bool(), input_ids=tokens(2, length), attention_mask=mask)


@pytest.mark.parametrize("length", [3, 30])
def test_bidirectional_sliding_window(length):
    mask = padding_of([length, 2])
    compare(transformers.ModernBertModel, modernbert_config(), input_ids=tokens(2, length))
    compare(
        transformers.ModernBertModel, modernbert_config(), mask.bool(), input_ids=tokens(2, length), attention_mask=mask
    )


def test_cross_attention_decoder():
    config = bert_config(is_decoder=True, add_cross_attention=True)
    encoder = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2))
    for encoder_mask in (None, padding_of([7, 2, 5])):
        compare(
            BertModel,
            config,
            padding_of([9, 3, 6]).bool(),
            input_ids=tokens(3, 9),
            attention_mask=padding_of([9, 3, 6]),
            encoder_hidden_states=encoder,
            encoder_attention_mask=encoder_mask,
            use_cache=False,
        )


def test_learned_bias_on_the_scores():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=2.0
    )
    mask = padding_of([9, 3, 6])
    compare(
        transformers.T5Model,
        config,
        input_ids=tokens(3, 9),
        attention_mask=mask,
        decoder_input_ids=tokens(3, 4),
        use_cache=False,
    )
    left = padding_of([9, 3, 6], side="left")
    additive = torch.zeros(3, 1, 9, 9).masked_fill(~left.bool()[:, None, None], -1e4)
    for given, seen in ((mask, mask), (left, left), (additive, left)):
        compare(transformers.T5EncoderModel, config, seen.bool(), input_ids=tokens(3, 9), attention_mask=given)


@torch.no_grad()
def test_generation_with_a_cache():
    config = llama_config(eos_token_id=None)
    prompt = {"input_ids": tokens(2, 6), "attention_mask": padding_of([6, 4], side="left")}
    written = [
        build(transformers.LlamaForCausalLM, config, name).generate(**prompt, max_new_tokens=6, do_sample=False)
        for name in ("tilerank", "sdpa")
    ]
    assert torch.equal(*written)


# --- refusals ------------------------------------------------------------------------------------------------


def test_what_is_not_served_is_refused_by_name():
    ids = tokens(2, 5)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"dropout=0\.1.*eval"):
            build(BertModel, bert_config()).train()(ids)
        with pytest.raises(ValueError, match=r"output_attentions.*eager"):
            build(BertModel, bert_config())(ids, output_attentions=True)
        gemma = transformers.Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
        )
        with pytest.raises(ValueError, match=r"softcap is not served.*Gemma2Attention"):
            build(transformers.Gemma2Model, gemma)(ids)
    with pytest.raises(NotImplementedError, match="no_grad"):
        build(BertModel, bert_config())(ids)


@pytest.mark.parametrize("family", ["MPNet", "RoFormer"])
def test_a_model_that_computes_attention_by_itself_is_refused(family):
    """It asks for a mask, which it adds to its scores, and calls no attention function."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with torch.no_grad(), pytest.raises(ValueError, match=f"{family}Model computes attention by itself.*eager"):
        build(getattr(transformers, f"{family}Model"), config)(tokens(2, 5))


@pytest.mark.parametrize("family", ["DebertaV2", "XLNet"])
def test_a_model_that_asks_for_nothing_is_told_apart(family):
    """It takes the name and computes what it always does; nothing that is registered can notice."""
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{family}Config")(**small, intermediate_size=48, d_inner=48, d_head=8)
    model = build(getattr(transformers, f"{family}Model"), config)
    assert not huggingface.calls_interface(type(model))
    assert huggingface.calls_interface(BertModel)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ops, "attention", lambda *_, **__: pytest.fail("called"))
        assert model(tokens(2, 5)).last_hidden_state.isfinite().all()


def test_refusals_of_the_attention_function():
    q = torch.zeros(1, 2, 4, 8)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="2 dimensions"):
        huggingface.attention_forward(module, q, q, q, torch.ones(1, 4))
    with pytest.raises(ValueError, match="sliding_window=3 over 4 keys"):
        huggingface.attention_forward(module, q, q, q, None, sliding_window=3)
    huggingface.attention_forward(module, q, q, q, None, sliding_window=4)
    with pytest.raises(ValueError, match="sinks is not served"):
        huggingface.attention_forward(module, q, q, q, None, sinks=torch.zeros(2))


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="name is 3; expected a string"):
        huggingface.register(3)


@pytest.mark.parametrize("name", ["", "sdpa", "eager", "flex_attention", "my_flash", "org/kernel", "a|b"])
def test_names_with_a_meaning_in_transformers_are_refused(name):
    with pytest.raises(ValueError, match="has a meaning in transformers"):
        tilerank.register(name)


def test_register_checks_and_uses_the_variant(monkeypatch):
    with pytest.raises(ValueError, match="fastest"):
        tilerank.register("mine", variant="fastest")
    assert "mine" not in transformers.AttentionInterface._global_mapping
    try:
        tilerank.register("mine", variant="naive")
        with torch.no_grad(), pytest.raises(ValueError, match="naive"):
            build(BertModel, bert_config(), "mine")(tokens(1, 4))
    finally:
        for interface in (transformers.AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("mine", None)


# --- compile -------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_whole_model_compiles_without_a_graph_break():
    torch._dynamo.reset()
    model = build(BertModel, bert_config(num_hidden_layers=1))
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mask in (padding_of([9, 1, 4]), padding_of([9, 1, 4], side="left")):
        inputs = {"input_ids": tokens(3, 9), "attention_mask": mask}
        found, expected = run(**inputs).last_hidden_state, model(**inputs).last_hidden_state
        assert torch.allclose(found[mask.bool()], expected[mask.bool()], atol=1e-5)
