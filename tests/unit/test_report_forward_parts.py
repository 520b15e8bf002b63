"""What the report says of a forward pass: each part's time, floor and gap."""

from __future__ import annotations

import re
from pathlib import Path

from tilerank.report import Record, build_report, update_markers
from tilerank.report.forward_parts import PAGE, TABLE, parts_pictures, parts_table

PROVENANCE = {"gpu": "NVIDIA H200", "commit": "feedfacefeedface", "dirty": False, "time": "2026-11-30T00:00:00"}
PARTS = {
    "used": {"qkv": "resident_rows"},
    "unknown": "what follows us is no part",
    "attention": {"us": 300.0, "launches": 5, "floor_us": 100.0},
    "feed-forward up": {"us": 100.0, "launches": 5, "floor_us": 80.0},
}
RECORDS = (Record("bench_rerank", {"forward": {"fp16": {"ms": 0.4, "parts": PARTS}, "fp32": {"ms": 3.0}}}, PROVENANCE),)


def test_every_part_has_its_floor_and_gap() -> None:
    picture, blank, *table = parts_table(RECORDS).splitlines()
    assert picture.startswith("![")
    assert picture.endswith("(pictures/forward-parts.svg)")
    assert blank == ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| fp16")]
    assert [row[:6] for row in rows] == [
        ["fp16", "attention", "5", "300", "100", "200"],
        ["fp16", "feed-forward up", "5", "100", "80.0", "20.0"],
    ]
    assert [[re.sub(r"\D", "", cell) for cell in row[6:]] for row in rows] == [["750", "333"], ["250", "800"]]
    assert table[-1] == "<sub>bench_rerank: NVIDIA H200, commit feedfacefe, 2026-11-30</sub>"


def test_without_a_record_the_page_says_so() -> None:
    assert parts_table(()) == "Not recorded on this machine yet."
    assert parts_pictures({"forward": {"fp16": {"ms": 1.0}}}) == ()


def test_the_picture_and_its_place(repository: Path) -> None:
    (picture,) = [found for found in build_report(RECORDS, "h200").pictures if found.name == "forward-parts"]
    assert picture.section == "forward"
    assert picture.description.endswith("fp16 attention 300 and 100, fp16 feed-forward up 100 and 80.0")
    text = (repository / PAGE).read_text(encoding="utf-8")
    assert parts_table(RECORDS) in update_markers(text, {TABLE: parts_table(RECORDS)})
    for named in re.findall(r"`((?:src|tests|cuda)/[\w./]+)`", text):
        assert (repository / named).exists(), named
