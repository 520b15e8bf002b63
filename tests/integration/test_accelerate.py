"""`tilerank.accelerate`: the outputs of a model from the packed forward pass, its weights left alone, refusals."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
import torch
from tiny_models import WORDS

import tilerank
from tilerank.errors import TilerankError

FAMILIES = ["bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "xlm-roberta"]


def tiny(family: str = "bert", *, head: bool = True, labels: int = 3, **settings):
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    after_pad = family in ("camembert", "data2vec-text", "roberta", "xlm-roberta")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": 90,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 48,
            "type_vocab_size": 1 if after_pad else 2,
            "pad_token_id": 1 if after_pad else 0,
            "initializer_range": 0.5,
            "num_labels": labels,
        }
        | ({"embedding_size": 16} if family == "electra" else {})
        | settings,
    )
    kind = AutoModelForSequenceClassification if head else AutoModel
    return kind.from_config(config, attn_implementation="sdpa").eval()


def batch(model, lengths: tuple[int, ...] = (40, 3, 17, 29, 1), seed: int = 0) -> dict[str, torch.Tensor]:
    """Right-padded inputs of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    pad = model.config.pad_token_id
    ids = torch.full((len(lengths), max(lengths)), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(5, 90, (length,), generator=generator)
        mask[row, :length] = 1
    types = (torch.arange(max(lengths)) > 7).long().expand_as(ids) * (model.config.type_vocab_size - 1)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", [True, False])
@torch.inference_mode()
def test_outputs_are_the_models(family: str, head: bool) -> None:
    model = tiny(family, head=head)
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    expected, found = model(**inputs), fast(**inputs)
    largest = 1e-5 * max(1.0, float(expected[0].abs().max()))
    if head:
        assert found.logits.shape == (5, 3)
        torch.testing.assert_close(found.logits, expected.logits, atol=5 * largest, rtol=0)
    else:
        kept = inputs["attention_mask"].bool()
        states = found.last_hidden_state
        torch.testing.assert_close(states[kept], expected.last_hidden_state[kept], atol=5 * largest, rtol=0)
        assert not states[~kept].any()
        assert (found.pooler_output is None) == (expected.get("pooler_output") is None)
        if found.pooler_output is not None:
            torch.testing.assert_close(found.pooler_output, expected.pooler_output, atol=5e-5, rtol=0)
    assert isinstance(fast(**inputs, return_dict=False), tuple)
    assert fast.config is model.config


@pytest.mark.parametrize("family", ["bert", "roberta"])
@torch.inference_mode()
def test_masks_with_holes_no_mask_and_positions(family: str) -> None:
    model = tiny(family)
    fast = tilerank.accelerate(model)
    ids = batch(model, (20, 20, 20))["input_ids"]
    holes = (torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) > 0.3).long()
    holes[:, 0] = 1
    places = torch.arange(20).flip(0).clone()[None].expand(3, 20) + 2
    for inputs in ({}, {"attention_mask": holes}, {"attention_mask": holes.bool()}, {"position_ids": places}):
        torch.testing.assert_close(
            fast(ids, **inputs).logits, model(ids, **inputs).logits, atol=1e-4, rtol=0, msg=str(inputs.keys())
        )


