"""The tables of ``docs/`` that say what the registry says: what each variant serves, and what was predicted of it.

``python -m tilerank.report.variants``, in a checkout, writes them between their markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilerank.kernels.registry import MAX_HEAD_DIM, Row, attention_rows
from tilerank.report.markers import update_markers

PAGES = ("docs/kernels.md", "docs/ladder.md")
"""Where the tables stand."""


def variants_table(rows: Sequence[Row]) -> str:
    """What each variant serves, in Markdown: a row a variant, in the order given.

    The last column is the number by which ``auto`` ranks the variants that serve a call; "by name" where it never
    takes one.
    """
    headings = ("variant", "source", "dtypes", "head_dim", "layouts", "restrictions", "keys", "from", "`auto`")
    return _table(headings, map(_serves, rows))


def predictions_table(rows: Sequence[Row]) -> str:
    """What was expected of each kernel before it was timed, and why, in Markdown; without CPU rows: never timed."""
    cuda = [row for row in rows if row.device == "cuda"]
    return _table(("rung", "variant", "predicted", "because"), map(_predicts, cuda))


def doc_tables(rows: Sequence[Row]) -> dict[str, str]:
    """Marker name -> table, for `update_markers`."""
    return {"variants": variants_table(rows), "predictions": predictions_table(rows)}


def _serves(row: Row) -> tuple[str, ...]:
    return (
        f"`{row.name}`",
        f"`{row.file}`",
        ", ".join(row.dtypes),
        f"1 to {MAX_HEAD_DIM}" if row.head_dims is None else ", ".join(map(str, row.head_dims)),
        ", ".join(row.layouts),
        ", ".join(row.masks) or "none",
        "any" if row.max_k_len is None else f"up to {_size(row.max_k_len)}",
        "CPU" if row.device == "cpu" else f"sm_{row.min_sm}" + ("" if row.max_sm is None else f" to sm_{row.max_sm}"),
        "by name" if not row.auto else str(row.rung if row.preference is None else row.preference),
    )


def _predicts(row: Row) -> tuple[str, ...]:
    expected, *reason = re.split(r"[.:] ", row.prediction, maxsplit=1)  # a first sentence, or up to its colon
    return str(row.rung), f"`{row.name}`", expected.removesuffix("."), "".join(reason) or "–"


def _size(keys: int) -> str:
    """A power of two from 2^16 on as such, else the number."""
    exponent = keys.bit_length() - 1
    return f"2^{exponent}" if exponent >= 16 and keys == 1 << exponent else f"{keys:,}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Write the tables into the pages of the current folder, a checkout's root."""
    tables = doc_tables(attention_rows())
    for page in map(Path, PAGES):
        text = page.read_text(encoding="utf-8")
        updated = update_markers(text, tables)
        if updated != text:
            page.write_text(updated, encoding="utf-8")
            print(f"{page}: written")


if __name__ == "__main__":
    main()
