"""The registry (``cuda/registry.yaml``) as typed rows, and the one function that picks a row for a call.

Imports neither torch nor the library, so it answers on any machine, whatever is built there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tilerank.errors import TilerankError

OPERATIONS = ("attention", "layernorm", "block", "linear", "embedding", "token_attention", "layer")
DTYPES = ("fp32", "fp16", "bf16")
LAYOUTS = ("padded", "packed")
MASKS = ("key_lengths", "causal", "boolean", "additive")
DEVICES = ("cpu", "cuda")
PRODUCTS = ("ffma", "fp16x3", "tf32x3", "tf32")
MAX_HEAD_DIM = 256

_REQUIRED = ("file", "device", "rung", "dtypes", "head_dims", "layouts", "masks", "min_sm", "prediction")
_OPTIONAL = (
    *("max_k_len", "workspace", "auto", "preference", "timed_layout", "host_exempt"),
    *("products", "dtype_min_sm", "max_sm", "width_multiple"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One variant. The meaning of each field stands at the top of ``cuda/registry.yaml``."""

    name: str
    file: str
    device: str
    rung: int
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...] | None  # None: every one from 1 to MAX_HEAD_DIM
    layouts: tuple[str, ...]
    masks: tuple[str, ...]
    min_sm: int
    prediction: str
    max_k_len: int | None = None
    workspace: bool = False
    auto: bool = True
    preference: int | None = None  # None: the rung
    timed_layout: str = "padded"
    host_exempt: str | None = None
    products: str = "ffma"
    dtype_min_sm: Mapping[str, int] = field(default_factory=dict, hash=False)
    max_sm: int | None = None
    width_multiple: int = 1

    @property
    def precisions(self) -> tuple[str, ...]:
        """What its results are worth, dtype by dtype: fp32 tensors whose products are TF32 give tf32."""
        return tuple("tf32" if dtype == "fp32" and self.products == "tf32" else dtype for dtype in self.dtypes)

    def lowest_sm(self, dtype: str) -> int:
        """Lowest compute capability, times ten, that it serves ``dtype`` on."""
        return self.dtype_min_sm.get(dtype, self.min_sm)

    def runs_on(self, sm: int, dtype: str) -> bool:
        """Whether its code for ``dtype`` runs on compute capability ``sm``, times ten."""
        return self.lowest_sm(dtype) <= sm and (self.max_sm is None or sm <= self.max_sm)


@dataclass(frozen=True, slots=True)
class Request:
    """What a call needs of a variant, as far as choosing one goes."""

    device: str  # where the tensors are: cpu or cuda
    sm: int  # compute capability times ten; 0 on the CPU
    dtype: str  # fp32, fp16 or bf16
    head_dim: int
    layout: str  # padded or packed
    k_len: int  # keys of the longest sequence
    masks: frozenset[str] = frozenset()  # restrictions the call makes, of MASKS
    width: int = 0  # block: the greatest common divisor of the width and of heads times head dimension


@dataclass(frozen=True, slots=True)
class Selection:
    """The row that ``auto`` takes for a request, and why."""

    row: Row
    reason: str


