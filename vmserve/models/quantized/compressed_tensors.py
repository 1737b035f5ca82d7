"""Matrices of compressed-tensors: packed into words, or an int8 each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.grouped import Grouped
from vmserve.models.quantized.layout import (
    WORD_BITS,
    Layout,
    PartNames,
    Parts,
    Shapes,
    Sizes,
    affine,
    axis,
    unpacked,
)

__all__ = ["Int8Layout", "PackedLayout", "read_compressed_tensors"]

#: Tensors of activations that the checkpoint would have rounded to 8 bits: ours are rounded later.
_ACTIVATIONS = ("input_scale", "input_zero_point")


@dataclass(frozen=True)
class PackedLayout:
    """Format pack-quantized: codes of successive inputs share a word, zero points of successive
    outputs; both are stored unsigned."""

    names: ClassVar = PartNames(
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        np.dtype("<i4"),
        order="weight_g_idx",
        ignored=("weight_shape", *_ACTIVATIONS),
    )

    def sizes(self, rows: int, columns: int, shapes: Shapes) -> Sizes:
        bits = WORD_BITS * axis(shapes["weight_packed"], 1) // columns
        return Sizes(rows, columns, bits, axis(shapes["weight_scale"], 1))

    def shapes(self, sizes: Sizes, stored: Shapes) -> Shapes:
        return {
            "weight_packed": (sizes.rows, sizes.words(sizes.columns)),
            "weight_scale": (sizes.rows, sizes.groups),
            "weight_zero_point": (sizes.words(sizes.rows), sizes.groups),
            "weight_g_idx": (sizes.columns,),
        }

    def grouped(self, sizes: Sizes, parts: Parts) -> Grouped:
        codes = unpacked(parts["weight_packed"], sizes.bits)
        zero = None
        if "weight_zero_point" in parts:
            stored = unpacked(parts["weight_zero_point"].T, sizes.bits)
            zero = stored[:, : sizes.rows].T.astype(np.int16)
        return affine(sizes, codes, parts["weight_scale"], zero)


@dataclass(frozen=True)
class Int8Layout:
    """Formats int-quantized and naive-quantized: codes and zero points are int8, and one scale may
    be a row's or the whole matrix's."""

    names: ClassVar = PartNames(
        "weight", "weight_scale", "weight_zero_point", np.dtype("<i1"), ignored=_ACTIVATIONS
    )

    def sizes(self, rows: int, columns: int, shapes: Shapes) -> Sizes:
        scale = shapes["weight_scale"]
        return Sizes(rows, columns, 8, scale[1] if len(scale) > 1 else 1)

    def shapes(self, sizes: Sizes, stored: Shapes) -> Shapes:
        own = {(sizes.rows, sizes.groups), (sizes.rows,), (1,), ()}
        scale = stored["weight_scale"]
        expected = scale if scale in own else (sizes.rows, sizes.groups)
        return {
            "weight": (sizes.rows, sizes.columns),
            "weight_scale": expected,
            "weight_zero_point": expected,
        }

    def grouped(self, sizes: Sizes, parts: Parts) -> Grouped:
        shape = sizes.rows, sizes.groups

        def by_group(part: str) -> Any:
            column = parts[part].reshape(-1, sizes.groups)
            return np.ascontiguousarray(np.broadcast_to(column, shape))

        zero = None
        if "weight_zero_point" in parts:
            zero = by_group("weight_zero_point").astype(np.int16) + np.int16(128)
        unsigned = parts["weight"].view(np.uint8) ^ np.uint8(128)
        return affine(sizes, unsigned, by_group("weight_scale"), zero)


_LAYOUTS: Mapping[str, Layout] = {
    "pack-quantized": PackedLayout(),
    "int-quantized": Int8Layout(),
    "naive-quantized": Int8Layout(),
}


def read_compressed_tensors(raw: Mapping[str, Any]) -> tuple[Layout, ...]:
    """The quantized modules and their bits, as their tensors show them.

    Weights are computed as they are stored; activations are not rounded as the schemes say.
    """
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigurationError("config.json: quantization_config has no config_groups")
    # transforms, sparsity and such change what weights or activations mean
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if raw.get(key):
            raise _unsupported(key, raw[key])
    found: dict[str, Layout] = {}
    for name, scheme in groups.items():
        if not isinstance(scheme, dict):
            raise _unsupported(f"config_groups.{name}", scheme)
        stored_as = str(scheme.get("format") or raw.get("format"))
        if stored_as not in _LAYOUTS:
            raise UnsupportedError(
                f"config.json: quantization_config has the format {stored_as!r}: not supported; "
                f"supported: {', '.join(_LAYOUTS)}"
            )
        _check(f"config_groups.{name}.weights", scheme.get("weights"))
        for key in ("input_activations", "output_activations"):
            if scheme.get(key):
                _check(f"config_groups.{name}.{key}", scheme[key])
        found[stored_as] = _LAYOUTS[stored_as]
    return tuple(dict.fromkeys(found.values()))


def _check(name: str, arguments: Any) -> None:
    """Refuse all but integers of 4 or 8 bits."""
    if not isinstance(arguments, dict):
        raise _unsupported(name, arguments)
    kind, bits = arguments.get("type", "int"), arguments.get("num_bits", 8)
    if kind != "int" or bits not in (4, 8):
        raise UnsupportedError(
            f"config.json: quantization_config.{name} are of type {kind!r} with {bits} bits: not "
            "supported; supported: int with 4 or 8 bits"
        )


def _unsupported(name: str, value: object) -> UnsupportedError:
    shown = str(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return UnsupportedError(f"config.json: quantization_config.{name} = {shown} is not supported")
