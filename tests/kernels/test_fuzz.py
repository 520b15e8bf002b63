"""The fuzz itself, on the CPU: what it draws, that the reference passes it, and that what is wrong does not."""

from __future__ import annotations

import pytest
import torch

import tilerank
from tests.kernels import fuzz
from tilerank.kernels import registry

REFERENCE = registry.get("reference")


def products(case):
    return len(case.q_lengths) * case.heads * max(case.q_lengths) * max(case.k_lengths) * case.head_dim


# The reference sums in double on one core: its smaller cases.
CASES = [case for seed in range(150) if products(case := fuzz.draw_case(REFERENCE, seed)) < 2e6]


def test_cases_are_enough_and_cover_what_they_should():
    rows = [row for row in registry.attention_rows() if row.device == "cuda"]
    cases = [case for row in rows for case in fuzz.cases_of(row)]
    assert len(cases) >= 2000
    assert len({*cases}) == len(cases)
    for name, kinds in {
        "dtype": set(registry.DTYPES),
        "layout": set(registry.LAYOUTS),
        "mask": {None, "boolean", "additive"},
        "scales": set(fuzz.SCALES),
        "memory": set(fuzz.MEMORY),
        "causal": {False, True},
        "hides_keys": {False, True},
        "row": {row.name for row in rows},
    }.items():
        assert {getattr(case, name) for case in cases} == kinds, name


def test_a_case_is_drawn_from_what_its_row_serves():
    for row in registry.attention_rows():
        for case in fuzz.cases_of(row)[:50]:
            masks = {case.mask, *["causal"] * case.causal, *["key_lengths"] * case.hides_keys} - {None}
            request = registry.Request(
                *(row.device, row.max_sm or 120, case.dtype, case.head_dim, case.layout, max(case.k_lengths)),
                frozenset(masks),
            )
            assert registry.refusal(row, request) is None, case
            assert fuzz.draw_case(row, case.seed) == case


def test_the_reference_is_within_its_bounds():
    fuzz.check(CASES, "cpu")


@pytest.mark.parametrize(
    "damage",
    [
        lambda out: out * 1.02,
        lambda out: out + 0.05 * out.roll(1, -1),
        lambda out: torch.full_like(out, float("nan")),
    ],
)
def test_a_wrong_result_is_beyond_its_bound(monkeypatch: pytest.MonkeyPatch, damage):
    honest, packed = tilerank.attention, tilerank.attention_varlen
    monkeypatch.setattr(tilerank, "attention", lambda *given, **options: damage(honest(*given, **options)))
    monkeypatch.setattr(tilerank, "attention_varlen", lambda *given, **options: damage(packed(*given, **options)))
    filled = [case for case in CASES if max(case.q_lengths) > 16 and max(case.k_lengths) > 16 and case.head_dim > 1]
    caught = sum(not fuzz.excess(case, "cpu").item() <= 0 for case in filled)
    assert caught > 0.8 * len(filled)
    with pytest.raises(AssertionError, match=r"calls are beyond their bound, the first:\nCase\(row='reference'"):
        fuzz.check(filled, "cpu")
