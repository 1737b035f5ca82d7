"""Matrices of AWQ ("gemm"): eight outputs share a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import UnsupportedError
from vmserve.models.grouped import Grouped
from vmserve.models.quantized.layout import PartNames, Parts, Shapes, Sizes, affine, axis, unpacked

__all__ = ["AwqLayout", "read_awq"]

_BITS = 4
#: Places of the outputs in a word.
_PLACES = np.array((0, 4, 1, 5, 2, 6, 3, 7))


@dataclass(frozen=True)
class AwqLayout:
    names: ClassVar = PartNames("qweight", "scales", "qzeros", np.dtype("<i4"), zero_needed=True)

    def sizes(self, rows: int, columns: int, shapes: Shapes) -> Sizes:
        return Sizes(rows, columns, _BITS, axis(shapes["scales"], 0))

    def shapes(self, sizes: Sizes, stored: Shapes) -> Shapes:
        return {
            "qweight": (sizes.columns, sizes.words(sizes.rows)),
            "qzeros": (sizes.groups, sizes.words(sizes.rows)),
            "scales": (sizes.groups, sizes.rows),
        }

    def grouped(self, sizes: Sizes, parts: Parts) -> Grouped:
        codes, zeros = (_by_output(parts[part]) for part in ("qweight", "qzeros"))
        scale = np.ascontiguousarray(parts["scales"].T)
        return affine(sizes, codes, scale, zeros.astype(np.int16))


def _by_output(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """``[..., words]`` to ``[outputs, ...]``."""
    codes = unpacked(words, _BITS).reshape(len(words), -1, len(_PLACES))[:, :, _PLACES]
    return np.ascontiguousarray(codes.reshape(len(words), -1).T)


def read_awq(raw: Mapping[str, Any]) -> AwqLayout:
    bits, version = raw.get("bits", 4), str(raw.get("version", "gemm")).lower()
    if bits != _BITS or version != "gemm":
        raise UnsupportedError(
            f"config.json: quantization_config asks for AWQ of {bits} bits, version {version!r}: "
            "not supported; supported: 4 bits, version gemm"
        )
    return AwqLayout()
