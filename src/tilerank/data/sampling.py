"""Random draws that are the same on every Python version and platform."""

from __future__ import annotations

import random
from collections.abc import Iterator


def shuffled(seed: str, count: int) -> Iterator[int]:
    """Yield 0..count-1 in a random order that depends on ``seed`` only, drawing no more than is asked for.

    Of Python's generator only ``random()``, seeded with a string, is used: the one sequence that its
    documentation promises to keep (``shuffle``, ``sample`` and ``randrange`` may change between versions).
    """
    generator = random.Random(seed)
    moved: dict[int, int] = {}  # a Fisher-Yates shuffle of range(count) that stores only the places it touched
    for place in range(count):
        drawn = place + int(generator.random() * (count - place))
        yield moved.get(drawn, drawn)
        moved[drawn] = moved.get(place, place)
