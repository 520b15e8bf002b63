"""Summary, tables, markers, pictures and page, on a synthetic record that has every key of the contract."""

import copy
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tilerank.errors import TilerankError
from tilerank.report import (
    Record,
    build_report,
    ladder_csv,
    print_table,
    read_records,
    readme_tables,
    summarise,
    update_markers,
)
from tilerank.report.analysis import HEAD_DIM, KEYS_PER_QUERY, analyse, devices_table, gain
from tilerank.report.counters import counters_of
from tilerank.report.predictions import predicted_time
from tilerank.report.roofline import roofline_table
from tilerank.report.tables import TABLES

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
PROVENANCE = {
    "commit": "0123456789abcdef",
    "dirty": False,
    "gpu": "NVIDIA H200",
    "cpu": "Xeon",
    "driver": "570.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "time": "2026-11-29T10:00:00+00:00",
    "command": "python -m stages.example",
}
PREDICTIONS = {"naive": "Slow & <simple>.", "fused": "1,000 us masked, from 2,000. Fast.", "never_measured": "9 us."}


def quality(ndcg10):
    return {
        "ndcg10": ndcg10,
        "mrr10": 0.7412,
        "recall10": 0.8512,
        "ndcg10_diff_low": -0.0031,
        "ndcg10_diff_high": 0.0042,
        "top10_exact": 0.985,
        "top10_ties": 4,
        "queries": 300,
        "max_abs_logit_diff": 1.9e-5,
        "kendall_tau": 0.9993,
    }


def by_precision(values):
    return {precision: dict(values) for precision in PRECISIONS}


