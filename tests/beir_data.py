"""Small data sets in BEIR's layout, for tests."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tilerank.config import DatasetSettings

HEADER = "query-id\tcorpus-id\tscore\n"

DOCUMENTS = {
    "d1": ("Wings", "A wing in a slipstream lifts more than a wing in still air."),
    "d2": ("", "Heat flows through a thin slab of steel."),
    "d3": ("Empty", ""),
    "q1": ("Slipstream", "The slipstream of a propeller turns as it leaves the propeller."),
    "d5": ("Caf\u00e9", "Accents \u2028 and line separators stay inside one record: na\u00efve, \U0001f9ea."),
}
QUERIES = {
    "q0": "never judged in the test split",
    "q1": "lift of a wing in a propeller slipstream",
    "q2": "heat flow through steel",
    "q3": "zzz unknown words only",
}
QRELS = {
    "test": {"q2": {"d2": 1, "gone": 1}, "q1": {"d1": 2, "q1": 1, "d2": 0}, "q3": {"d3": 1}},
    "train": {"q0": {"d1": 1}},
}


def jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def beir_files() -> dict[str, str]:
    """File name in BEIR's layout -> text."""
    corpus = [{"_id": key, "title": title, "text": text, "metadata": {}} for key, (title, text) in DOCUMENTS.items()]
    queries = [{"_id": key, "text": text, "metadata": {"n": [1, 2]}} for key, text in QUERIES.items()]
    files = {"corpus.jsonl": jsonl(corpus), "queries.jsonl": jsonl(queries)}
    for split, judged in QRELS.items():
        rows = [f"{query}\t{doc}\t{grade}\n" for query, grades in judged.items() for doc, grade in grades.items()]
        files[f"qrels/{split}.tsv"] = HEADER + "".join(rows)
    return files


def write_folder(folder: Path, files: Mapping[str, str | bytes] | None = None) -> Path:
    """Write the data set as a folder; a file given as bytes is written as it is."""
    for name, text in (beir_files() if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return folder


def write_zip(path: Path, folder: Path, prefix: str = "") -> Path:
    """Zip the data set in ``folder``, its files below ``prefix``."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


def dataset_settings(name: str = "tiny", source: str = "local", **changes: object) -> DatasetSettings:
    values = {"split": "test", "sha256": {}, "passages": 0, "queries": 0, "drop_self_retrieval": False, **changes}
    return DatasetSettings(name=name, source=source, **values)


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> bytes of everything below ``folder``."""
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
