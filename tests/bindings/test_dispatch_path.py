"""How transformers reaches the registered functions: which are called, how often, with which arguments.

`tilerank.kernels.huggingface` rests on these facts. A transformers release that moves the path turns this red before
it turns a ranking wrong.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

NAME = "recorder"
LAYERS = 2
MASK_ARGUMENTS = {
    "batch_size",
    "q_length",
    "kv_length",
    "q_offset",
    "kv_offset",
    "mask_function",
    "attention_mask",
    "allow_is_causal_skip",
    "allow_is_bidirectional_skip",
    "dtype",
    "config",
    "use_vmap",
    "device",
}


@pytest.fixture
def calls(monkeypatch):
    """Register recording functions under one name: (attention calls, mask calls)."""
    attention, masks = [], []

    def record_attention(module, query, key, value, attention_mask, **kwargs):
        attention.append((module, query, key, value, attention_mask, kwargs))
        return query.transpose(1, 2).contiguous(), None

    def record_mask(**kwargs):
        masks.append(kwargs)
        return kwargs["attention_mask"]

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, record_attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, record_mask)
    return attention, masks


def bert(**changes):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.5,
        **changes,
    )
    return BertModel._from_config(config, attn_implementation=NAME).eval()


@torch.no_grad()
def test_padded_call(calls):
    attention, masks = calls
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    bert()(torch.randint(5, 50, (2, 5)), attention_mask=padding)

    assert len(masks) == 1, "one mask a forward pass"
    (mask,) = masks
    assert set(mask) == MASK_ARGUMENTS, transformers.__version__
    assert (mask["batch_size"], mask["q_length"], mask["kv_length"]) == (2, 5, 5)
    assert (mask["q_offset"], mask["kv_offset"]) == (0, 0)
    assert mask["mask_function"] is bidirectional_mask_function
    assert mask["attention_mask"].dtype == torch.bool
    assert torch.equal(mask["attention_mask"], padding.bool())
    assert mask["allow_is_bidirectional_skip"] is True

    assert len(attention) == LAYERS, "one attention a layer"
    for module, query, key, value, passed, kwargs in attention:
        assert type(module).__name__ == "BertSelfAttention"
        assert module.is_causal is False
        for tensor in (query, key, value):
            assert tensor.shape == (2, 4, 5, 8)
            assert tensor.transpose(1, 2).is_contiguous(), "a [B,H,S,D] view of [B,S,H,D] memory"
        assert passed is attention[0][4], "the mask function's answer reaches every layer as it is"
        assert kwargs["dropout"] == 0.0
        assert kwargs["scaling"] == pytest.approx(8**-0.5)


@torch.no_grad()
def test_the_mask_function_is_asked_even_when_nothing_is_padded(calls):
    attention, masks = calls
    model, tokens = bert(), torch.randint(5, 50, (2, 5))
    model(tokens)
    assert masks[0]["attention_mask"] is None
    model(tokens, attention_mask=torch.ones(2, 5))
    assert masks[1]["attention_mask"].all()
    assert len(attention) == 2 * LAYERS


@torch.no_grad()
def test_a_name_without_a_mask_function_loses_the_mask(calls, monkeypatch):
    """The trap that `tilerank.register` closes; were it gone, registering both would still be right."""
    attention, masks = calls
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, NAME)
    bert()(torch.randint(5, 50, (2, 5)), attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]))
    assert not masks
    assert all(call[4] is None for call in attention)


@torch.no_grad()
def test_packed_arguments_reach_the_attention_function(calls):
    attention, masks = calls
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    bert()(
        torch.randint(5, 50, (1, 8)),
        position_ids=positions,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=5,
        max_length_k=5,
    )
    assert masks[0]["attention_mask"] is None
    for *_, kwargs in attention:
        assert kwargs["cu_seq_lens_q"] is bounds
        assert kwargs["cu_seq_lens_k"] is bounds
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == 5
        assert kwargs["position_ids"] is positions


@torch.no_grad()
def test_decoder_call(calls):
    attention, masks = calls
    model = bert(is_decoder=True, add_cross_attention=True)
    encoder = torch.randn(2, 7, 32)
    model(
        torch.randint(5, 50, (2, 5)),
        attention_mask=torch.ones(2, 5),
        encoder_hidden_states=encoder,
        encoder_attention_mask=torch.ones(2, 7),
        use_cache=False,
    )
    own, cross = masks
    assert own["mask_function"] is causal_mask_function
    assert own["allow_is_causal_skip"] is True
    assert cross["mask_function"] is bidirectional_mask_function
    assert (cross["q_length"], cross["kv_length"]) == (5, 7)
    names = [(type(call[0]).__name__, call[0].is_causal, tuple(call[2].shape)) for call in attention]
    layer = [("BertSelfAttention", True, (2, 4, 5, 8)), ("BertCrossAttention", False, (2, 4, 7, 8))]
    assert names == layer * LAYERS


@torch.no_grad()
def test_requested_attention_weights_reach_the_attention_function(calls):
    attention, _ = calls
    bert()(torch.randint(5, 50, (2, 5)), output_attentions=True)
    assert all(call[5]["output_attentions"] is True for call in attention)


def test_training_passes_the_dropout(calls):
    attention, _ = calls
    bert(attention_probs_dropout_prob=0.25).train()(torch.randint(5, 50, (2, 5)))
    assert all(call[5]["dropout"] == 0.25 for call in attention)
