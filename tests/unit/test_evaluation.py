"""Ranking measures: a worked example, the conventions, and every value against ir_measures."""

import itertools
import math
import random

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilerank.evaluation import (
    bootstrap_difference,
    compare_rankings,
    evaluate,
    kendall_tau,
    ordered_run,
)

# The worked example: grades from 1 on are relevant; no results for q2.
#
#   q1  judged a 2, b 1, c 0      ranking x, a, b    gains 0 2 1
#   q2  judged d 1                (no results)
#   q3  judged e 1, f 1           ranking e, y, f    gains 1 0 1
QRELS = {"q1": {"a": 2, "b": 1, "c": 0}, "q2": {"d": 1}, "q3": {"e": 1, "f": 1}}
RUN = {"q1": {"x": 0.9, "a": 0.8, "b": 0.7}, "q3": {"f": -3.0, "e": 2.0, "y": 0.5}}

# discounts 1/log2(rank + 1): 1, 0.630930, 0.5
#   q1  DCG 0 + 2 x 0.630930 + 1 x 0.5 = 1.761860   ideal 2 + 0.630930 = 2.630930   nDCG 0.669672
#   q3  DCG 1 + 0 + 0.5                = 1.5        ideal 1 + 0.630930 = 1.630930   nDCG 0.919721
#   q1  relevant at ranks 2, 3 of 2 relevant: AP (1/2 + 2/3) / 2 = 7/12, RR 1/2
#   q3  relevant at ranks 1, 3 of 2 relevant: AP (1/1 + 2/3) / 2 = 5/6,  RR 1
WORKED = {
    "nDCG@10": {"q1": 0.669672, "q2": 0.0, "q3": 0.919721, "mean": 0.529798},
    "nDCG": {"q1": 0.669672, "q2": 0.0, "q3": 0.919721, "mean": 0.529798},
    "nDCG@1": {"q1": 0.0, "q2": 0.0, "q3": 1.0, "mean": 1 / 3},
    "nDCG@2": {"q1": 1.261860 / 2.630930, "q2": 0.0, "q3": 1 / 1.630930, "mean": 0.364257},
    "RR@10": {"q1": 1 / 2, "q2": 0.0, "q3": 1.0, "mean": 1 / 2},
    "RR@1": {"q1": 0.0, "q2": 0.0, "q3": 1.0, "mean": 1 / 3},
    "AP": {"q1": 7 / 12, "q2": 0.0, "q3": 5 / 6, "mean": 17 / 36},
    "AP@2": {"q1": 1 / 4, "q2": 0.0, "q3": 1 / 2, "mean": 1 / 4},
    "AP(rel=2)": {"q1": 1 / 2, "q2": 0.0, "q3": 0.0, "mean": 1 / 6},
    "R@2": {"q1": 1 / 2, "q2": 0.0, "q3": 1 / 2, "mean": 1 / 3},
    "R@50": {"q1": 1.0, "q2": 0.0, "q3": 1.0, "mean": 2 / 3},
    "P@2": {"q1": 1 / 2, "q2": 0.0, "q3": 1 / 2, "mean": 1 / 3},
    "P@5": {"q1": 2 / 5, "q2": 0.0, "q3": 2 / 5, "mean": 4 / 15},
    "Success@1": {"q1": 0.0, "q2": 0.0, "q3": 1.0, "mean": 1 / 3},
}


@pytest.mark.parametrize("measure", WORKED)
def test_three_queries_worked_out_on_paper(measure):
    result = evaluate(QRELS, RUN, [measure])
    expected = dict(WORKED[measure])
    assert result[measure] == pytest.approx(expected.pop("mean"), abs=1e-6)
    assert result.per_query[measure] == pytest.approx(expected, abs=1e-6)


def test_result_is_a_mapping_in_the_order_asked_for_and_counts_queries():
    result = evaluate(QRELS, RUN, ["RR@10", "AP"], corpus={"a", "b", "c", "d", "e", "x", "y"})
    assert list(result) == ["RR@10", "AP"]
    assert dict(result) == {"RR@10": 0.5, "AP": pytest.approx(17 / 36)}
    assert (result.queries, result.with_results, result.missing_documents) == (3, 2, 1)  # f is missing


