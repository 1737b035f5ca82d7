"""How a format stores a quantized matrix: tensors ``MODULE.PART`` in place of ``MODULE.weight``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve.models.grouped import Factors, Grouped

__all__ = [
    "KERNEL_GROUP",
    "WORD_BITS",
    "Layout",
    "PartNames",
    "Parts",
    "Shape",
    "Shapes",
    "Sizes",
    "affine",
    "axis",
    "unpacked",
]

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
#: Integers, and scales of float16 or float32.
Parts = Mapping[str, NDArray[Any]]

#: Columns that kernels take at a time: groups are multiples of it.
KERNEL_GROUP = 32
WORD_BITS = 32


@dataclass(frozen=True)
class Sizes:
    rows: int
    columns: int
    bits: int
    groups: int

    @property
    def group(self) -> int:
        return self.columns // self.groups

    def words(self, count: int) -> int:
        """Words of 32 bits that ``count`` codes take."""
        return -(-count * self.bits // WORD_BITS)

    def refusal(self) -> str | None:
        """Return why no kernel multiplies by such a matrix; None if one does."""
        if self.bits not in (4, 8):
            return f"codes of {self.bits} bits are not supported; supported: 4 and 8"
        if self.groups < 1 or self.columns % self.groups or self.group % KERNEL_GROUP:
            return (
                f"{self.groups:,} groups of {self.columns:,} inputs are not supported: a group "
                f"must have a multiple of {KERNEL_GROUP}"
            )
        return None


@dataclass(frozen=True)
class PartNames:
    """``codes`` and ``zero`` are integers of type ``element``. A module that has such codes is
    quantized."""

    codes: str
    scale: str
    zero: str
    element: np.dtype[Any]
    zero_needed: bool = False
    #: Tensor with the group of each column, where the format allows any.
    order: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        return (self.codes, self.scale, self.zero) if self.zero_needed else (self.codes, self.scale)


class Layout(Protocol):
    @property
    def names(self) -> PartNames: ...

    def sizes(self, rows: int, columns: int, shapes: Shapes) -> Sizes:
        """Tell bits and groups from the shapes of the codes and the scales."""

    def shapes(self, sizes: Sizes, stored: Shapes) -> Shapes:
        """The shapes that parts must have."""

    def grouped(self, sizes: Sizes, parts: Parts) -> Grouped:
        """The matrix."""


def axis(shape: Shape, number: int) -> int:
    """Length of an axis of a matrix; 0 where it is none."""
    return shape[number] if len(shape) == 2 else 0


def unpacked(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Codes along the last axis: each word has its first one in the lowest bits."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack((octets & 0xF, octets >> 4), axis=-1).reshape(*octets.shape[:-1], -1)


def affine(
    sizes: Sizes,
    codes: NDArray[np.uint8],
    scale: NDArray[np.float16] | NDArray[np.float32],
    zero: NDArray[np.int16] | None,
) -> Grouped:
    """Matrix of weights ``(code - zero) * scale``.

    codes: ``[rows, columns]``, unsigned; scale, zero: ``[rows, groups]``; None: the middle of the
    codes.
    """
    bits: Literal[4, 8] = 4 if sizes.bits == 4 else 8
    middle = 1 << bits - 1
    # What is added to a code's own zero: 0 with 4 bits, 128 with 8, whose codes are int8.
    own = 0 if bits == 4 else middle
    least = np.full(scale.shape, own - middle, np.int16) if zero is None else np.int16(own) - zero
    repeats = sizes.group // KERNEL_GROUP
    # Minima are whole multiples of the scales. Where groups are long, or zeros not the middle, each
    # group of the kernels has a byte for both.
    multiples: NDArray[np.int8] | None = None
    if repeats > 1 or (least != own - middle).any():
        multiples = np.ones((sizes.rows, sizes.groups * repeats), np.int8)
    return Grouped(
        bits,
        KERNEL_GROUP,
        codes if bits == 4 else codes ^ np.uint8(middle),
        Factors(scale, multiples),
        Factors(scale, np.repeat(least, repeats, axis=1)) if least.any() else None,
    )
