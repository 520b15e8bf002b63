"""The kernel library: load it, check that it is the right one, call it.

Everything here mirrors ``cuda/include/tilerank.h``, which documents each field. No framework is imported: pointers are
integers, and the caller answers for the memory behind them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tilerank.errors import TilerankError
from tilerank.kernels import build as builds
from tilerank.kernels.registry import DEVICES, DTYPES, LAYOUTS, MASKS, OPERATIONS

ABI_VERSION = 1

OK, INVALID_ARGUMENT, UNKNOWN_VARIANT, UNSUPPORTED, WORKSPACE, LAUNCH_FAILED = range(6)
"""Values of tilerank_status."""

DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
"""TILERANK_FP32, ..., by the registry's names."""

LENGTHS_NONE, LENGTHS_INT32, LENGTHS_INT64 = range(3)
WEIGHTS_OUT_IN, WEIGHTS_IN_OUT = range(2)
ACTIVATION_NONE, ACTIVATION_GELU, ACTIVATION_TANH = range(3)
FORMAT_PLAIN, FORMAT_INTERLEAVED, FORMAT_SPLIT = range(3)
MASK_NONE, MASK_BOOL, MASK_FP32, MASK_FP16, MASK_BF16 = range(5)


class KernelError(TilerankError):
    """The library refused a call; nothing was launched. ``status`` is one of the constants above, the message names
    the field, its value and what is allowed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AttentionParams(ctypes.Structure):
    """tilerank_attention_params: attention over a padded batch. Starts as zeros; strides count elements."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64),
        ("k_len", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("q_strides", ctypes.c_int64 * 3),  # batch, head, token
        ("k_strides", ctypes.c_int64 * 3),
        ("v_strides", ctypes.c_int64 * 3),
        ("out_strides", ctypes.c_int64 * 3),
        ("key_lengths", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("key_lengths_type", ctypes.c_int32),
        ("mask_type", ctypes.c_int32),
        ("mask_strides", ctypes.c_int64 * 4),  # batch, head, query, key
    )


class AttentionVarlenParams(ctypes.Structure):
    """tilerank_attention_varlen_params: attention over packed sequences."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_double),
        ("batch", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("q_strides", ctypes.c_int64 * 2),  # head, token
        ("k_strides", ctypes.c_int64 * 2),
        ("v_strides", ctypes.c_int64 * 2),
        ("out_strides", ctypes.c_int64 * 2),
        ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p),
        ("overlap", ctypes.c_int32),
    )


class LayernormParams(ctypes.Structure):
    """tilerank_layernorm_params: layer normalisation of rows. Starts as zeros; strides count elements."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("sum_stride", ctypes.c_int64),
    )


class FusedAttentionParams(ctypes.Structure):
    """tilerank_fused_attention_params: the attention block. Starts as zeros; strides count elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo")),
        *((name, ctypes.c_void_p) for name in ("gamma", "beta", "residual", "key_lengths", "out")),
        ("dtype", ctypes.c_int32),
        ("key_lengths_type", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("pre_ln", ctypes.c_int32),
        ("weight_layout", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("batch", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("x_strides", ctypes.c_int64 * 2),  # batch, token
        ("residual_strides", ctypes.c_int64 * 2),
        ("out_strides", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("wq_stride", "wk_stride", "wv_stride", "wo_stride")),
    )


class LinearParams(ctypes.Structure):
    """tilerank_linear_params: a linear layer and what follows it. Starts as zeros; strides count elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "residual", "gamma", "beta", "out")),
        ("dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("weight_format", ctypes.c_int32),
        ("weight_exponent", ctypes.c_int32),
        ("x_exponent", ctypes.c_int32),
        ("overlap", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class EmbeddingParams(ctypes.Structure):
    """tilerank_embedding_params: the embeddings of tokens, normalised. Starts as zeros; strides count elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "places", "type_ids", "words", "positions", "types")),
        *((name, ctypes.c_void_p) for name in ("gamma", "beta", "out")),
        ("dtype", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("word_count", ctypes.c_int64),
        ("position_count", ctypes.c_int64),
        ("type_count", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
    )


class TokenAttentionParams(ctypes.Structure):
    """tilerank_token_attention_params: attention from one token of each packed sequence. Strides count elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "cu_seqlens_k")),
        ("dtype", ctypes.c_int32),
        ("overlap", ctypes.c_int32),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "head_dim", "total_k")),
        *((name, ctypes.c_int64 * 2) for name in ("q_strides", "k_strides", "v_strides", "out_strides")),  # head, row
    )