RUNG = {"unmasked_us": 30111.0, "registers": 123, "spill_bytes": 8, "occupancy": 0.27, "sdpa_max_abs_error": 1.7e-6}
RESOURCES = {"registers": 141, "shared_bytes": 0, "spill_bytes": 0, "stack_bytes": 0}
PEER = {"best_peer": "library|x", "best_peer_us": 89.1}
FULL = {
    "retrieve": {
        "workload": {
            "scifact": {
                "sequences": 50,
                "tokens": 18012,
                "mean_tokens": 360.2,
                "padded_rows": 43.5,
                "square_ratio": 0.5341,
                "histogram": {"edges": [0, 128, 256, 384, 512], "rows": [1, 20, 300, 179]},
            }
        },
        "quality": {"bm25_ndcg10": 0.6617, "bm25_recall50": 0.8686},
    },
    "profile_baseline": {
        "profile": {
            "tokenize_share": 0.621,
            "forward_share": 0.352,
            "attention_share": 0.117,
            "gemm_share": 0.209,
            "amdahl_ceiling": 1.13,
        }
    },
    "build_kernels_fused": {
        "build_kernels": {
            "fused": {
                "archs": {
                    arch: {"kernels": {"tilerank::fused::kernel<32>": dict(RESOURCES)}, **RESOURCES}
                    for arch in ("sm_75", "sm_90a")
                }
            }
        }
    },
    "profile_kernels_fused": {
        "profile_kernels": {
            "fused": {
                "available": True,
                "kernels": {
                    "0": {
                        "instructions": 2.0e6,
                        "instructions_per_cycle": 2.5,
                        "dram_throughput_pct": 5.0,
                        "stalls": {"short_scoreboard": 2.0, "wait": 0.75, "not_selected": 0.25},
                    }
                },
            }
        }
    },
    "bench_attention_naive": {
        "digest": "aa",
        "ladder": {"naive": {"us": 28600.0, "speedup_vs_sdpa": 0.045, "max_abs_error": 2.1e-6, **RUNG}},
    },
    "bench_attention_fused": {
        "digest": "bb",
        "ladder": {
            "fused": {
                "us": 1050.0,
                "masked": True,
                "block": "32x1x1",
                "shared_bytes": 8192,
                "kernel": "void tilerank::fused::kernel<32>(tilerank::AttentionArgs)",
                "share_of_floor": 0.1622,
                "floor_bound": "products",
                "speedup_vs_sdpa": 1.22,
                "best_peer": "mem-efficient packed",
                "best_peer_us": 578.0,
                "speedup_vs_best_peer": 0.55,
                "max_abs_error": 2.2e-6,
            },
            "another": {"us": 2050.0, "speedup_vs_sdpa": 0.62, "max_abs_error": 2.2e-6},
            "triple": {"us": 905.0, "masked": True, "products": "fp16x3"},
        },
        "rungs": {
            "fp16": {
                "fused": {"packed_us": 77.7, "padded_us": 88.8, "speedup_vs_best_peer": 1.09, "best_peer": "flash"}
                | {"max_abs_error": 1e-3, "share_of_floor": 0.325, "scales": {"x8": {"speedup_vs_peer": 1.0301}}}
                | RUNG
            }
        },
        "attention": by_precision(
            {
                "variant": "mma",
                "us": 49.5,
                "padded_us": 61.2,
                "speedup_vs_best_peer": 1.8,
                "speedup_vs_sdpa_masked": 4.89,
                "max_abs_error": 1.1e-3,
                "sdpa_max_abs_error": 1.2e-3,
                "floor_us": 25.3,
                "share_of_floor": 0.511,
                **PEER,
            }
        ),
    },
    "integrate_hf": {
        "drop_in": by_precision({"ms": 20.1, "baseline_ms": 23.8, "speedup": 1.184, "predicted_speedup": 1.201}),
        "quality": {"drop_in": by_precision(quality(0.7619)), "drop_in_stub": {"fp32": quality(0.8801)}},
    },
    "bench_rerank": {
        "rerank": by_precision(
            {
                "ms": 5.02,
                "p90_ms": 6.03,
                "cached_ms": 3.04,
                "cross_encoder_ms": 50.3,
                "tuned_peer_ms": 12.1,
                "speedup_vs_cross_encoder": 10.02,
                "speedup_vs_tuned_peer": 2.41,
                "pairs_per_s": 9960.0,
            }
        ),
        "forward": by_precision(
            {
                "ms": 2.05,
                "transformers_sdpa_ms": 7.31,
                "packed_library_ms": 1.89,
                "speedup_vs_transformers_sdpa": 3.57,
                "speedup_vs_packed_library": 0.92,
            }
        ),
        "memory": by_precision({"peak_mb": 310.0, "baseline_peak_mb": 905.0}),
    },
    "evaluate_quality": {
        "quality": {
            "baseline_ndcg10": 0.7615,
            "baseline_mrr10": 0.7409,
            "baseline_recall10": 0.8502,
            "queries": 300,
            "queries_with_results": 299,
            "missing_documents": 7,
            "candidates_recall": 0.8686,
            "reranker": by_precision(quality(0.7625)),
        }
    },
    "check_kernels_naive": {
        "checks": {
            "naive": {
                "cases": 456,
                "native_wrong": 0,
                "sampled_cases": 42,
                "memcheck_findings": 0,
                "racecheck_findings": 2,
                "initcheck_findings": 0,
                "synccheck_findings": 0,
                "ptx_75_wrong": 0,
                "ptx_80_wrong": 3,
            }
        }
    },
    "later": {
        "block": {"fp16": {"us": 101.0, "launches": 1, "unfused_us": 203.0, "unfused_launches": 7}},
        "block_lengths": {
            "fp16": {
                "128": {"us": 31.0, "launches": 2, "unfused_us": 45.0, "unfused_launches": 7, "variant": "mma", **PEER}
            }
        },
        "block_rows": {"fp16": {"mma": {"tokens_128_us": 31.0, "tokens_4096_us": 990.0}}},
        "layernorm": {"welford": {"rows_512_us": 4.1, "rows_512_torch_us": 4.3, "rows_16384_us": 21.0}},
        "bert_large": {
            "512": {
                "tokens_per_s": 301000.0,
                "best_peer": "compiled",
                "best_peer_tokens_per_s": 259000.0,
                "speedup_vs_best_peer": 1.16,
                "eager_tokens_per_s": 143000.0,
            },
            "1024": {"tokens_per_s": 302000.0},
        },
        "micro": {"fp16": {"512x64": {"us": 17.1, "eager_us": 348.0, "variant": "mma", **PEER}}},
        "tensorflow": {
            "available": True,
            "version": "2.21.0",
            "cublas": "12.5.3",
            "control_host_copies": 1,
            "fp16": {
                "512": {
                    "eager": {
                        **{"us": 87.0, "launches": 2, "host_copies": 0, "allocations": 0, "waits": 0},
                        "on_own_stream": True,
                        **{"max_abs_error": 2e-3, "speedup_vs_stock": 3.1, "speedup_vs_stock_is_noise": False},
                    },
                    "stock_eager": {"us": 269.7, "launches": 17},
                    "stock_graph": {"available": False, "reason": "no products"},
                }
            },
        },
    },
}


def make_records(values):
    return tuple(Record(name, copy.deepcopy(values[name]), PROVENANCE) for name in sorted(values))


@pytest.fixture
def records():
    return make_records(FULL)


@pytest.fixture(scope="module")
def built():
    return build_report(make_records(FULL), "h200", PREDICTIONS)


@pytest.fixture(scope="module")
def page(built):
    return built.page


# --- reading and merging -----------------------------------------------------------------------------------------


