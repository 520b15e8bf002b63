"""Amdahl's law (Amdahl, "Validity of the single processor approach", 1967)."""


def amdahl(share: float, speedup: float) -> float:
    """The whole's speedup when the part that takes ``share`` of its time becomes ``speedup`` times faster."""
    return 1 / (1 - share + share / speedup)
