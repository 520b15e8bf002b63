"""The tables of ``docs/`` that no record changes: what each variant serves, what was predicted of it, and how two
devices differ.

``python -m tilerank.report.variants``, in a checkout, writes them between their markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tilerank.kernels.registry import MAX_HEAD_DIM, Row, attention_rows, rows_of
from tilerank.report.analysis import devices_table
from tilerank.report.markers import update_markers

PAGES = ("docs/kernels.md", "docs/ladder.md", "docs/analysis.md", "docs/block.md", "docs/encoder.md")
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
    block, layernorm = rows_of("block"), rows_of("layernorm")
    return {
        "variants": variants_table(rows),
        "predictions": predictions_table(rows),
        "devices": devices_table(),
        "block_variants": variants_table(block),
        "block_predictions": predictions_table(block),
        "layernorm_variants": variants_table(layernorm),
        "layernorm_predictions": predictions_table(layernorm),
        "linear_predictions": predictions_table(rows_of("linear")),
        "embedding_predictions": predictions_table(rows_of("embedding")),
        "layer_predictions": predictions_table(rows_of("layer")),
        "token_attention_predictions": predictions_table(rows_of("token_attention")),
    }


def _serves(row: Row) -> tuple[str, ...]:
    return (
        f"`{row.name}`",
        f"`{row.file}`",
        ", ".join(row.dtypes),
        f"1 to {MAX_HEAD_DIM}" if row.head_dims is None else ", ".join(map(str, row.head_dims)),
        ", ".join(row.layouts),
        ", ".join(row.masks) or "none",
        "any" if row.max_k_len is None else f"up to {_size(row.max_k_len)}",
        "CPU" if row.device == "cpu" else _architectures(row),
        "by name" if not row.auto else str(row.rung if row.preference is None else row.preference),
    )


def _architectures(row: Row) -> str:
    """``sm_75``, ``sm_75 (bf16 from sm_80)``, ``sm_90 only``."""
    if row.max_sm is not None:
        return f"sm_{row.min_sm} only" if row.max_sm == row.min_sm else f"sm_{row.min_sm} to sm_{row.max_sm}"
    later = ", ".join(f"{dtype} from sm_{sm}" for dtype, sm in row.dtype_min_sm.items())
    return f"sm_{row.min_sm}" + (f" ({later})" if later else "")


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