def test_query_with_an_empty_pool_counts_zero_like_one_that_is_absent():
    absent = evaluate(QRELS, RUN, ["nDCG@10"])
    empty = evaluate(QRELS, {**RUN, "q2": {}}, ["nDCG@10"])
    assert empty == absent
    assert empty.with_results == absent.with_results == 2


def test_queries_without_judgements_change_nothing():
    assert evaluate(QRELS, {**RUN, "unjudged": {"a": 1.0}}, ["AP"]) == evaluate(QRELS, RUN, ["AP"])


def test_query_judged_without_a_relevant_document_counts_zero():
    result = evaluate({"q": {"a": 0}, "r": {"a": 1}}, {"q": {"a": 1.0}, "r": {"a": 1.0}}, ["nDCG@10", "AP", "R@5"])
    assert dict(result) == {"nDCG@10": 0.5, "AP": 0.5, "R@5": 0.5}


def test_judged_document_missing_from_the_corpus_counts_as_relevant_and_not_found():
    qrels = {"q": {"here": 1, "gone": 1}}
    result = evaluate(qrels, {"q": {"here": 1.0}}, ["R@10", "AP"], corpus=["here", "other"])
    assert dict(result) == {"R@10": 0.5, "AP": 0.5}
    assert result.missing_documents == 1


def test_query_id_equal_to_a_document_id_drops_no_hit():
    assert evaluate({"7": {"7": 1}}, {"7": {"7": 1.0, "8": 0.5}}, ["RR@10"])["RR@10"] == 1.0


def test_negative_grade_is_not_relevant_and_gains_nothing():
    result = evaluate({"q": {"spam": -2, "a": 1}}, {"q": {"spam": 2.0, "a": 1.0}}, ["RR", "nDCG@10"])
    assert dict(result) == {"RR": 0.5, "nDCG@10": pytest.approx(1 / math.log2(3))}


def test_ties_keep_the_order_of_the_run():
    assert evaluate({"q": {"z": 1}}, {"q": {"z": 1.0, "a": 1.0}}, ["RR"])["RR"] == 1.0
    assert evaluate({"q": {"z": 1}}, {"q": {"a": 1.0, "z": 1.0}}, ["RR"])["RR"] == 0.5


def test_unsigned_scores_rank_by_value():
    scores = np.array([0, 5, 5, 200], dtype=np.uint8)
    run = dict(zip("abcd", scores, strict=True))
    assert evaluate({"q": {"d": 3, "b": 2, "c": 1}}, {"q": run}, ["nDCG"])["nDCG"] == 1.0


def test_scores_that_differ_below_float32_are_no_tie():
    assert evaluate({"q": {"a": 1}}, {"q": {"z": 1.0, "a": 1.0 + 1e-12}}, ["RR"])["RR"] == 1.0


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("ndcg@10", "unknown measure 'ndcg@10'"),
        ("nDCG@", "unknown measure"),
        ("nDCG@-1", "unknown measure"),
        ("nDCG@1.5", "unknown measure"),
        ("nDCG@10 ", "unknown measure"),
        ("", "unknown measure ''"),
        ("BLEU@4", "unknown measure"),
        ("R", "needs a cutoff"),
        ("P(rel=2)", "needs a cutoff"),
        ("Success", "needs a cutoff"),
        ("AP@0", "at least 1"),
        ("AP(rel=0)", "rel must be at least 1"),
        ("nDCG(rel=2)@10", "not for nDCG"),
    ],
)
def test_bad_measure_is_refused_by_name(name, complaint):
    with pytest.raises(ValueError, match=complaint.replace("(", r"\(")) as caught:
        evaluate(QRELS, RUN, ["AP", name])
    assert repr(name) in str(caught.value)


def test_nan_score_is_refused_and_located():
    with pytest.raises(ValueError, match=r"run\['q1'\]: the score of document number 1 is NaN"):
        evaluate(QRELS, {"q1": {"a": 1.0, "b": math.nan}}, ["AP"])
    with pytest.raises(ValueError, match=r"run\['unjudged'\]: the score of document number 0 is NaN"):
        evaluate(QRELS, {**RUN, "unjudged": {"a": math.nan}}, ["AP"])
    with pytest.raises(ValueError, match="NaN"):
        ordered_run(["a", "b"], [1.0, math.nan])


