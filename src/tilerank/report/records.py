"""The committed records of one machine: reading them, and the summary that they add up to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tilerank.errors import TilerankError

SUMMARY_FILE = "summary.json"

_LONGEST_NAME = 40

SECTIONS = (
    *("workload", "profile", "ladder", "rungs", "attention", "drop_in", "forward", "rerank"),
    *(
        "quality",
        "memory",
        "checks",
        "block",
        "block_lengths",
        "block_rows",
        "block_checks",
        "layernorm",
        "layernorm_checks",
        "bert_large",
        "micro",
        "tensorflow",
    ),
)
"""The top-level keys of the summary. What else a record holds (digests, recipes) is its own business.

`ladder` is fp32; `rungs.<precision>.<variant>` says the same of the other precisions."""

DERIVED = {"attention": ("ladder", "rungs")}
"""Section that `merge` adds -> the recorded ones that it is taken from."""

PER_VARIANT = (
    *("bench_attention_", "build_kernels_", "check_kernels_", "profile_kernels_"),
    *("build_block_", "build_layernorm_", "check_block_", "check_layernorm_"),
)
"""What the names of records begin with that belong to one variant."""

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")

Summary: TypeAlias = Mapping[str, Any]
"""Nested: section -> ... -> number, string, boolean or list."""


@dataclass(frozen=True, slots=True)
class Record:
    """One metrics file."""

    name: str  # file name without .json: the stage, and the variant where there is one
    values: Mapping[str, Any]  # without the provenance
    provenance: Mapping[str, Any]  # as recorded; empty when the file has none


def read_records(folder: Path) -> tuple[Record, ...]:
    """Every metrics file of ``folder`` (metrics/<machine>) but the summary, by name; none when there is no folder.

    Raises `TilerankError` for a file that is not a JSON object.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        if path.name == SUMMARY_FILE or path.name.startswith("."):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _unreadable(str(path), error) from error
        records.append(parse_record(str(path), path.stem, text))
    return tuple(records)


def parse_record(where: str, name: str, text: str) -> Record:
    """The record that a metrics file's text holds. Raises `TilerankError`, naming ``where``, unless it is a JSON
    object."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise _unreadable(where, error) from error
    if not isinstance(values, dict):
        raise TilerankError(f"{where}: expected a JSON object, found {type(values).__name__}; run its stage again")
    provenance = values.pop("provenance", {})
    return Record(name, values, provenance)


def _unreadable(where: str, error: Exception) -> TilerankError:
    return TilerankError(f"{where} cannot be read ({error}); run its stage again or `git checkout` it")


def merge(records: Sequence[Record]) -> dict[str, Any]:
    """The summary contract's sections of all records in one mapping.

    Two things are added: ``ladder.best_ffma``, the quickest masked fp32 rung that passed its checks and does not use
    the matrix unit, and ``attention.<precision>``, the quickest packed rung of all.

    Raises `TilerankError` when two records disagree about a key, or one holds a null.
    """
    merged: dict[str, Any] = {}
    writers: dict[str, str] = {}
    for record in records:
        for section in SECTIONS:
            if section in record.values:
                _add(merged, section, record.values[section], section, record.name, writers)
    for precision, rungs in {"fp32": merged.get("ladder", {}), **merged.get("rungs", {})}.items():
        quickest = _quickest_packed(rungs)
        if quickest:
            merged.setdefault("attention", {})[precision] = quickest
    best = _best_rung(merged.get("ladder", {}))
    if best:
        merged["ladder"]["best_ffma"] = best
    return merged


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """What `merge` gives without its lists (histograms, names of noisy ratios) and without texts that are no short
    names (of kernels, reasons): what ``dvc metrics diff`` can show in a table."""
    return _figures(merge(records))


def _best_rung(ladder: Mapping[str, Any]) -> dict[str, Any]:
    masked = {
        name: rung
        for name, rung in ladder.items()
        if rung.get("masked") and "us" in rung and rung.get("products", "ffma") == "ffma"
    }
    if not masked:
        return {}
    name = min(masked, key=lambda name: masked[name]["us"])
    rung = masked[name]
    renamed = {"us": "us", "speedup_vs_sdpa": "speedup_vs_sdpa", "speedup_vs_best_peer": "speedup_vs_best_fp32_peer"}
    renamed["max_abs_error"] = "max_abs_error"
    return {"variant": name, **{new: rung[old] for old, new in renamed.items() if old in rung}}


def _packed_us(rung: Mapping[str, Any]) -> float | None:
    """Time of the packed input, None where it was not taken."""
    return rung.get("us") if rung.get("layout") == "packed" else rung.get("packed_us")


def _quickest_packed(rungs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``attention.<precision>``: the rung with the least packed time, beside the best peer on the same data, and its
    padded time beside SDPA with a boolean mask, which takes padded input too."""
    packed = {name: us for name, rung in rungs.items() if (us := _packed_us(rung)) is not None}
    if not packed:
        return {}
    name = min(packed, key=lambda name: packed[name])
    rung, us = rungs[name], packed[name]
    same = ("padded_us", "best_peer", "best_peer_us", "max_abs_error", "sdpa_max_abs_error", "floor_us")
    found = {"variant": name, "us": us, **{key: rung[key] for key in same if key in rung}}
    if "best_peer_us" in rung:
        found["speedup_vs_best_peer"] = rung["best_peer_us"] / us
        if rung["layout"] == "packed":  # a ratio of this very time
            found["speedup_vs_best_peer_is_noise"] = rung.get("speedup_vs_best_peer_is_noise", False)
    if "sdpa_us" in rung and "padded_us" in rung:
        found["speedup_vs_sdpa_masked"] = rung["sdpa_us"] / rung["padded_us"]
    at_scales = [each["speedup_vs_peer"] for each in rung.get("scales", {}).values() if "speedup_vs_peer" in each]
    if at_scales:
        found["speedup_at_worst_scale"] = min(at_scales)
    if "floor_us" in rung:
        found["share_of_floor"] = rung["floor_us"] / us
    return found


def _figures(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in values.items():
        value = _figures(value) if isinstance(value, Mapping) else value
        if not isinstance(value, list) and value != {} and not (isinstance(value, str) and len(value) > _LONGEST_NAME):
            kept[key] = value
    return kept


def _add(target: dict[str, Any], key: str, value: Any, dotted: str, writer: str, writers: dict[str, str]) -> None:
    if value is None:
        raise TilerankError(f"{writer}.json: {dotted} is null; a key without a measurement must be absent")
    present = target.get(key)
    if isinstance(value, Mapping) and (present is None or isinstance(present, dict)):
        nested = target.setdefault(key, {})
        writers.setdefault(dotted, writer)
        for name, item in value.items():
            _add(nested, name, item, f"{dotted}.{name}", writer, writers)
    elif key not in target:
        target[key] = value
        writers[dotted] = writer
    elif present != value:
        raise TilerankError(
            f"{writers[dotted]}.json and {writer}.json disagree about {dotted}: {_shown(present)} and {_shown(value)}; "
            "one of them is out of date, run its stage again"
        )


def _shown(value: Any) -> str:
    return "a section" if isinstance(value, Mapping) else json.dumps(value)


def lookup(summary: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or None when it is absent."""
    value: Any = summary
    for key in dotted.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def sources(records: Sequence[Record], section: str) -> tuple[Record, ...]:
    """The records that hold something of ``section`` (a dotted key), or of what it is derived from."""
    sections = (section, *DERIVED.get(section, ()))
    return tuple(record for record in records if any(lookup(record.values, each) is not None for each in sections))
