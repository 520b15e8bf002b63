"""The kernels' side of the package: which variants there are, how the library is built, loaded and called.

`registry` knows the rows, `build` makes the library, `library` loads it; none of them imports a framework.
`torch_ops` and `huggingface` are the bindings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilerank.kernels.diagnosis import Check


def doctor() -> Iterator[Check]:
    """Check step by step whether this machine compiles and runs kernels (see `tilerank.kernels.diagnosis`)."""
    from tilerank.kernels import diagnosis

    return diagnosis.doctor()