def test_wrong_kinds_of_input_are_refused():
    with pytest.raises(TypeError, match="pass \\['AP'\\]"):
        evaluate(QRELS, RUN, "AP")
    with pytest.raises(TypeError, match="qrels: ids must be strings, got 1"):
        evaluate({1: {"a": 1}}, {"1": {"a": 1.0}}, ["AP"])
    with pytest.raises(TypeError, match="run: ids must be strings, got 7"):
        evaluate({"1": {"7": 1}}, {"1": {7: 1.0}}, ["AP"])
    with pytest.raises(TypeError, match="integer grade"):
        evaluate({"q": {"a": 0.5}}, {"q": {"a": 1.0}}, ["AP"])
    with pytest.raises(TypeError, match=r"run must map query ids .* got None"):
        evaluate(QRELS, None, ["AP"])
    with pytest.raises(TypeError, match=r"run\['q1'\] must map document ids .* got \['a'\]"):
        evaluate(QRELS, {"q1": ["a"]}, ["AP"])
    for score in (None, "1", 10**400):
        with pytest.raises(
            TypeError, match=rf"run\['q1'\]: the score of document number 1 is '?{score!s:.9}.*not a float"
        ):
            evaluate(QRELS, {"q1": {"a": 1.0, "b": score}}, ["AP"])
    with pytest.raises(TypeError, match=r"corpus must be a collection .* the string 'abc'"):
        evaluate(QRELS, {}, ["AP"], corpus="abc")
    with pytest.raises(TypeError, match=r"a measure must be named by a string .* got 10"):
        evaluate(QRELS, RUN, ["AP", 10])
    with pytest.raises(ValueError, match="no queries"):
        evaluate({}, RUN, ["AP"])


def test_inputs_are_not_changed():
    qrels = {query_id: dict(judged) for query_id, judged in QRELS.items()}
    run = {query_id: dict(results) for query_id, results in RUN.items()}
    evaluate(qrels, run, list(WORKED))
    assert (qrels, run) == (QRELS, RUN)
    assert list(run["q3"]) == list(RUN["q3"])


DOCUMENTS = [f"d{number}" for number in range(12)]
ALL_MEASURES = ["nDCG@10", "nDCG@3", "nDCG", "RR@10", "RR@2", "RR", "AP", "AP@4", "AP(rel=2)", "R@5", "R(rel=2)@3"]
ALL_MEASURES += ["P@1", "P@7", "P(rel=2)@3", "Success@1", "Success(rel=2)@5", "MRR@5", "MAP", "NDCG@5", "Recall@2"]


@st.composite
def judgements_and_runs(draw):
    """Judgements of up to four queries and runs without ties, some queries without results or judgements."""
    queries = [f"q{number}" for number in range(draw(st.integers(1, 4)))]
    grades = st.dictionaries(st.sampled_from(DOCUMENTS), st.integers(0, 3), min_size=1)
    qrels = {query_id: draw(grades) for query_id in queries}
    run = {}
    for query_id in [*queries, "unjudged"]:
        found = draw(st.lists(st.sampled_from(DOCUMENTS), unique=True))
        scores = draw(st.permutations(range(len(found))))
        if found or draw(st.booleans()):
            run[query_id] = {doc_id: float(score) for doc_id, score in zip(found, scores, strict=True)}
    return qrels, run


@settings(deadline=None, max_examples=150)
@given(judgements_and_runs())
def test_every_measure_equals_ir_measures(case):
    qrels, run = case
    result = evaluate(qrels, run, ALL_MEASURES)
    for name in ALL_MEASURES:
        measure = ir_measures.parse_measure(name)
        theirs = {metric.query_id: metric.value for metric in ir_measures.iter_calc([measure], qrels, run)}
        assert result.per_query[name] == pytest.approx({query_id: theirs[query_id] for query_id in qrels}, abs=1e-12)
        assert result[name] == pytest.approx(ir_measures.calc_aggregate([measure], qrels, run)[measure], abs=1e-12)


