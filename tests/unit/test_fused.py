"""What the fused encoder proves of a model before it splits fp32 into fp16 terms, and which models it takes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tilerank import fused
from tilerank.fused import Bound, TorchParts, refusal
from tilerank.packed_attention import Attend


def norm_of(width: int, seed: int = 0) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(width).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(width, generator=generator, dtype=torch.double))
        norm.bias.copy_(torch.randn(width, generator=generator, dtype=torch.double))
    return norm


@torch.no_grad()
def test_a_bound_holds_for_the_worst_rows() -> None:
    norm = norm_of(48)
    bound = Bound.of_norm(norm)
    # One element far from all others takes nearly the whole norm.
    worst = torch.cat([torch.eye(48), -torch.eye(48), torch.randn(200, 48)]).double() * 1e3
    states = norm(worst)
    assert states.abs().max() <= bound.element
    assert states.norm(dim=1).max() <= bound.norm
    assert states.abs().max() > 0.9 * bound.element, "no tighter bound holds"
    linear = torch.nn.Linear(48, 96).double()
    after = bound.after(linear.weight, linear.bias)
    for values in (linear(states), functional.gelu(linear(states)), linear(states).mean(0, keepdim=True)):
        assert values.abs().max() <= after.element
        assert values.norm(dim=1).max() <= after.norm


def test_a_power_of_two_keeps_what_is_split_below_the_end_of_fp16() -> None:
    for element in (0.01, 0.9, 31.7, 500.0, 32768.0):
        exponent = fused._split_exponent(Bound(element, 1.0))
        assert 0 <= exponent <= 10
        assert element * 2.0**exponent <= 32768
        assert exponent == 10 or element * 2.0 ** (exponent + 1) > 32768
    for element in (40000.0, math.inf, math.nan):
        assert fused._split_exponent(Bound(element, 1.0)) < 0, "such a layer is computed in fp32 proper"


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
@torch.inference_mode()
def test_other_activations_are_the_models_own(activation: str) -> None:
    from transformers import BertConfig, BertModel

    from tilerank.packed_attention import choose

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=90, hidden_act=activation, initializer_range=0.5, **small)).eval()
    found = fused._activation(model.encoder.layer[0].intermediate.intermediate_act_fn)
    assert (found is fused.gelu) == (activation == "gelu"), "the kernels' GELU is that of the error function"
    attention = choose("sdpa", torch.device("cpu"), torch.float32, 16, 64)
    body = fused.FusedModel(model, torch.device("cpu"), "fp32", attention, first_only=False)
    ids = torch.randint(5, 90, (1, 23), dtype=torch.int32)
    places, types = torch.arange(23, dtype=torch.int32), torch.zeros(23, dtype=torch.int32)
    bounds = torch.tensor([0, 23], dtype=torch.int32)
    states = body((ids[0], types, places, bounds, bounds[:1]), 23)
    torch.testing.assert_close(states, model(ids.long()).last_hidden_state[0], atol=2e-5, rtol=0)
    assert set(body.parts.used.values()) == {"torch"}


class WholeLayers(TorchParts):
    """Goes from attention to attention at once where ``count`` allows it, by torch's operations."""

    def __init__(self, count: int) -> None:
        super().__init__(torch.device("cpu"), "fp32")
        self.left = count

    def between(self, layer: torch.nn.Module, following: fused.Weights | None) -> fused.Between | None:
        self.left -= 1
        if self.left < 0:
            return None

        def go(found: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            x = layer.output(layer.intermediate(first := layer.attention.output(found, x)), first)
            return x, None if following is None else functional.linear(x, *following)

        return go


@pytest.mark.parametrize("first_only", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 4])
@torch.inference_mode()
def test_whole_layers_at_once(first_only: bool, layers: int) -> None:
    from transformers import BertConfig, BertModel

    from tilerank.packed_attention import choose

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=90, initializer_range=0.5, **small)).eval()
    attention = choose("sdpa", torch.device("cpu"), torch.float32, 16, 64)
    ids, types = torch.randint(5, 90, (23,), dtype=torch.int32), torch.zeros(23, dtype=torch.int32)
    bounds = torch.tensor([0, 9, 23], dtype=torch.int32)
    places = torch.cat([torch.arange(9), torch.arange(14)]).int()

    def states(count: int) -> tuple[torch.Tensor, WholeLayers]:
        parts = WholeLayers(count)
        body = fused.FusedModel(model, parts._device, "fp32", attention, first_only=first_only, parts=parts)
        return body((ids, types, places, bounds, bounds[:2]), 14), parts

    apart, _ = states(0)
    together, parts = states(layers)
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=0)
    assert parts.left == (1 if first_only else 0), "the last layer goes on with first tokens alone"
    torch.testing.assert_close(states(1)[0], apart, atol=2e-5, rtol=0)  # all layers or none


@pytest.mark.parametrize("overlap", [True, False])
@torch.inference_mode()
def test_attention_may_begin_before_the_product_in_front_of_it_ends(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Where there is one that can, and only over all rows: the few-row parts make bounds of their own."""
    from transformers import BertConfig, BertModel

    from tilerank.packed_attention import PackedAttention, choose

    monkeypatch.setattr(fused, "OVERLAP", overlap)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=90, **small)).eval()
    plain = choose("sdpa", torch.device("cpu"), torch.float32, 16, 64)
    called: list[str] = []

    def counted(name: str) -> Attend:
        return lambda *arguments: called.append(name) or plain.attend(*arguments)

    attention = PackedAttention("counted", counted("attend"), "a test", counted("overlapping"))
    body = fused.FusedModel(model, torch.device("cpu"), "fp32", attention, first_only=True)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    body((*torch.zeros(3, 5, dtype=torch.int32), bounds, bounds[:2]), 3)
    assert called == ["overlapping" if overlap else "attend"] * 2 + ["attend"]


def test_layers_of_another_make_are_refused() -> None:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=90, **small))
    assert refusal(model) is None
    model.encoder.layer[0].output.dense = torch.nn.Linear(64, 32, bias=False)
    assert "served: torch.nn.Linear with a bias" in (refusal(model) or "")
    assert TorchParts(torch.device("cpu"), "fp32").used == {}


@pytest.mark.parametrize(("family", "is_tanh"), [("Bert", True), ("XLMRoberta", True), ("Electra", False)])
@torch.inference_mode()
def test_heads_of_transformers(family: str, is_tanh: bool) -> None:
    """A head that is two layers with tanh between is made of parts; another is the model's own, copied."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = getattr(transformers, f"{family}Config")(vocab_size=90, num_labels=3, initializer_range=0.5, **small)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    few = TorchParts(torch.device("cpu"), "fp32")
    head = fused._head(model, few, torch.device("cpu"), torch.float32)
    assert set(few.used) == ({"pooler", "classifier"} if is_tanh else set())
    x = torch.randn(5, 32)
    pooler = getattr(model.base_model, "pooler", None)
    expected = model.classifier(x[:, None] if pooler is None else pooler(x[:, None]))
    torch.testing.assert_close(head(x), expected.view(5, 3), atol=1e-6, rtol=1e-5)
