"""Round weights to codes of 4 or 8 bits, with the scale of each group that errs least."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32, rounded

__all__ = ["round_weights"]

_Floats = NDArray[np.float32]

#: Shares of a group's largest weight that the lowest code stands for. Clipping it can err less. A
#: share above 1 gives the other end more room.
_SHARES = {4: np.linspace(0.8, 1.15, 6), 8: np.array((1.0, 128 / 127))}


def round_weights(
    weights: _Floats, bits: int, group: int, scale_dtype: DType
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Return codes, unsigned, and scales ``[rows, groups]`` of ``scale_dtype``, bfloat16 as bits.

    A weight is ``(code - middle) * scale``. The largest of a group gets the lowest code, which is
    further from the middle than the highest: so a scale may be negative.
    """
    middle = np.float32(1 << bits - 1)
    grouped = weights.reshape(-1, group)
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=1)[:, None], axis=1)
    best_scale, best_error = np.zeros_like(largest), np.full_like(largest, np.inf)
    for share in _SHARES[bits]:
        steps = _steps(grouped, _held(largest * np.float32(-share) / middle, scale_dtype), middle)
        # With these codes, the scale that errs least, and the codes that it gives.
        squares = _sums(steps, steps)
        fitted = _sums(steps, grouped) / np.where(squares > 0, squares, 1)
        scale = _held(fitted.astype(np.float32), scale_dtype)
        steps = _steps(grouped, scale, middle)
        steps *= scale
        steps -= grouped
        error = _sums(steps, steps)
        better = error < best_error
        best_scale[better], best_error[better] = scale[better], error[better]
    codes = _steps(grouped, best_scale, middle) + middle
    scales = rounded(best_scale, scale_dtype).reshape(len(weights), -1)
    return codes.astype(np.uint8).reshape(weights.shape), scales


def _steps(grouped: _Floats, scale: _Floats, middle: np.float32) -> _Floats:
    inverse = np.float32(1) / np.where(scale == 0, np.float32(np.inf), scale)
    steps: _Floats = (grouped * inverse).astype(np.float32, copy=False)
    np.rint(steps, out=steps)
    return np.clip(steps, -middle, middle - 1, out=steps)


def _sums(left: _Floats, right: _Floats) -> _Floats:
    sums: _Floats = np.einsum("ij,ij->i", left, right)[:, None]
    return sums


def _held(scale: _Floats, dtype: DType) -> _Floats:
    """Round to ``dtype``, and to what float16 holds: the packed form takes 16 bits for it."""
    own = as_float32(rounded(scale, dtype), dtype)
    return own.astype(np.float16).astype(np.float32)