class LayerParams(ctypes.Structure):
    """tilerank_layer_params: what stands between two attentions. Starts as zeros; strides count elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("found", "x", "out", "next")),
        *((f"{name}_weight", ctypes.c_void_p) for name in ("out", "up", "down", "next")),
        *((f"{name}_bias", ctypes.c_void_p) for name in ("out", "up", "down", "next")),
        *((name, ctypes.c_void_p * 2) for name in ("gammas", "betas")),
        ("dtype", ctypes.c_int32),
        ("overlap", ctypes.c_int32),
        ("epsilon", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("rows", "width", "wide", "next_columns")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("found", "x", "out", "next")),
    )


Params: TypeAlias = (
    AttentionParams
    | AttentionVarlenParams
    | TokenAttentionParams
    | LayernormParams
    | FusedAttentionParams
    | LinearParams
    | EmbeddingParams
    | LayerParams
)


class _VariantStruct(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("device", ctypes.c_int32),
        ("min_sm", ctypes.c_int32),
        ("dtypes", ctypes.c_uint32),
        ("layouts", ctypes.c_uint32),
        ("masks", ctypes.c_uint32),
        ("head_dim_count", ctypes.c_int32),
        ("head_dims", ctypes.POINTER(ctypes.c_int32)),
        ("max_k_len", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant as the library itself describes it; fields as in `tilerank.kernels.registry.Row`."""

    name: str
    file: str
    device: str
    min_sm: int
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    masks: tuple[str, ...]
    head_dims: tuple[int, ...] | None
    max_k_len: int | None


def _names(bits: int, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for position, name in enumerate(names) if bits >> position & 1)


def _variant(raw: _VariantStruct) -> Variant:
    return Variant(
        name=raw.name.decode(),
        file=raw.file.decode(),
        device=DEVICES[raw.device],
        min_sm=raw.min_sm,
        dtypes=_names(raw.dtypes, DTYPES),
        layouts=_names(raw.layouts, LAYOUTS),
        masks=_names(raw.masks, MASKS),
        head_dims=tuple(raw.head_dims[i] for i in range(raw.head_dim_count)) or None,
        max_k_len=raw.max_k_len or None,
    )


