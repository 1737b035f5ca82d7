"""Numbers of 4 bits (e2m1) in groups with a power of two (e8m0): MXFP4."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["DOUBLED", "NO_NUMBER", "half_powers"]

_MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
#: Doubled value of each code, a whole number, as the bits of int8.
DOUBLED = np.concatenate((_MAGNITUDES, -_MAGNITUDES)).view(np.uint8)
#: Exponent that stands for NaN.
NO_NUMBER = 255
#: Exponent of a scale of 1.
_BIAS = 127


def half_powers(exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Half of each group's scale, exact; NaN for :data:`NO_NUMBER`."""
    halves = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS - 1)
    return np.where(exponents == NO_NUMBER, np.float32(np.nan), halves)