@torch.inference_mode()
def test_padding_tokens_of_another_kind_shift_no_position() -> None:
    """RoBERTa counts positions by ids, not by the mask: a pad id among tokens takes none."""
    model = tiny("roberta")
    ids = torch.tensor([[7, 1, 9, 11, 1, 30], [7, 8, 9, 10, 11, 12]])
    torch.testing.assert_close(tilerank.accelerate(model)(ids).logits, model(ids).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.inference_mode()
def test_half_precision(dtype: torch.dtype) -> None:
    exact = tiny(labels=1)
    inputs = batch(exact)
    expected = exact.double()(**inputs).logits
    model = exact.to(dtype)
    own = (model(**inputs).logits.double() - expected).abs().max()
    fast = tilerank.accelerate(model)
    found = fast(**inputs).logits
    assert found.dtype == dtype
    assert fast.precision == {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    assert (found.double() - expected).abs().max() <= 2 * own + 1e-3
    wide = tilerank.accelerate(exact.float(), precision={torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype])
    assert wide(**inputs).logits.dtype == torch.float32


@torch.inference_mode()
def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    model = tiny()
    fast = tilerank.accelerate(model)
    inputs = batch(model, (40, 3, 17, 29, 1, 33))
    together = fast(**inputs).logits
    order = list(range(6))
    random.Random(0).shuffle(order)
    shuffled = fast(**{name: value[order] for name, value in inputs.items()}).logits
    torch.testing.assert_close(shuffled, together[order], atol=2e-5, rtol=0)
    for row in range(6):
        alone = fast(**{name: value[row : row + 1] for name, value in inputs.items()}).logits
        torch.testing.assert_close(alone[0], together[row], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_the_weights_stay_the_users() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    implementation = model.config._attn_implementation
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    first = fast(**inputs).logits
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.config._attn_implementation == implementation
    assert not list(fast.parameters())
    # What the drop-in was built from is what it computes, until it is built again.
    model.classifier.weight.mul_(2.0)
    torch.testing.assert_close(fast(**inputs).logits, first, atol=0, rtol=0)
    torch.testing.assert_close(tilerank.accelerate(model)(**inputs).logits, model(**inputs).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["bert", "electra"])
@pytest.mark.parametrize("head", [True, False])
def test_other_weights_loaded_into_the_model_leave_the_outputs_as_they_were(family: str, head: bool) -> None:
    model = tiny(family, head=head)
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    before = fast(**inputs)[0]
    with torch.no_grad():
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    torch.testing.assert_close(fast(**inputs)[0], before, atol=0, rtol=0)


@pytest.mark.parametrize("family", ["bert", "electra"])
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_outputs_are_ordinary_tensors_without_gradients(family: str, head: bool, precision: str) -> None:
    """Those of a drop-in made in inference mode too."""
    model = tiny(family, head=head)
    with torch.inference_mode():
        fast = tilerank.accelerate(model, precision=precision)
    for found in fast(**batch(model), return_dict=False):
        assert not found.is_inference()
        assert not found.requires_grad
        top = torch.nn.Linear(found.shape[-1], 1)
        top(found).sum().backward()
        assert top.weight.grad.any()
        found.add_(1)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("family", ["bert", "electra"])
@pytest.mark.parametrize("pooler", [True, False])
@torch.inference_mode()
def test_a_tuple_holds_what_the_models_does(family: str, pooler: bool) -> None:
    model = tiny(family, head=False)
    if family == "bert":
        model = type(model)(model.config, add_pooling_layer=pooler).eval()
    inputs = batch(model)
    expected, found = (each(**inputs, return_dict=False) for each in (model, tilerank.accelerate(model)))
    assert [value.shape for value in found] == [value.shape for value in expected]
    assert len(found) == (2 if family == "bert" and pooler else 1)


def test_what_is_not_served_is_refused_by_name() -> None:
    from transformers import BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, DistilBertModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    distil = DistilBertModel(DistilBertConfig(vocab_size=90, dim=32, n_layers=1, n_heads=2, hidden_dim=64)).eval()
    with pytest.raises(TilerankError, match="DistilBertModel is not served: model_type is 'distilbert'; served: bert"):
        tilerank.accelerate(distil)
    with pytest.raises(TilerankError, match=r"BertForMaskedLM is not served: .* has a head of its own"):
        tilerank.accelerate(BertForMaskedLM(BertConfig(vocab_size=90, **small)).eval())
    with pytest.raises(TilerankError, match="it is a decoder"):
        tilerank.accelerate(BertModel(BertConfig(vocab_size=90, is_decoder=True, **small)).eval())
    model = tiny()
    with pytest.raises(TilerankError, match=r"in training mode; call model\.eval\(\) first"):
        tilerank.accelerate(copy.deepcopy(model).train())
    with pytest.raises(ValueError, match="precision is 'fp8'; allowed: fp32, tf32, fp16, bf16, or None"):
        tilerank.accelerate(model, precision="fp8")
    with pytest.raises(TilerankError, match="attention 'eager' serves no packed batches"):
        tilerank.accelerate(model, attention="eager")
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    with pytest.raises(ValueError, match="labels, output_attentions: not served"):
        fast(**inputs, labels=torch.zeros(5), output_attentions=True)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(5, 1, 1, 40\); expected \(5, 40\)"):
        fast(inputs["input_ids"], inputs["attention_mask"][:, None, None])
    with pytest.raises(ValueError, match="the first token of sequence 1 is masked"):
        fast(inputs["input_ids"], inputs["attention_mask"].flip(1))
    with pytest.raises(ValueError, match="position 48 is beyond the model's table of 48"):
        fast(torch.full((1, 49), 7))
    with pytest.raises(ValueError, match=r"input_ids has shape \(40,\)"):
        fast(inputs["input_ids"][0])


@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "position_ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_numbers_of_another_dtype_are_refused_as_by_the_model(name: str, dtype: torch.dtype) -> None:
    model = tiny()
    inputs = {"input_ids": torch.full((1, 4), 7)}
    inputs[name] = torch.ones(1, 4, dtype=dtype)
    with pytest.raises(RuntimeError):
        model(**inputs)
    with pytest.raises(TypeError, match=f"{name} is {dtype}; allowed: torch.int64, torch.int32"):
        tilerank.accelerate(model)(**inputs)
    fast = tilerank.accelerate(model)
    inputs[name] = torch.ones(1, 4, dtype=torch.int32)
    torch.testing.assert_close(fast(**inputs).logits, model(**inputs).logits.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "value", "last"),
    [
        ("input_ids", 2**32 + 7, 89),
        ("input_ids", 90, 89),
        ("input_ids", -1, 89),
        ("token_type_ids", 2**32, 1),
        ("token_type_ids", 2, 1),
        ("position_ids", -(2**32) + 3, 47),
        ("position_ids", 2**32 + 3, 47),
        ("position_ids", 48, 47),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_numbers_beyond_the_models_tables_are_refused(name: str, value: int, last: int, masked: bool) -> None:
    """Those of padding too, as the model does."""
    model = tiny()
    inputs = {"input_ids": torch.full((2, 4), 7), "attention_mask": torch.ones(2, 4, dtype=torch.int64)}
    inputs[name] = inputs.get(name, torch.ones(2, 4, dtype=torch.int64)).clone()
    inputs[name][1, 3] = value
    inputs["attention_mask"][1, 3] = not masked
    with pytest.raises((IndexError, RuntimeError)):
        model(**inputs)
    with pytest.raises(ValueError, match=f"{name} holds {value}; allowed: 0 to {last}, the rows of the model's table"):
        tilerank.accelerate(model)(**inputs)


def test_what_is_no_tensor_is_refused() -> None:
    model = tiny()
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    for wrong in ([[1, 2]], None, inputs):
        with pytest.raises(TypeError, match=rf"input_ids is a {type(wrong).__name__}; expected a tensor \[batch, seq"):
            fast(wrong)
    for name in ("attention_mask", "token_type_ids", "position_ids"):
        with pytest.raises(TypeError, match=f"{name} is a list; expected a tensor"):
            fast(**inputs | {name: [[1, 2]]})


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_that_the_config_asks_for_are_refused_by_name(name: str) -> None:
    model = tiny()
    model.set_attn_implementation("eager")  # the only one whose config may ask for attentions
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    expected = fast(**inputs).logits
    setattr(model.config, name, True)
    with pytest.raises(ValueError, match=f"{name} is True in the model's config: not served .* or pass {name}=False"):
        fast(**inputs)
    torch.testing.assert_close(fast(**inputs, **{name: False}).logits, expected, atol=0, rtol=0)


def test_parts_of_a_model_and_models_elsewhere_are_refused() -> None:
    model = tiny(head=False)
    with pytest.raises(TilerankError, match="Accelerated is not served: it has no base_model; served: whole models"):
        tilerank.accelerate(tilerank.accelerate(model))
    with pytest.raises(TilerankError, match="BertEncoder is not served: it has no base_model; served: whole models"):
        tilerank.accelerate(model.encoder)
    with pytest.raises(ValueError, match=r"graphs is True for a model on cpu; allowed: .* on a CUDA device"):
        tilerank.accelerate(model, graphs=True)
    with pytest.raises(TilerankError, match="the model is on meta; served: cpu, cuda; load its weights"):
        tilerank.accelerate(copy.deepcopy(model).to("meta"))


@torch.inference_mode()
def test_it_stays_where_and_as_it_was_made() -> None:
    model = tiny()
    fast = tilerank.accelerate(model)
    inputs = batch(model)
    expected = fast(**inputs).logits
    for change in (fast.half, fast.double, lambda: fast.to("meta"), lambda: fast.to_empty(device="meta")):
        with pytest.raises(TilerankError, match=r"on cpu in torch\.float32; .* change the model and call accelerate"):
            change()
    top = torch.nn.Sequential(fast, torch.nn.Identity()).to("cpu").float().train()
    assert top[0] is fast.cpu()
    with pytest.raises(TypeError, match="not pickled; pickle the model"):
        pickle.dumps(fast)
    torch.testing.assert_close(copy.deepcopy(fast)(**inputs).logits, expected, atol=0, rtol=0)


@torch.inference_mode()
def test_outputs_that_are_not_finite_are_an_error() -> None:
    model = tiny()
    model.classifier.bias[0] = float("nan")
    with pytest.raises(TilerankError, match="not finite"):
        tilerank.accelerate(model)(**batch(model))


@torch.inference_mode()
def test_the_real_cross_encoder(cross_encoder_dir: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder_dir, attn_implementation="sdpa").eval()
    model = model.float()
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder_dir)
    texts = [" ".join(random.Random(seed).choices(WORDS, k=20 + 40 * seed)) for seed in range(4)]
    inputs = tokenizer(["immune cancer"] * 4, texts, padding=True, truncation=True, return_tensors="pt")
    expected = model(**inputs).logits
    torch.testing.assert_close(tilerank.accelerate(model)(**inputs).logits, expected, atol=2e-5, rtol=0)
