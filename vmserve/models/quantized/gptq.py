"""Matrices of GPTQ: codes of successive inputs share a word, zero points of successive outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vmserve.errors import UnsupportedError
from vmserve.models.grouped import Grouped
from vmserve.models.quantized.layout import (
    WORD_BITS,
    PartNames,
    Parts,
    Shapes,
    Sizes,
    affine,
    axis,
    unpacked,
)

__all__ = ["GptqLayout", "read_gptq"]


@dataclass(frozen=True)
class GptqLayout:
    """``zero_offset``: added to the zero points that are stored."""

    zero_offset: int

    names: ClassVar = PartNames(
        "qweight", "scales", "qzeros", np.dtype("<i4"), zero_needed=True, order="g_idx"
    )

    def sizes(self, rows: int, columns: int, shapes: Shapes) -> Sizes:
        bits = WORD_BITS * axis(shapes["qweight"], 0) // columns
        return Sizes(rows, columns, bits, axis(shapes["scales"], 0))

    def shapes(self, sizes: Sizes, stored: Shapes) -> Shapes:
        return {
            "qweight": (sizes.words(sizes.columns), sizes.rows),
            "qzeros": (sizes.groups, sizes.words(sizes.rows)),
            "scales": (sizes.groups, sizes.rows),
            "g_idx": (sizes.columns,),
        }

    def grouped(self, sizes: Sizes, parts: Parts) -> Grouped:
        codes = unpacked(parts["qweight"].T, sizes.bits)
        zeros = unpacked(parts["qzeros"], sizes.bits)[:, : sizes.rows].T
        # A zero point of 0, less one, was stored as the largest code.
        zeros = (zeros + np.uint8(self.zero_offset)) & np.uint8((1 << sizes.bits) - 1)
        scale = np.ascontiguousarray(parts["scales"].T)
        return affine(sizes, codes, scale, zeros.astype(np.int16))


def read_gptq(raw: Mapping[str, Any]) -> GptqLayout:
    stored_as = raw.get("checkpoint_format", "gptq")
    # The first version stores a zero point less one.
    offsets = {"gptq": 1, "gptq_v2": 0}
    if stored_as not in offsets:
        raise UnsupportedError(
            f"config.json: quantization_config.checkpoint_format {stored_as!r} is not supported; "
            f"supported: {', '.join(offsets)}"
        )
    return GptqLayout(offsets[stored_as])