def cuda_dir() -> Path:
    """The folder of the kernels' sources: beside ``src/`` in a checkout, inside the package once installed."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_cuda", package.parent.parent / "cuda"):
        if (folder / "registry.yaml").is_file():
            return folder
    raise TilerankError(f"the kernel sources are missing: no registry.yaml in {package}/_cuda; reinstall tilerank")


def _subset(where: str, values: Any, allowed: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(values, list) or not set(values) <= set(allowed):
        raise TilerankError(f"{where} is {values!r}; allowed: a list of {', '.join(allowed)}")
    return tuple(values)


def _timed_layout(where: str, values: Mapping[str, Any]) -> str:
    layout = values.get("timed_layout", "padded" if "padded" in values["layouts"] else "packed")
    if layout not in values["layouts"]:
        raise TilerankError(f"{where} is {layout!r}; allowed: one of the row's layouts {values['layouts']}")
    return layout


def _dtype_min_sm(where: str, values: Mapping[str, Any]) -> dict[str, int]:
    given = values.get("dtype_min_sm", {})
    lowest = values["min_sm"]
    if not isinstance(given, Mapping) or not all(
        dtype in values["dtypes"] and type(sm) is int and sm > lowest for dtype, sm in given.items()
    ):
        raise TilerankError(f"{where} is {given!r}; allowed: dtypes of the row, each above its min_sm, {lowest}")
    return dict(given)


def _products(where: str, values: Mapping[str, Any]) -> str:
    products = values.get("products", PRODUCTS[0])
    if products not in PRODUCTS:
        raise TilerankError(f"{where} is {products!r}; allowed: {', '.join(PRODUCTS)}")
    if products == "tf32" and values.get("auto", True):
        raise TilerankError(f"{where} is tf32, which loses accuracy; such a row must say `auto: false`")
    return products


def _parse_row(where: str, name: str, values: Mapping[str, Any]) -> Row:
    if not isinstance(values, Mapping):
        raise TilerankError(f"{where} is {values!r}; expected a row with {', '.join(_REQUIRED)}")
    missing = [key for key in _REQUIRED if key not in values]
    unknown = [key for key in values if key not in (*_REQUIRED, *_OPTIONAL)]
    if missing or unknown:
        raise TilerankError(
            f"{where}: missing keys {missing}, unknown keys {unknown}; required: {', '.join(_REQUIRED)}; "
            f"optional: {', '.join(_OPTIONAL)}"
        )
    if values["device"] not in DEVICES:
        raise TilerankError(f"{where}.device is {values['device']!r}; allowed: {', '.join(DEVICES)}")
    head_dims = values["head_dims"]
    if head_dims != "any" and not (
        isinstance(head_dims, list) and head_dims and all(type(d) is int and 1 <= d <= MAX_HEAD_DIM for d in head_dims)
    ):
        raise TilerankError(f"{where}.head_dims is {head_dims!r}; allowed: any, or a list of 1 to {MAX_HEAD_DIM}")
    return Row(
        name=name,
        file=str(values["file"]),
        device=values["device"],
        rung=int(values["rung"]),
        dtypes=_subset(f"{where}.dtypes", values["dtypes"], DTYPES),
        head_dims=None if head_dims == "any" else tuple(head_dims),
        layouts=_subset(f"{where}.layouts", values["layouts"], LAYOUTS),
        masks=_subset(f"{where}.masks", values["masks"], MASKS),
        min_sm=int(values["min_sm"]),
        prediction=str(values["prediction"]),
        preference=int(values["preference"]) if "preference" in values else None,
        timed_layout=_timed_layout(f"{where}.timed_layout", values),
        max_k_len=int(values["max_k_len"]) if "max_k_len" in values else None,
        workspace=bool(values.get("workspace", False)),
        auto=bool(values.get("auto", True)),
        host_exempt=values.get("host_exempt"),
        products=_products(f"{where}.products", values),
        dtype_min_sm=_dtype_min_sm(f"{where}.dtype_min_sm", values),
        max_sm=int(values["max_sm"]) if "max_sm" in values else None,
        width_multiple=int(values.get("width_multiple", 1)),
    )


def read_registry(path: Path) -> dict[str, tuple[Row, ...]]:
    """Read a ``registry.yaml``: operation -> its rows in the file's order.

    Raises `TilerankError` naming the row and field that does not fit, or a file that a row names and is missing.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TilerankError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise TilerankError(f"{path} is not YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping) or set(content) != {"variants"}:
        raise TilerankError(f"{path}: expected the one top-level key `variants`")
    unknown = [operation for operation in content["variants"] if operation not in OPERATIONS]
    if unknown:
        raise TilerankError(f"{path.name}: variants has {unknown}; allowed: {', '.join(OPERATIONS)}")
    registry = {}
    for operation, rows in content["variants"].items():
        registry[operation] = tuple(
            _parse_row(f"{path.name}: {operation}.{name}", name, values) for name, values in rows.items()
        )
        for row in registry[operation]:
            if not (path.parent / row.file).is_file():
                raise TilerankError(f"{path.name}: {operation}.{row.name}.file is {row.file}, which does not exist")
    return registry


@cache
def rows_of(operation: str) -> tuple[Row, ...]:
    """The variants of one of `OPERATIONS` in this installation's registry, in ladder order."""
    return read_registry(cuda_dir() / "registry.yaml")[operation]


def attention_rows() -> tuple[Row, ...]:
    """The attention variants of this installation's registry, in ladder order."""
    return rows_of("attention")


def get(name: str, operation: str = "attention") -> Row:
    """The operation's variant called ``name``; ValueError with the names that exist."""
    rows = attention_rows() if operation == "attention" else rows_of(operation)
    for row in rows:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in rows)
    raise ValueError(f"no {operation} variant is called {name!r}; there are: {names}")


def refusal(row: Row, request: Request) -> str | None:
    """Why ``row`` does not serve ``request`` (field, value, what it serves), or None when it does."""

    def unless(served: bool, field: str, value: object, serves: object) -> str | None:
        return None if served else f"{field} is {value}; it serves: {serves}"

    def listed(values: Sequence[object]) -> str:
        return ", ".join(map(str, values)) or "none"

    dims = row.head_dims
    extra = [mask for mask in MASKS if mask in request.masks and mask not in row.masks]
    lowest = row.lowest_sm(request.dtype)
    archs = f"{lowest} and above" if row.max_sm is None else f"{lowest} to {row.max_sm}"
    checks = (
        unless(row.device == request.device, "device", request.device, row.device),
        unless(request.dtype in row.dtypes, "dtype", request.dtype, listed(row.dtypes)),
        unless(row.runs_on(request.sm, request.dtype), "sm", request.sm, archs),
        unless(
            1 <= request.head_dim <= MAX_HEAD_DIM if dims is None else request.head_dim in dims,
            "head_dim",
            request.head_dim,
            f"1 to {MAX_HEAD_DIM}" if dims is None else listed(dims),
        ),
        unless(request.layout in row.layouts, "layout", request.layout, listed(row.layouts)),
        unless(not extra, "masks", listed(extra), listed(row.masks)),
        unless(
            row.max_k_len is None or request.k_len <= row.max_k_len, "k_len", request.k_len, f"up to {row.max_k_len}"
        ),
        unless(request.width % row.width_multiple == 0, "width", request.width, f"multiples of {row.width_multiple}"),
    )
    return next((reason for reason in checks if reason), None)


def _preference(row: Row) -> int:
    return row.rung if row.preference is None else row.preference


def select(request: Request, rows: Sequence[Row]) -> Selection:
    """What ``auto`` runs: of the rows that serve the request, the one of the highest preference. That is the rung
    (later rungs were written to be faster) unless measuring said otherwise; the row then gives its own number.
    Rows with ``auto: false`` are left to callers who name them.

    Raises ValueError with every row's reason when none serves.
    """
    passed_over = []
    for row in sorted(rows, key=_preference, reverse=True):
        if not row.auto:
            continue
        reason = refusal(row, request)
        if reason is None:
            why = f"{row.name} is preferred of all that serve this call"
            return Selection(row, f"{why} (passed over: {'; '.join(passed_over)})" if passed_over else why)
        passed_over.append(f"{row.name}: {reason}")
    raise ValueError("no variant serves this call: " + ("; ".join(passed_over) or "there are none"))
