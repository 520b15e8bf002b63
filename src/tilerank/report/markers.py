"""Text between markers, written by a program: `<!-- tilerank:<name>:begin -->` ... `<!-- tilerank:<name>:end -->`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tilerank.errors import TilerankError

_MARKER = re.compile(r"<!-- tilerank:(?P<name>[a-z0-9_]+):(?P<end>begin|end) -->")


def update_markers(text: str, tables: Mapping[str, str]) -> str:
    """Replace what stands between the markers that ``tables`` names; everything else stays as it is.

    Raises `TilerankError` when a marker of the text is not closed, closed twice or nested.
    """
    pieces = []
    position, open_name = 0, None
    for match in _MARKER.finditer(text):
        name = match["name"]
        if (match["end"] == "begin") != (open_name is None) or open_name not in (None, name):
            line = text.count("\n", 0, match.start()) + 1
            raise TilerankError(
                f"line {line}: {match[0]} is out of place; markers come as a begin and an end of one name, not nested"
            )
        if match["end"] == "begin":
            pieces.append(text[position : match.end()])
            open_name = name
        else:
            pieces.append(f"\n{tables[name].strip()}\n" if name in tables else text[position : match.start()])
            pieces.append(match[0])
            open_name = None
        position = match.end()
    if open_name is not None:
        raise TilerankError(f"<!-- tilerank:{open_name}:begin --> has no end marker")
    return "".join(pieces) + text[position:]
