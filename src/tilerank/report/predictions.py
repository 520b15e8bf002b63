"""The times that rungs were expected to take, beside those that they took."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Predicted:
    """A time that a row's prediction names, and the measured one that it is about; both in microseconds."""

    us: float
    measured: float
    case: str  # unmasked, or what the ladder's own time is of: masked, packed


def predicted_time(prediction: str, values: Mapping[str, Any]) -> Predicted | None:
    """Compare a registry row's prediction with the variant's figures; None when it names no time ("tens of times
    slower") or the variant was not timed.

    A prediction that begins "1,100 us unmasked" is about the unmasked time, any other that begins with a time about
    the ladder's.
    """
    found = re.match(r"([\d,]*\d(?:\.\d+)?) us\b(?: (unmasked)\b)?", prediction)
    if found is None or "us" not in values:
        return None
    us = float(found[1].replace(",", ""))
    if found[2] and "unmasked_us" in values:
        return Predicted(us, values["unmasked_us"], "unmasked")
    return Predicted(us, values["us"], timed_case(values))


def timed_case(values: Mapping[str, Any]) -> str:
    """What a variant's ladder time is of: packed (without padding), masked or unmasked."""
    return "packed" if values.get("layout") == "packed" else "masked" if values.get("masked") else "unmasked"