class Library:
    """A loaded ``libtilerank.so``.

    Args:
        path: the file.
        expected_build_id: what the sources would build to; a library that says otherwise is refused. None: any.

    Raises:
        TilerankError: not a loadable library, another interface version, or another build.
    """

    def __init__(self, path: Path, expected_build_id: str | None = None) -> None:
        try:
            library = ctypes.CDLL(str(path))
            library.tilerank_abi_version.restype = ctypes.c_int32
            abi_version = library.tilerank_abi_version()
        except (OSError, AttributeError) as error:
            raise TilerankError(
                f"{path} is not a usable kernel library ({error}); delete it to have it built again"
            ) from error
        if abi_version != ABI_VERSION:
            raise TilerankError(
                f"{path} has interface version {abi_version}; this package speaks {ABI_VERSION}: delete it"
            )
        self._library = library
        self.path = path
        self.build_id = self._text("tilerank_build_id")
        if expected_build_id is not None and self.build_id != expected_build_id:
            raise TilerankError(
                f"{path} was built from other sources: its build id is {self.build_id}, that of these sources "
                f"{expected_build_id}; delete it to have it built again"
            )
        self.backend = self._text("tilerank_backend")
        self.archs = tuple(self._text("tilerank_archs").split())
        self._last_error = self._function("tilerank_last_error", ctypes.c_char_p)
        self.variants_of = {operation: self._variants(operation) for operation in OPERATIONS}
        self.variants = self.variants_of["attention"]
        self._run = {}
        self._workspace_size = {}
        for kind, name in (
            (AttentionParams, "tilerank_attention"),
            (AttentionVarlenParams, "tilerank_attention_varlen"),
            (LayernormParams, "tilerank_layernorm"),
            (FusedAttentionParams, "tilerank_fused_attention"),
            (LinearParams, "tilerank_linear"),
            (EmbeddingParams, "tilerank_embedding"),
            (TokenAttentionParams, "tilerank_token_attention"),
            (LayerParams, "tilerank_layer"),
        ):
            pointer = ctypes.POINTER(kind)
            self._run[kind] = self._function(
                name, ctypes.c_int32, ctypes.c_char_p, pointer, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
            )
            self._workspace_size[kind] = self._function(
                f"{name}_workspace_size", ctypes.c_int32, ctypes.c_char_p, pointer, ctypes.POINTER(ctypes.c_size_t)
            )

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._library, name)
        function.restype = result
        function.argtypes = arguments
        return function

    def _variants(self, operation: str) -> tuple[Variant, ...]:
        count = self._function(f"tilerank_{operation}_variant_count", ctypes.c_int32)
        at = self._function(f"tilerank_{operation}_variant", ctypes.POINTER(_VariantStruct), ctypes.c_int32)
        return tuple(_variant(at(index).contents) for index in range(count()))

    def _text(self, name: str) -> str:
        return self._function(name, ctypes.c_char_p)().decode()

    def __repr__(self) -> str:
        return f"Library({str(self.path)!r}, backend={self.backend!r}, archs={self.archs!r})"

    def last_error(self) -> str:
        """Why this thread's last refused call was refused; empty before any."""
        return self._last_error().decode(errors="replace")

    def variant(self, name: str, operation: str = "attention") -> Variant:
        """The operation's variant called ``name``; ValueError with the names that this library has."""
        variants = self.variants_of[operation]
        for variant in variants:
            if variant.name == name:
                return variant
        raise ValueError(f"{self.path} has no variant {name!r}; it has: {', '.join(v.name for v in variants)}")

    def workspace_size(self, variant: str, params: Params) -> int:
        """Bytes of workspace that the operation of these parameters needs.

        Raises:
            KernelError: the call would be refused.
        """
        size = ctypes.c_size_t()
        self._check(self._workspace_size[type(params)](variant.encode(), ctypes.byref(params), ctypes.byref(size)))
        return size.value

    def run(self, variant: str, params: Params, workspace: int = 0, workspace_bytes: int = 0, stream: int = 0) -> None:
        """Queue the operation of these parameters on ``stream`` (a cudaStream_t; 0 is the default stream).

        Raises:
            KernelError: the call was refused, and nothing was launched.
        """
        self._check(self._run[type(params)](variant.encode(), ctypes.byref(params), workspace, workspace_bytes, stream))

    def _check(self, status: int) -> None:
        if status != OK:
            raise KernelError(status, self.last_error())


def load(target: builds.Target | None = None) -> Library:
    """The library of this installation's sources: the one that came with the package, else built on first use.

    Args:
        target: what it must be built for. None: the best that this machine can run (the package's own, or a build for
            every architecture, if there is one; else for the devices present; without a device, the reference).

    Raises:
        TilerankError: it can be neither found nor built, or is not what these sources build to.
    """
    with _load_lock:
        return _load(target)


_load_lock = threading.Lock()


@cache
def _load(target: builds.Target | None) -> Library:
    packaged = builds.packaged()
    target = target or _best_target(packaged)
    built = packaged.built if packaged is not None and packaged.serves(target) else builds.build(target)
    return Library(built.path, built.build_id)


def _best_target(packaged: builds.Packaged | None) -> builds.Target:
    target = builds.default_target()
    if packaged is not None and target.backend == "cpu" and (capabilities := builds.present_capabilities()):
        wanted = builds.Target("cuda", builds.archs_for(capabilities))
        return wanted if packaged.serves(wanted) else target  # there is no nvcc, and none may be needed
    if target.backend == "cuda" and not (packaged is not None and packaged.serves(target)):
        complete = builds.Target("cuda", builds.ALL_ARCHS)
        if builds.library_path(builds.build_id(complete)).exists():
            return complete
    return target
