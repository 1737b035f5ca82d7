"""Matrices of small integers with a scale, and perhaps a minimum, per group of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vmserve import _core

__all__ = ["Factors", "Grouped"]


@dataclass(frozen=True)
class Factors:
    """A number for each group: ``coarse`` of its block times ``fine``, exact in float32.

    float16 has 11 significant bits and ``fine`` at most 8, so that no product is rounded; it would
    be in float16. With ``coarse`` of more than 16 bits, products are rounded to float32.
    """

    #: Scales ``[rows, blocks]``.
    coarse: NDArray[np.float16] | NDArray[np.float32]
    #: Factors ``[rows, groups]``, a whole number of groups to a block; None: 1 everywhere.
    fine: NDArray[np.integer[Any]] | None = None

    def expanded(self) -> NDArray[np.float32]:
        """``[rows, groups]``"""
        coarse = self.coarse.astype(np.float32)
        if self.fine is None:
            return coarse
        repeats = self.fine.shape[1] // coarse.shape[1]
        # A hostile file has infinities; the weights are then as it says.
        with np.errstate(invalid="ignore"):
            return np.repeat(coarse, repeats, axis=1) * self.fine.astype(np.float32)

    def rows(self, part: slice | NDArray[np.int64]) -> Factors:
        return Factors(self.coarse[part], None if self.fine is None else self.fine[part])

    def steps(self) -> NDArray[np.float32] | None:
        """What the factors are whole multiples of, ``[rows, blocks]``; None: they have no steps."""
        return None if self.fine is None else self.coarse.astype(np.float32)


@dataclass(frozen=True)
class Grouped:
    """A matrix ``[rows, columns]`` in groups of ``group`` columns: a weight is ``code * scale +
    minimum``.

    ``codes``: one to a byte, 0 to 15 of 4 bits, int8's bits of 8.
    """

    bits: Literal[4, 8]
    group: int
    codes: NDArray[np.uint8]
    scale: Factors
    #: Numbers added to each weight of a group; None: nothing is added.
    minimum: Factors | None = None

    def expand(self, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
        """The weights, ``[rows, columns]``: in float32 each is rounded once, where the minimum is
        added; in float64 not even that, but for a minimum 2^30 times smaller than its scale."""
        codes = self.codes.view(np.int8)
        grouped = codes.reshape(codes.shape[0], -1, self.group).astype(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            grouped *= self.scale.expanded()[:, :, None]
            if self.minimum is not None:
                grouped += self.minimum.expanded()[:, :, None]
        return grouped.reshape(codes.shape)

    def rows(self, part: slice | NDArray[np.int64]) -> Grouped:
        minimum = None if self.minimum is None else self.minimum.rows(part)
        codes = np.ascontiguousarray(self.codes[part])
        return Grouped(self.bits, self.group, codes, self.scale.rows(part), minimum)

    def packable(self) -> _core.GroupedWeights:
        """The same matrix, as the kernels take it."""
        minimum = self.minimum
        if minimum is None and self.bits == 4:
            minimum = Factors(np.zeros_like(self.scale.coarse), self.scale.fine)
        return _core.GroupedWeights(
            codes=self.codes,
            bits=self.bits,
            group=self.group,
            scales=self.scale.expanded(),
            scale_steps=self.scale.steps(),
            minima=None if minimum is None else minimum.expanded(),
            minimum_steps=None if minimum is None or self.scale.fine is None else minimum.steps(),
        )