@settings(deadline=None)
@given(judgements_and_runs(), st.randoms(use_true_random=False))
def test_renaming_documents_changes_no_measure(case, shuffler):
    qrels, run = case
    tied = {query_id: {doc_id: score // 3 for doc_id, score in results.items()} for query_id, results in run.items()}
    names = [f"n{number}" for number in range(len(DOCUMENTS))]
    shuffler.shuffle(names)
    renamed = dict(zip(DOCUMENTS, names, strict=True))
    other_qrels = {query: {renamed[doc]: grade for doc, grade in judged.items()} for query, judged in qrels.items()}
    other_run = {query: {renamed[doc]: score for doc, score in results.items()} for query, results in tied.items()}
    assert evaluate(other_qrels, other_run, ALL_MEASURES) == evaluate(qrels, tied, ALL_MEASURES)


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), max_size=12))
def test_ordered_run_falls_strictly_and_keeps_the_first_stage_order_in_ties(scores):
    doc_ids = DOCUMENTS[: len(scores)]
    run = ordered_run(doc_ids, scores)
    values = list(run.values())
    assert sorted(run) == sorted(doc_ids)
    assert all(higher > lower for higher, lower in itertools.pairwise(values))
    rank = {doc_id: position for position, doc_id in enumerate(run)}
    for first, first_score in enumerate(scores):
        for second, second_score in enumerate(scores):
            if first_score > second_score or (first_score == second_score and first < second):
                assert rank[doc_ids[first]] < rank[doc_ids[second]]


def test_ordered_run_takes_half_precision_and_infinities():
    assert list(ordered_run(["a", "b", "c"], np.array([-np.inf, 1.5, np.inf], dtype=np.float16))) == ["c", "b", "a"]


def test_ordered_run_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"shape \(2,\), one a document, got \(1,\)"):
        ordered_run(["a", "b"], [1.0])
    with pytest.raises(ValueError, match="'a' more than once"):
        ordered_run(["a", "b", "a"], [1.0, 2.0, 3.0])


def test_equal_scores_agree_wholly():
    scores = {"q1": [3.0, 1.0, 2.0], "q2": [0.5]}
    agreement = compare_rankings(scores, {query_id: list(values) for query_id, values in scores.items()})
    assert (agreement.top10_exact, agreement.top10_ties, agreement.queries) == (1.0, 0, 2)
    assert (agreement.max_abs_logit_diff, agreement.kendall_tau) == (0.0, 1.0)


def test_neighbours_closer_than_twice_the_largest_difference_may_swap_and_are_counted():
    # The largest difference is 0.25: neighbours less than 0.5 apart may swap. In q1 the first two are 0.25 apart.
    agreement = compare_rankings(
        {"q1": [4.25, 4.0, 1.0], "q2": [2.0, 1.0]}, {"q1": [4.0, 4.125, 1.25], "q2": [2.0, 1.0]}
    )
    assert (agreement.max_abs_logit_diff, agreement.top10_exact, agreement.top10_ties) == (0.25, 1.0, 1)
    # q1: pairs 3, one of them turned round: (2 - 1) / 3; q2: 1.
    assert agreement.kendall_tau == pytest.approx((1 / 3 + 1) / 2)


def test_gap_of_exactly_twice_the_largest_difference_is_no_tie():
    # Baseline order: second, first, 2.0 apart. The other scores tie, so the first stage's order decides.
    agreement = compare_rankings({"q": [0.0, 2.0]}, {"q": [1.0, 1.0]})
    assert (agreement.max_abs_logit_diff, agreement.top10_exact, agreement.top10_ties) == (1.0, 0.0, 0)


def test_only_neighbours_may_swap():
    close = [1.0, 0.99, 0.98, 0.0]
    rotated = compare_rankings({"q": close}, {"q": [0.97, 0.99, 0.98, 0.0]})  # first to third place
    assert (rotated.top10_exact, rotated.top10_ties) == (0.0, 0)
    two_swaps = compare_rankings({"q": [*close, -0.01]}, {"q": [0.985, 0.995, 0.98, -0.02, -0.005]})
    assert (two_swaps.top10_exact, two_swaps.top10_ties) == (1.0, 1)


