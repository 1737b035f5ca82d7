"""Quantized blocks of GGUF as two forms that kernels multiply by.

4 bits with a scale and a minimum per group (Q4_0, Q4_1, Q4_K), and 8 bits with a scale, and perhaps
a minimum, per group (Q8_0, Q5_0, Q5_1, Q5_K, Q6_K, MXFP4; packed in as few bits as the codes take).
A weight is ``quant * scale + minimum``, with the numbers that the file has: nothing is rounded a
second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.models.e2m1 import DOUBLED, half_powers
from vmserve.models.gguf.block_types import BlockType
from vmserve.models.grouped import Factors, Grouped

__all__ = ["is_quantized", "repack"]

_Bytes = NDArray[np.uint8]
_Halves = NDArray[np.float16]


def repack(type: BlockType, raw: _Bytes) -> Grouped:
    """``raw``: ``[rows, bytes of a row]`` of a quantized type."""
    blocks = raw.reshape(raw.shape[0], -1, type.num_bytes)
    bits, group, factors = _FORMS[type.name]
    if type.name == "MXFP4":
        codes = _e2m1_codes(blocks).reshape(raw.shape[0], -1)
    else:
        codes = _core.unpack_codes(type.name, np.ascontiguousarray(raw))
    return Grouped(bits, group, codes, *factors(blocks))


def is_quantized(type: BlockType) -> bool:
    return type.name in _FORMS


# Below, ``blocks`` is [rows, blocks, bytes of a block]; scale and minimum are returned.


def _halves(blocks: _Bytes, first: int) -> _Halves:
    """The float16 at byte ``first`` of each block, ``[rows, blocks]``."""
    return np.ascontiguousarray(blocks[:, :, first : first + 2].view("<f2")[:, :, 0])


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.reshape(array.shape[0], -1))


def _scale(blocks: _Bytes) -> tuple[Factors, None]:
    return Factors(_halves(blocks, 0)), None


def _scale_of_signed(blocks: _Bytes) -> tuple[Factors, Factors]:
    """Codes of 4 bits begin at -8."""
    scale = _halves(blocks, 0)
    return Factors(scale), Factors(scale, np.full(scale.shape, -8, np.int8))


def _scale_and_minimum(blocks: _Bytes) -> tuple[Factors, Factors]:
    return Factors(_halves(blocks, 0)), Factors(_halves(blocks, 2))


def _k_factors(blocks: _Bytes) -> tuple[Factors, Factors]:
    """Scale and minimum of Q4_K and Q5_K: 6 bits each for eight groups, in 12 bytes from byte 4.

    Bytes 0 to 3 have the scales of the first four groups, 4 to 7 their minima, and 8 to 11 the low
    halves of the others', whose two high bits are those of bytes 0 to 7.
    """
    first, second, third = (blocks[:, :, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=2)
    minima = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=2)
    scale = Factors(_halves(blocks, 0), _rows(scales))
    return scale, Factors(-_halves(blocks, 2), _rows(minima))


def _q6_k_scale(blocks: _Bytes) -> tuple[Factors, None]:
    return Factors(_halves(blocks, 208), _rows(blocks[:, :, 192:208]).view(np.int8)), None


def _e2m1_scale(blocks: _Bytes) -> tuple[Factors, None]:
    return Factors(half_powers(blocks[:, :, 0])), None


def _e2m1_codes(blocks: _Bytes) -> _Bytes:
    """Lower halves of the bytes are the first codes of a block, upper halves the others."""
    packed = blocks[:, :, 1:]
    return np.concatenate((DOUBLED[packed & 15], DOUBLED[packed >> 4]), axis=2)


_Factors = Callable[[_Bytes], tuple[Factors, Factors | None]]
#: Bits of a code, columns of a group, scales and minima.
_FORMS: Mapping[str, tuple[Literal[4, 8], int, _Factors]] = {
    "Q4_0": (4, 32, _scale_of_signed),
    "Q4_1": (4, 32, _scale_and_minimum),
    "Q4_K": (4, 32, _k_factors),
    "Q5_0": (8, 32, _scale),
    "Q5_1": (8, 32, _scale_and_minimum),
    "Q5_K": (8, 32, _k_factors),
    "Q6_K": (8, 16, _q6_k_scale),
    "Q8_0": (8, 32, _scale),
    "MXFP4": (8, 32, _e2m1_scale),
}
