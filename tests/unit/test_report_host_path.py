"""What the report says of the host paths: predictions beside times, and where the milliseconds go."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilerank import host_path
from tilerank.report import Record, build_report, update_markers
from tilerank.report.host_path import PAGE, PHASES, TABLE, steps_pictures, steps_table

PROVENANCE = {"gpu": "NVIDIA H200", "commit": "feedfacefeedface", "dirty": False, "time": "2026-11-29T00:00:00"}


def step(*parts: float) -> dict[str, float]:
    return {"ms": sum(parts) - 0.5, **{f"{key}_ms": ms for (key, _, _), ms in zip(PHASES, parts, strict=True)}}


def records(**rerank: dict) -> tuple[Record, ...]:
    profile = {
        "ms": {"tokenize": 11.0, "tensors": 30.0, "transfer": 0.5, "forward": 7.0, "scores": 0.25, "total": 49.0}
    }
    return (
        Record("bench_rerank", {"rerank": rerank}, PROVENANCE),
        Record("profile_baseline", {"profile": profile}, PROVENANCE),
    )


BOTH = records(
    fp32={"ms": 1.0, "steps": {"padded": step(9, 1, 20, 1), "cached": {**step(0.25, 0.5, 13, 0.25), "p90_ms": 15.25}}},
    fp16={"ms": 1.0, "steps": {"padded": step(9, 1, 7, 1), "graphs": {"failure": "error 1 against float64"}}},
)


def test_every_path_stands_beside_its_prediction_and_its_times() -> None:
    lines = steps_table(BOTH).splitlines()
    assert lines[0] == "| path | idea | predicted | fp32, ms (p90) | fp16, ms (p90) |"
    rows = {line.split("`")[1]: line.split(" | ") for line in lines[2:] if line.startswith("| `")}
    assert list(rows) == [*(path.name for path in host_path.PATHS), "cached"]
    assert rows["padded"][-2:] == ["30.5", "17.5 |"]
    assert rows["graphs"][-2:] == ["–", "FAIL |"]
    assert [name for name in rows if rows[name][-1] != "– |"] == ["padded", "graphs"]
    assert rows["cached"][-2:] == ["13.5 (15.2)", "– |"]
    assert rows["graphs"][2].startswith("H200, fp16: 4 ms.")
    assert lines[-1] == "<sub>bench_rerank: NVIDIA H200, commit feedfacefe, 2026-11-29</sub>"
    bare = steps_table(())
    assert bare.splitlines()[0] == "| path | idea | predicted |"
    assert "<sub>" not in bare


def test_the_page_has_the_predictions_of_the_code(repository: Path) -> None:
    text = (repository / PAGE).read_text(encoding="utf-8")
    for path in host_path.PATHS:
        assert path.prediction in text
        assert path.idea in text
    assert host_path.CACHED_PREDICTION in text
    assert steps_table(BOTH) in update_markers(text, {TABLE: steps_table(BOTH)})
    for named in re.findall(r"`((?:src|tests)/[\w./]+)`", text):
        assert (repository / named).is_file(), named


def test_the_picture_starts_with_the_unmodified_pipeline() -> None:
    (picture,) = build_report(BOTH, "h200").pictures[-1:]
    assert (picture.name, picture.section) == ("host-path", "rerank")
    bars = picture.description.split(": ", 1)[1].split(", ")
    assert bars == [
        "fp32 unmodified 48.8 (model 7.00)",
        "fp32 padded 31.0; as it runs 30.5 (model 20.0)",
        "fp32 cached 14.0; as it runs 13.5 (model 13.0)",
        "fp16 padded 18.0; as it runs 17.5 (model 7.00)",
    ]
    for _, label, _ in PHASES:
        assert label in picture.standalone


@pytest.mark.parametrize("rerank", [{}, {"fp32": {"ms": 1.0}}])
def test_no_picture_without_a_record(rerank: dict) -> None:
    assert steps_pictures({"rerank": rerank, "profile": {"ms": {"forward": 1.0}}}) == ()