def test_swap_across_the_end_of_the_top_ten():
    leaders = [float(20 - rank) for rank in range(9)]
    baseline = {"q": [*leaders, 11.0, 10.9, 10.8]}
    eleventh_enters = compare_rankings(baseline, {"q": [*leaders, 10.9, 11.0, 10.8]})
    assert (eleventh_enters.top10_exact, eleventh_enters.top10_ties) == (1.0, 1)
    twelfth_enters = compare_rankings(baseline, {"q": [*leaders, 10.9, 10.8, 11.0]})
    assert (twelfth_enters.top10_exact, twelfth_enters.top10_ties) == (0.0, 0)


def test_order_below_the_top_ten_does_not_matter_for_it():
    baseline = [float(20 - rank) for rank in range(14)]
    other = [*baseline[:10], *reversed(baseline[10:])]
    agreement = compare_rankings({"q": baseline}, {"q": other})
    assert (agreement.top10_exact, agreement.top10_ties) == (1.0, 0)
    assert agreement.kendall_tau == pytest.approx((91 - 2 * 6) / 91)


def test_comparison_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="'b' is in only one"):
        compare_rankings({"a": [1.0], "b": [1.0]}, {"a": [1.0]})
    with pytest.raises(ValueError, match="2 baseline scores but 1 other"):
        compare_rankings({"a": [1.0, 2.0]}, {"a": [1.0]})
    with pytest.raises(ValueError, match=r"other\['a'\]\[1\] is nan"):
        compare_rankings({"a": [1.0, 2.0]}, {"a": [1.0, math.nan]})
    with pytest.raises(ValueError, match="no candidate"):
        compare_rankings({"a": []}, {"a": []})


def test_kendall_tau_worked_out_on_paper():
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx((5 - 1) / 6)
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    # One pair is tied in the first list: 2 agree, none disagrees, sqrt((3 - 1) x 3) below.
    assert kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))


def test_kendall_tau_where_it_is_undefined():
    assert kendall_tau([1, 1], [2, 2]) == kendall_tau([1], [2]) == kendall_tau([], []) == 1.0
    with pytest.raises(ValueError, match="the same candidates, got 1 and 2"):
        kendall_tau([1], [1, 1])
    assert kendall_tau([1, 1], [1, 2]) == kendall_tau([1, 2], [1, 1]) == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=30))
def test_kendall_tau_equals_scipy(pairs):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    first, second = zip(*pairs, strict=True)
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert kendall_tau(first, second) == pytest.approx(stats.kendalltau(first, second).statistic)


def test_bootstrap_of_a_constant_difference_has_no_width():
    first = {f"q{number}": number + 0.25 for number in range(20)}
    second = {f"q{number}": float(number) for number in range(20)}
    assert bootstrap_difference(first, second) == (0.25, 0.25)
    assert bootstrap_difference(second, first) == (-0.25, -0.25)


def test_bootstrap_interval_is_as_wide_as_the_normal_approximation():
    generator = random.Random(5)
    first = {f"q{number}": generator.gauss(0.1, 1.0) for number in range(400)}
    second = dict.fromkeys(first, 0.0)
    low, high = bootstrap_difference(first, second, seed=1)
    values = np.array(list(first.values()))
    half_width = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half_width, abs=0.1 * half_width)
    assert high == pytest.approx(values.mean() + half_width, abs=0.1 * half_width)


def test_bootstrap_is_paired_seeded_and_blind_to_the_order_of_queries():
    generator = random.Random(3)
    second = {f"q{number}": generator.random() for number in range(30)}
    first = {query_id: value + generator.uniform(0.0, 0.01) for query_id, value in second.items()}
    interval = bootstrap_difference(first, second, seed=7)
    assert 0.0 < interval[0] < interval[1] < 0.01  # unpaired, the spread of the queries would swamp this
    assert bootstrap_difference(dict(reversed(first.items())), second, seed=7) == interval
    assert bootstrap_difference(first, second, seed=8) != interval


def test_bootstrap_refuses_other_queries():
    with pytest.raises(ValueError, match="same queries"):
        bootstrap_difference({"a": 1.0}, {"b": 1.0})
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_difference({}, {})