def write(folder, name, values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")


def test_records_are_read_without_the_summary_and_their_provenance_apart(tmp_path):
    write(tmp_path, "b", {"memory": {"fp32": {"peak_mb": 1}}, "provenance": PROVENANCE})
    write(tmp_path, "a", {"digest": "x"})
    write(tmp_path, "summary", {"memory": {"fp32": {"peak_mb": 2}}})
    write(tmp_path, ".b.json.tmp", {})
    (tmp_path / "STALE.md").write_text("stale", encoding="utf-8")
    assert read_records(tmp_path) == (
        Record("a", {"digest": "x"}, {}),
        Record("b", {"memory": {"fp32": {"peak_mb": 1}}}, PROVENANCE),
    )


def test_folder_that_does_not_exist_has_no_records(tmp_path):
    assert read_records(tmp_path / "t4") == ()


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_damaged_record_is_refused_by_name(tmp_path, content):
    (tmp_path / "rerank.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TilerankError, match=r"rerank\.json.*run its stage again"):
        read_records(tmp_path)


def test_summary_merges_the_contract_sections_and_leaves_lists_and_other_keys_in_their_records(records):
    summary = summarise(records)
    assert set(summary) == {spec.name for spec in TABLES if not spec.measured_in}, "nothing that only follows"
    assert set(summary["quality"]) >= {"bm25_ndcg10", "baseline_ndcg10", "drop_in", "reranker"}
    assert set(summary["ladder"]) == {"naive", "fused", "another", "triple", "best_ffma"}
    assert summary["workload"]["scifact"]["tokens"] == 18012
    assert "rows" not in summary["workload"]["scifact"].get("histogram", {})
    assert "list" not in {type(value).__name__ for value in leaves(summary)}
    assert "kernel" not in summary["ladder"]["fused"], "a long text is no figure"


def test_summary_names_the_quickest_masked_rung(records):
    best = {"variant": "fused", "us": 1050.0, "speedup_vs_sdpa": 1.22, "speedup_vs_best_fp32_peer": 0.55}
    best["max_abs_error"] = 2.2e-6
    assert summarise(records)["ladder"]["best_ffma"] == best
    unmasked = [Record("bench_attention_x", {"ladder": {"x": {"us": 1.0, "masked": False}}}, {})]
    failed = [Record("bench_attention_y", {"ladder": {"y": {"masked": True, "failure": "wrong"}}}, {})]
    assert summarise([*records, *unmasked, *failed])["ladder"]["best_ffma"] == best
    assert "best_ffma" not in summarise([*unmasked, *failed])["ladder"]


RUNGS = {
    "older": {"us": 90.0, "layout": "packed", "best_peer_us": 84.0, "speedup_vs_best_peer_is_noise": True},
    "newer": {
        **{"us": 40.0, "layout": "packed", "padded_us": 50.0, "sdpa_us": 240.0, "best_peer": "flex", "floor_us": 20.0},
        **{"best_peer_us": 84.0, "max_abs_error": 1e-3, "sdpa_max_abs_error": 2e-3},
        "scales": {"x1": {"speedup_vs_peer": 2.4}, "x8": {"speedup_vs_peer": 1.1}, "x40": {"us": 1.0}},
    },
    "padded": {"us": 30.0, "layout": "padded"},
    "wrong": {"layout": "packed", "failure": "error"},
}


def test_summary_names_the_quickest_packed_rung_of_each_precision():
    half = Record("bench_attention_a", {"rungs": {"fp16": RUNGS, "bf16": {"older": RUNGS["older"]}}}, {})
    both = {"us": 300.0, "packed_us": 100.0, "layout": "padded", "best_peer_us": 578.0, "masked": True}
    single = Record("bench_attention_b", {"ladder": {"both": both, "padded": RUNGS["padded"]}}, {})
    assert summarise([half, single])["attention"] == {
        "fp16": {
            **{"variant": "newer", "us": 40.0, "padded_us": 50.0, "best_peer": "flex", "best_peer_us": 84.0},
            **{"speedup_vs_best_peer": 2.1, "speedup_vs_best_peer_is_noise": False, "speedup_vs_sdpa_masked": 4.8},
            **{"max_abs_error": 1e-3, "sdpa_max_abs_error": 2e-3, "floor_us": 20.0, "share_of_floor": 0.5},
            "speedup_at_worst_scale": 1.1,
        },
        "bf16": {
            **{
                "variant": "older",
                "us": 90.0,
                "best_peer_us": 84.0,
                "speedup_vs_best_peer": pytest.approx(0.933, rel=1e-3),
            },
            "speedup_vs_best_peer_is_noise": True,
        },
        "fp32": {"variant": "both", "us": 100.0, "best_peer_us": 578.0, "speedup_vs_best_peer": 5.78},
    }
    assert "attention" not in summarise([Record("c", {"ladder": {"wrong": RUNGS["wrong"]}}, {})])


def test_a_rung_on_the_matrix_unit_is_no_ffma_rung():
    triple = {"us": 82.0, "masked": True, "layout": "packed", "products": "fp16x3"}
    ffma = {"us": 354.0, "masked": True, "layout": "packed"}
    summary = summarise([Record("a", {"ladder": {"triple": triple, "ffma": ffma}}, {})])
    assert summary["ladder"]["best_ffma"]["variant"] == "ffma"
    assert summary["attention"]["fp32"]["variant"] == "triple"


def leaves(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def test_summary_changes_no_record(records):
    summarise(records)["ladder"]["naive"]["us"] = 1.0
    assert [record.values for record in records] == [FULL[name] for name in sorted(FULL)]


def test_records_that_disagree_are_refused_by_key_and_file():
    first = Record("bench_a", {"memory": {"fp32": {"peak_mb": 1.0}}}, {})
    second = Record("bench_b", {"memory": {"fp32": {"peak_mb": 2.0}}}, {})
    with pytest.raises(
        TilerankError, match=r"bench_a\.json and bench_b\.json disagree about memory\.fp32\.peak_mb: 1\.0"
    ):
        summarise((first, second))
    assert summarise((first, first))["memory"] == {"fp32": {"peak_mb": 1.0}}


@pytest.mark.parametrize("turned", [False, True])
def test_section_against_number_is_a_disagreement(turned):
    pair = [Record("a", {"memory": {"fp32": {"peak_mb": 1.0}}}, {}), Record("b", {"memory": {"fp32": 3}}, {})]
    with pytest.raises(TilerankError, match=r"disagree about memory\.fp32: "):
        summarise(pair[::-1] if turned else pair)


def test_null_is_refused_by_key():
    with pytest.raises(TilerankError, match=r"bench\.json: rerank\.fp32\.ms is null"):
        summarise((Record("bench", {"rerank": {"fp32": {"ms": None}}}, {}),))


# --- tables ------------------------------------------------------------------------------------------------------


def test_a_way_of_calling_from_tensorflow_is_a_row_and_what_did_not_run_is_none(records):
    table = readme_tables(records)["tensorflow"]
    rows = [line for line in table.splitlines() if line.startswith("| fp16")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| fp16, 512 tokens, eager",
        "| fp16, 512 tokens, Keras’s own, eager",
    ]
    assert "| 87.0 | 3.10× | 2 | 0 | 0 | 0 | yes | 2.0e-03 |" in rows[0]
    assert "TensorFlow: 2.21.0; cuBLAS under Keras’s own: 12.5.3; host copies that the control shows: 1." in table
    assert "stage `bench_tf`" in readme_tables([])["tensorflow"]


def test_every_contract_key_has_a_column():
    shown = {spec.name: {column.key for column in (*spec.columns, *spec.facts)} for spec in TABLES}
    shown["quality"] |= {"bm25_ndcg10", "bm25_recall50", "baseline_ndcg10", "baseline_mrr10", "baseline_recall10"}
    shown["rungs"] |= {"speedup_vs_peer"}  # of each input scale
    shown["ladder"] |= {"masked", "best_peer_us", "block", "shared_bytes", "share_of_floor", "floor_bound"}
    shown["ladder"] |= {*summarise(make_records(FULL))["ladder"]["best_ffma"]}

    shown["tensorflow"] |= {"available", "reason", "speedup_vs_stock_is_noise"}

    def keys(section):
        for key, value in section.items():
            if isinstance(value, dict) and key != "histogram":
                yield from keys(value)
            elif key != "histogram":
                yield key

    for name, section in summarise(make_records(FULL)).items():
        assert set(keys(section)) <= shown[name], name


def test_readme_tables_have_a_text_for_every_marker(records):
    tables = readme_tables(records, PREDICTIONS)
    assert set(tables) == {*(spec.name for spec in TABLES), "headline"}
    assert "Not recorded" not in "".join(tables.values())
    for name, text in tables.items():
        lines = text.split("\n\n")[0].splitlines()
        assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1, name
        assert set(lines[1]) == set("|-:"), name


def test_readme_table_shows_figures_in_their_units_with_note_and_origin(records):
    text = readme_tables(records)["rerank"]
    assert "| fp32 | 5.02 | 6.03 | 3.04 | 50.3 | 12.1 | 10.02× | 2.41× | 9,960 |" in text
    assert text.index("| fp32") < text.index("| tf32") < text.index("| fp16") < text.index("| bf16")
    assert "<sub>bench_rerank: NVIDIA H200, driver 570.1, torch 2.11.0, commit 0123456789, 2026-11-29</sub>" in text


def test_checks_are_told_and_one_without_an_answer_says_why():
    checks = copy.deepcopy(FULL["check_kernels_naive"]["checks"])
    text = readme_tables((Record("check_kernels_naive", {"checks": checks}, {}),))["checks"]
    assert "| naive | 456 | right | right | FAIL: 3 | 42 | clean | FAIL: 2 | clean | clean |" in text
    checks["naive"] = {
        "cases": 9,
        "native_wrong": 0,
        "memcheck_findings": 0,
        "not_available": {"racecheck": "no permission", "ptx_80": "the variant needs compute capability 9.0"},
    }
    checks["reference"] = {"available": False, "reason": "host code"}
    text = readme_tables((Record("check_kernels_naive", {"checks": checks}, {}),))["checks"]
    assert (
        "| naive | 9 | right | not available (the variant needs compute capability 9.0) | clean | "
        "not available (no permission) |" in text
    )
    assert "reference" not in text.split("\n\n")[0]


def test_records_of_one_origin_are_named_together_and_changed_sources_are_said(records):
    dirty = Record("retrieve", FULL["retrieve"], {"cpu": "Xeon", "commit": "feedfacefeedface", "dirty": True})
    text = readme_tables([*(record for record in records if record.name != "retrieve"), dirty])["quality"]
    assert "evaluate_quality, integrate_hf: NVIDIA H200" in text
    assert "retrieve: Xeon, commit feedfacefe with changes</sub>" in text
    bare = readme_tables((Record("retrieve", FULL["retrieve"], {"dirty": True}),))["workload"]
    assert "<sub>retrieve: sources without a commit</sub>" in bare


def test_quality_table_tells_baseline_first_stage_and_queries_without_results(records):
    text = readme_tables(records)["quality"]
    assert "| BM25, all queries of the split | 0.6617 | – | – | – | – | 0.8686 |" in text
    assert "| unmodified model, fp32 | 0.7615 |" in text
    assert "| drop-in-stub fp32 | 0.8801 |" in text
    assert (
        "| reranker bf16 | 0.7625 | -0.0031 | +0.0042 | 0.7412 | 0.8512 | – | 98.5 % | 4 | 1.9e-05 | 0.9993 | 300 |"
        in text
    )
    assert "Queries with candidates: 299; judged documents missing from the corpus: 7;" in text


def test_ladder_follows_the_given_order(records):
    rows = [line.split(" | ")[0] for line in readme_tables(records, PREDICTIONS)["ladder"].splitlines()[2:5]]
    assert rows == ["| naive", "| fused", "| another"]


def test_sequence_lengths_are_ordered_by_size(records):
    text = readme_tables(records)["bert_large"]
    assert text.index("| 512 |") < text.index("| 1024 |")
    assert "| 1024 | 302,000 | – | – | – | – |" in text


def table_of(name, values):
    return readme_tables((Record("example", {name: values}, {}),))[name]


def test_time_of_what_failed_its_check_is_fail_with_the_reason():
    text = table_of("ladder", {"naive": {"us": 3.0}, "fused": {"failure": "error 2 is above 1", "registers": 40}})
    assert "| fused | FAIL | 40 |" in text
    assert "| naive | 3.00 | – |" in text
    assert "FAIL, fused: error 2 is above 1." in text
    whole = table_of("ladder", {"fused": {"failure": "Barrier error detected. Divergent threads."}})
    assert "Divergent threads.\n" in f"{whole}\n", "a reason that is a sentence ends once"


def test_peer_that_failed_its_check_is_fail_and_the_others_keep_their_times():
    text = table_of("rerank", {"fp32": {"ms": 5.0, "failures": {"tuned_peer": "not finite"}, "cross_encoder_ms": 9.0}})
    assert "| precision | median, ms | sentence-transformers, ms | tuned peer, ms |" in text
    assert "| fp32 | 5.00 | 9.00 | FAIL |" in text
    ours = table_of("rerank", {"fp32": {"failures": {"tilerank": "off by 1"}, "cross_encoder_ms": 9.0}})
    assert "| fp32 | FAIL | 9.00 |" in ours
    assert "FAIL, fp32: tilerank: off by 1." in ours


def test_an_occupancy_that_the_profiler_could_not_estimate_is_absent():
    text = table_of("ladder", {"naive": {"us": 3.0, "occupancy": 0.38}, "split": {"us": 2.0, "occupancy": 0.0}})
    assert "| naive | 3.00 | 38.0 % |" in text
    assert "| split | 2.00 | – |" in text


def test_ratio_within_the_spread_is_called_noise():
    listed = table_of(
        "rerank", {"fp32": {"ms": 5.0, "speedup_vs_tuned_peer": 1.01, "noise": ["speedup_vs_tuned_peer"]}}
    )
    assert "| fp32 | 5.00 | 1.01× (noise) |" in listed
    flagged = {"us": 5.0, "speedup_vs_sdpa": 1.01, "speedup_vs_sdpa_is_noise": True}
    clear = {**flagged, "speedup_vs_sdpa_is_noise": False}
    text = table_of("ladder", {"naive": flagged, "fused": clear})
    assert "| naive | 5.00 | 1.01× (noise) |" in text
    assert "| fused | 5.00 | 1.01× |" in text


def test_profile_tells_its_surroundings_and_why_there_is_no_timeline():
    values = {"forward_share": 0.4, "queries": 3, "process_peak_mb": 1234.0}
    absent = table_of("profile", {**values, "nsys": {"available": False, "reason": "nsys is not installed"}})
    assert "Queries: 3; peak memory of the process, MB: 1,234; " in absent
    assert "Nsight Systems timeline: not available (nsys is not installed)." in absent
    present = table_of("profile", {**values, "nsys": {"available": True, "file": "data/profile/timeline.nsys-rep"}})
    assert "Nsight Systems timeline: data/profile/timeline.nsys-rep." in present


def test_time_shares_name_every_operator_class_and_add_up():
    values = {
        "tokenize_share": 0.5,
        "tensors_share": 0.3,
        "forward_share": 0.4,
        "attention_share": 0.1,
        "gemm_share": 0.2,
        "within_forward": {
            "attention": 0.25,
            "gemm": 0.5,
            "norm": 0.05,
            "activation": 0.1,
            "other": 0.06,
            "host": 0.04,
        },
    }
    description = build_report((Record("profile", {"profile": values}, {}),), "cpu").pictures[0].description
    assert description == (
        "Shares of the time: attention 10.0 %, matrix products 20.0 %, norms 2.0 %, activations 4.0 %, "
        "rest of the forward pass 4.0 %, tokenising 20.0 %, building tensors 30.0 %, everything else 10.0 %"
    )


def test_pipe_in_a_name_does_not_end_the_cell(records):
    assert r"library\|x" in readme_tables(records)["micro"]


def test_readme_tables_without_records_say_so():
    tables = readme_tables(())
    assert tables["headline"] == "*Nothing is recorded on this machine yet.*"
    assert tables["ladder"] == "*Not recorded on this machine (stage `bench_attention`).*"


def test_printed_table_has_the_figures_and_fits_a_terminal(records, capsys):
    print_table([record for record in records if record.name in ("bench_rerank", "retrieve", "evaluate_quality")])
    text = capsys.readouterr().out
    assert "One query from raw text to scores" in text
    assert re.search(r"against sentence-transformers +10\.02× +10\.02×", text)
    assert "ladder" not in text.lower()
    assert max(len(line) for line in text.splitlines()) <= 110


def test_printed_table_without_records_says_so(capsys):
    print_table(())
    assert capsys.readouterr().out == "No figures are recorded here yet.\n"


def rung(us, **figures):
    return {"us": us, "layout": "packed", "precision": "fp16", "floor_us": 20.0, "best_peer_us": 84.0, **figures}


ON_THE_MATRIX_UNIT = (
    Record(
        "bench_attention_mma",
        {
            "ladder": {"mma": rung(112.4, precision="fp32", products="fp16x3", floor_us=45.2)},
            "rungs": {
                "fp16": {"mma": rung(60.4, tflops=158.0, floors={"hbm_us": 11.1, "exps_us": 18.2}), "late": rung(40.6)},
                "bf16": {"mma": {"failure": "wrong"}},
            },
        },
        PROVENANCE,
    ),
    Record("bench_attention_ffma", {"ladder": {"ffma": rung(354.1, precision="fp32", floor_us=143.2)}}, PROVENANCE),
)


def test_every_rung_stands_beside_its_floors():
    table = roofline_table(ON_THE_MATRIX_UNIT, ("ffma", "mma", "late")).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    assert [row[:3] for row in cells[2:]] == [
        ["fp32 ffma", "354", "ffma"],
        ["fp32 mma", "112", "fp16x3"],
        ["fp16 mma", "60.4", "its dtype"],
        ["fp16 late", "40.6", "its dtype"],
    ]
    assert cells[4][3:6] == ["158", "11.1", "18.2"]
    assert "bench_attention of 2 variants: NVIDIA H200" in table[-1]
    assert "stage `bench_attention`" in roofline_table(())


def test_rungs_of_other_precisions_have_a_picture():
    bf16 = Record("bench_attention_aaa", {"rungs": {"bf16": {"mma": {"us": 61.0}}}}, {})
    pictures = {picture.name: picture for picture in build_report([bf16, *ON_THE_MATRIX_UNIT], "h200").pictures}
    assert pictures["rungs"].description == (
        "Attention at other precisions, µs: fp16 best peer 84.0, fp16 mma 60.4, fp16 late 40.6, fp16 floor 20.0, "
        "bf16 mma 61.0"
    )


# --- what follows from the records ------------------------------------------------------------------------------


def test_each_rung_stands_against_the_one_before_with_its_limit_and_commit(records):
    table = readme_tables(records, PREDICTIONS)["ladder"]
    heading, _, naive, fused, *_ = table.splitlines()
    cells = dict(zip(heading.split(" | "), fused.split(" | "), strict=True))
    assert cells["against the rung before"] == "27.24×"
    assert cells["bound by"] == "shared memory"
    assert fused.endswith("| 0123456789 |")
    assert naive.split(" | ")[heading.split(" | ").index("against the rung before")] == "–"


def test_a_gain_is_of_one_case():
    first = {"us": 30.0, "unmasked_us": 40.0, "masked": True}
    assert gain(first, {"us": 10.0, "unmasked_us": 8.0, "masked": True}) == 3.0
    assert gain(first, {"us": 8.0, "unmasked_us": 8.0, "masked": False}) == 5.0
    assert gain({"us": 30.0}, {"us": 10.0, "unmasked_us": 8.0, "masked": True}) == 3.0, "nothing else was timed"


def test_predictions_stand_beside_what_was_measured(records):
    table = readme_tables(records, PREDICTIONS)["predicted"]
    assert "| fused | masked | 1,000 | 1,050 | 1.05× |" in table
    assert "naive" not in table.split("<sub>")[0], "it names no time"


@pytest.mark.parametrize(
    ("prediction", "values", "expected"),
    [
        ("1,100 us unmasked, from 2,500. Tiles.", {"us": 900.0, "unmasked_us": 1000.0}, (1100, 1000, "unmasked")),
        ("720 us masked or not, from 700.", {"us": 700.0, "unmasked_us": 1.0, "masked": True}, (720, 700, "masked")),
        ("37.5 us packed.", {"us": 40.0, "masked": True, "layout": "packed"}, (37.5, 40, "packed")),
        ("Tens of times slower than SDPA", {"us": 40.0}, None),
        ("37.5 us packed.", {"timed": False}, None),
        ("9 ushers", {"us": 40.0}, None),
    ],
)
def test_predicted_times_are_read_with_their_case(prediction, values, expected):
    found = predicted_time(prediction, values)
    assert (found and (found.us, found.measured, found.case)) == expected


def test_counters_say_what_binds_and_how_far_the_roof_is(records):
    table = readme_tables(records, PREDICTIONS)["counters"]
    assert "| fused | shared memory | short_scoreboard 50 %, wait 19 % | 2.00 | 62.5 % | 5.0 % | 16.2 % |" in table, (
        "waits of 2.0 and 0.75 of 4.0 cycles an instruction, one of them issuing"
    )
    point = analyse(records, PREDICTIONS)["counters"]["fused"]
    assert point["intensity"] == pytest.approx(0.1622 / 0.05)
    assert sum(point["shares"].values()) == pytest.approx(1)
    assert list(point["shares"])[:2] == ["issuing", "shared memory"]


def test_a_variant_that_could_not_be_profiled_has_no_counters():
    reason = {"available": False, "reason": "no permission"}
    records = make_records({**FULL, "profile_kernels_fused": {"profile_kernels": {"fused": reason}}})
    assert "counters" not in analyse(records, PREDICTIONS)
    assert readme_tables(records)["counters"] == "*Not recorded on this machine (stage `profile_kernels`).*"


def test_unknown_stall_reasons_are_shown_as_other():
    found = counters_of([Record("p", {"profile_kernels": {"x": {"kernels": {"0": {"stalls": {"new": 3.0}}}}}}, {})])
    assert found["x"].shares["other"] == 0.75
    assert found["x"].bound_by == "other"


def test_amdahl_accounts_for_every_part(records):
    parts = analyse(records, PREDICTIONS)["amdahl"]
    shares = [values["share"] for values in parts.values() if isinstance(values, dict)]
    assert sum(shares) == pytest.approx(1)
    assert parts["attention"] == {"share": 0.117, "ceiling": pytest.approx(1 / 0.883)}
    drop_in = {"integrate_hf": {"drop_in": {"fp32": {"kernel_speedup": 3.0}}}}
    parts = analyse(make_records({**FULL, **drop_in}), PREDICTIONS)["amdahl"]
    assert parts["predicted_speedup"] == pytest.approx(1 / (1 - 0.117 * 2 / 3))


def test_plots_get_the_ladder_with_its_predictions(records):
    assert ladder_csv(records, PREDICTIONS) == (
        "variant,us,predicted_us\nnaive,28600.0,\nfused,1050.0,1000\nanother,2050.0,\ntriple,905.0,\n"
    )
    assert ladder_csv((), PREDICTIONS) == "variant,us,predicted_us\n"


def test_the_same_kernel_fits_a_t4_and_an_h200_differently(records):
    table = readme_tables(records, PREDICTIONS)["architectures"]
    assert "| fused | 141 | 141 | 0 | 0 | 8,192 | 8 | 12 |" in table, "64 KB of shared memory bind on a T4"


def test_a_kernel_of_another_precision_is_in_the_tables_too():
    half = {"us": 50.0, "precision": "fp16", "layout": "packed", "share_of_floor": 0.6, "floor_bound": "exps"}
    more = {
        "bench_attention_mma": {"rungs": {"fp16": {"mma": half}}},
        "profile_kernels_mma": {
            "profile_kernels": {"mma": {"kernels": {"0": {"stalls": {"wait": 1.0}, "dram_throughput_pct": 20.0}}}}
        },
    }
    tables = readme_tables(make_records({**FULL, **more}), {**PREDICTIONS, "mma": "40 us packed."})
    assert "| mma | packed | 40.0 | 50.0 | 1.25× |" in tables["predicted"]
    assert "| mma | compute | wait 50 % | – | – | 20.0 % | 60.0 % |" in tables["counters"]


def test_devices_differ_as_the_table_says():
    table = devices_table()
    assert "| memory, GB/s" not in table.splitlines()[0]
    assert "| memory, GB/s | 320 | 4,800 | 15.00× |" in table
    assert "| clocks of an SM a score, fp32 products | 1.000 | 0.500 | 0.50× |" in table


def test_keys_per_query_are_those_of_workload_seed():
    from tilerank.bench.workloads import seed_workload

    workload = seed_workload()
    assert round(workload.scores / workload.heads / workload.tokens) == KEYS_PER_QUERY
    assert workload.head_dim == HEAD_DIM


# --- markers -----------------------------------------------------------------------------------------------------

README = """# Title
<!-- tilerank:rerank:begin -->
old
<!-- tilerank:rerank:end -->
text <!-- tilerank:freshness:begin -->kept<!-- tilerank:freshness:end -->
"""


def test_text_between_markers_is_replaced_and_the_rest_kept():
    once = update_markers(README, {"rerank": "| new |\n", "unused": "x"})
    assert once == README.replace("\nold\n", "\n| new |\n")
    assert update_markers(once, {"rerank": "| new |\n"}) == once


def test_replacement_may_hold_backslashes_and_groups():
    assert r"\1 \g<0> a\|b" in update_markers(README, {"rerank": r"\1 \g<0> a\|b"})


@pytest.mark.parametrize(
    "text",
    [
        "<!-- tilerank:a:begin -->",
        "x\n<!-- tilerank:a:end -->",
        "<!-- tilerank:a:begin --><!-- tilerank:b:end -->",
        "<!-- tilerank:a:begin --><!-- tilerank:b:begin --><!-- tilerank:b:end --><!-- tilerank:a:end -->",
    ],
)
def test_markers_out_of_place_are_refused(text):
    with pytest.raises(TilerankError, match=r"tilerank:[ab]:(begin|end)"):
        update_markers(text, {"a": "new"})


# --- page and pictures -------------------------------------------------------------------------------------------


class Structure(HTMLParser):
    """Checks nesting while parsing, and gathers ids, references and text."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.references, self.tags, self.text = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "data", "action", "srcset"):
                self.references.append(value)
            self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_parses_and_its_ids_are_unique(page):
    structure = Structure(page)
    assert len(structure.ids) == len(set(structure.ids))
    assert {f"#{identifier}" for identifier in structure.ids} >= {
        reference for reference in structure.references if reference.startswith("#")
    }


def test_page_needs_nothing_but_itself(page):
    structure = Structure(page)
    assert {reference for reference in structure.references if not reference.startswith("#")} == {"data:,"}
    assert "script" not in structure.tags
    assert "@import" not in page
    assert "http" not in page


def test_a_sentence_in_a_table_of_the_page_takes_several_lines():
    reason = "the variant needs compute capability 9.0"
    checks = Record("a", {"checks": {"mma": {"native_wrong": 0, "racecheck_findings": 1024}}}, {})
    assert "<td>FAIL: 1,024</td>" in build_report([checks], "h200").page
    checks = Record("a", {"checks": {"mma": {"native_wrong": 0, "not_available": {"ptx_75": reason}}}}, {})
    page = build_report([checks], "h200").page
    assert f'<td class="long">not available ({reason})</td>' in page
    assert "<td>right</td>" in page


def test_page_has_every_section_picture_and_record(page, records):
    ids = Structure(page).ids
    assert {spec.name for spec in TABLES} <= set(ids)
    assert {identifier.removeprefix("picture-") for identifier in ids if identifier.startswith("picture-")} == {
        *("lengths-scifact", "time-shares", "ladder", "floors", "predicted-and-measured", "rerank-times"),
        *("quality-intervals", "predicted-times", "stalls", "roofline", "block-lengths"),
    }
    text = " ".join(Structure(page).text)
    for record in records:
        assert record.name in text
    for recorded in ("0123456789", "NVIDIA H200", "570.1", "13.0", "2.11.0", "2026-11-29T10:00:00+00:00"):
        assert recorded in text
    assert "absent" not in ids


def test_page_follows_the_light_and_dark_scheme(page):
    assert "@media (prefers-color-scheme: dark)" in page
    assert 'name="viewport"' in page
    pictures = "".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    fixed = {colour for colour in re.findall(r"#[0-9a-f]{6}\b", pictures)}
    assert fixed == set()
    used = set(re.findall(r"var\(--(\w+)\)", page))
    assert used <= set(re.findall(r"--(\w+):", page))


def test_pictures_show_figures_and_captions_as_text(page):
    text = " ".join(Structure(page).text)
    assert "naive: 28,600 µs, 0.04× SDPA" in text
    assert "Expected: Slow & <simple>." in text
    assert "Came: 27.24× over naive; now bound by shared memory" in text
    assert "never_measured" not in text
    assert "mean 360" in text


def test_same_records_give_the_same_bytes_in_this_and_another_process(built, records, tmp_path):
    assert build_report(records, "h200", PREDICTIONS) == built
    for record in records:
        write(tmp_path, record.name, {**record.values, "provenance": dict(record.provenance)})
    program = (
        "import sys, pathlib; from tilerank.report import *; "
        "records = read_records(pathlib.Path(sys.argv[1])); "
        f"report = build_report(records, 'h200', {PREDICTIONS!r}); "
        "sys.stdout.buffer.write((report.page + ''.join(p.standalone for p in report.pictures)).encode())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "7", "PATH": "/usr/bin", "TZ": "Asia/Tokyo"},
    )
    assert answer.stdout.decode() == built.page + "".join(picture.standalone for picture in built.pictures)


def test_standalone_pictures_are_whole_svg_files(built):
    for picture in built.pictures:
        root = ElementTree.fromstring(picture.standalone)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.get("aria-label") == picture.description
        assert float(root.get("width")) > 0
        assert float(root.get("height")) > 0
        assert "var(" not in picture.standalone


def test_page_of_part_of_a_record_says_what_is_absent():
    values = {name: FULL[name] for name in ("retrieve", "profile_baseline")}
    structure = Structure(build_report(make_records(values), "cpu").page)
    assert {"workload", "profile", "quality", "absent"} <= set(structure.ids)
    assert not {"ladder", "rerank", "picture-ladder", "picture-quality-intervals"} & set(structure.ids)
    assert "bench_rerank" in structure.text


def test_page_without_records_is_still_a_page():
    text = " ".join(Structure(build_report((), "cpu").page).text)
    assert "No figures are recorded on this machine yet." in text


def test_machine_name_is_escaped():
    assert "<b>" not in build_report((), "<b>").page


def test_differences_of_rounding_errors_are_not_blown_up():
    equal = {**quality(0.5), "ndcg10_diff_low": -1e-9, "ndcg10_diff_high": 1e-9}
    values = {"evaluate_quality": {"quality": {"baseline_ndcg10": 0.5, "reranker": {"fp32": equal}}}}
    picture = build_report(make_records(values), "cpu").pictures[0]
    assert picture.name == "quality-intervals"
    assert re.findall(r">(-?[0-9.]+)</text>", picture.inline)[0] == "-0.002"


def test_report_imports_neither_torch_nor_matplotlib_until_it_draws():
    program = "import sys, tilerank.report; print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin"},
    )
    assert answer.stdout.strip() == "[]"
