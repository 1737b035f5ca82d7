"""The kernels' arguments, field by field as csrc/cuda/params.h has them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "AttendArgs",
    "CombineArgs",
    "GateArgs",
    "KvLayer",
    "MoveArgs",
    "NormArgs",
    "WriteArgs",
]

_Fields = list[tuple[str, Any]]


def _fields(pointers: str = "", strides: str = "", floats: str = "", ints: str = "") -> _Fields:
    """Fields by kind, in the order in which every structure has them."""
    kinds: Mapping[Any, str] = {
        ctypes.c_uint64: pointers,
        ctypes.c_int64: strides,
        ctypes.c_float: floats,
        ctypes.c_int32: ints,
    }
    return [(name, kind) for kind, names in kinds.items() for name in names.split()]


class KvLayer(ctypes.Structure):
    _fields_: ClassVar[_Fields] = _fields(
        "keys values table",
        "page_stride token_stride head_stride",
        ints="table_width block_shift blocks_per_page reserved",
    )


class AttendArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("kv", KvLayer),
        *_fields(
            "q out lse parts part_sums scratch items num_items lists positions part_starts sinks",
            "q_token_stride q_head_stride",
            "scale softcap",
            "window kv_heads group reserved",
        ),
    ]


class CombineArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = _fields(
        "parts part_sums out lse split num_split sinks", ints="q_heads reserved"
    )


class WriteArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = [
        ("kv", KvLayer),
        *_fields(
            "q k v cos sin q_out rows positions",
            "q_token_stride q_head_stride k_token_stride k_head_stride v_token_stride "
            "v_head_stride cos_stride sin_stride",
            ints="q_heads kv_heads rotary_dim pieces",
        ),
    ]


class NormArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = _fields(
        "x residual weight out", floats="eps", ints="size reserved reserved_too"
    )


class GateArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = _fields(
        "gate up out",
        "gate_stride up_stride out_stride",
        ints="size activation pieces reserved",
    )


class MoveArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = _fields("runs num_runs", ints="pieces reserved")
