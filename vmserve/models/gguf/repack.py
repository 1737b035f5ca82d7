"""Quantized blocks of GGUF as two forms that kernels multiply by.

4 bits with a scale and a minimum per group (Q4_0, Q4_1, Q4_K), and 8 bits with a scale, and perhaps
a minimum, per group (Q8_0, Q5_0, Q5_1, Q5_K, Q6_K). A weight is ``quant * scale + minimum``, with
the numbers that the file has: nothing is rounded a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.models.gguf.block_types import BlockType
from vmserve.models.grouped import Factors, Grouped

__all__ = ["is_quantized", "repack"]

_Bytes = NDArray[np.uint8]
_Halves = NDArray[np.float16]

_GROUP = 32


def repack(type: BlockType, raw: _Bytes) -> Grouped:
    """``raw``: ``[rows, bytes of a row]`` of a quantized type."""
    blocks = raw.reshape(raw.shape[0], -1, type.num_bytes)
    return _UNPACK[type.name](blocks)


def is_quantized(type: BlockType) -> bool:
    return type.name in _UNPACK


# Below, ``blocks`` is [rows, blocks, bytes of a block].


def _halves(blocks: _Bytes, first: int) -> _Halves:
    """The float16 at byte ``first`` of each block, ``[rows, blocks]``."""
    return np.ascontiguousarray(blocks[:, :, first : first + 2].view("<f2")[:, :, 0])


def _rows(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.reshape(array.shape[0], -1))


def _from(blocks: NDArray[Any], first: int) -> NDArray[np.void]:
    """The bytes of each block from ``first`` on as one item, ``[rows, blocks]``: numpy copies
    items several times as fast as it loops over rows of a few bytes."""
    return blocks[:, :, first:].view(f"V{blocks.shape[2] - first}")[:, :, 0]


def _split(blocks: _Bytes, first: int) -> _Bytes:
    """Low halves of the bytes from ``first`` on, then the high ones."""
    low, high = _from(blocks & 0xF, first), _from(blocks >> 4, first)
    return np.stack((low, high), axis=2).view(np.uint8)


def _q4_0(blocks: _Bytes) -> Grouped:
    scale = _halves(blocks, 0)
    minimum = Factors(scale, np.full(scale.shape, -8, np.int8))
    return Grouped(4, _GROUP, _rows(_split(blocks, 2)), Factors(scale), minimum)


def _q4_1(blocks: _Bytes) -> Grouped:
    scale, minimum = Factors(_halves(blocks, 0)), Factors(_halves(blocks, 2))
    return Grouped(4, _GROUP, _rows(_split(blocks, 4)), scale, minimum)


def _q5(blocks: _Bytes, first: int) -> _Bytes:
    """0 to 31: from byte ``first``, 32 high bits, then 32 low halves."""
    high = np.unpackbits(blocks[:, :, first : first + 4], axis=2, bitorder="little")
    return _split(blocks, first + 4) | high << np.uint8(4)


def _q5_0(blocks: _Bytes) -> Grouped:
    return Grouped(8, _GROUP, _rows(_q5(blocks, 2) - np.uint8(16)), Factors(_halves(blocks, 0)))


def _q5_1(blocks: _Bytes) -> Grouped:
    scale, minimum = Factors(_halves(blocks, 0)), Factors(_halves(blocks, 2))
    return Grouped(8, _GROUP, _rows(_q5(blocks, 4)), scale, minimum)


def _q8_0(blocks: _Bytes) -> Grouped:
    codes = np.ascontiguousarray(_from(blocks, 2)).view(np.uint8)
    return Grouped(8, _GROUP, codes, Factors(_halves(blocks, 0)))


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


def _k_low(blocks: _Bytes, first: int) -> _Bytes:
    """The low 4 bits of Q4_K and Q5_K, ``[rows, blocks, 8 groups, 32]``: 32 bytes have one group in
    their low halves and the next in their high ones."""
    pairs = blocks[:, :, first : first + 128].reshape(*blocks.shape[:2], 4, 1, _GROUP)
    both = np.concatenate((pairs & 0xF, pairs >> 4), axis=3)
    return both.reshape(*blocks.shape[:2], 8, _GROUP)


def _q4_k(blocks: _Bytes) -> Grouped:
    return Grouped(4, _GROUP, _rows(_k_low(blocks, 16)), *_k_factors(blocks))


def _q5_k(blocks: _Bytes) -> Grouped:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    high = blocks[:, :, None, 16:48] >> bits & 1
    return Grouped(8, _GROUP, _rows(_k_low(blocks, 48) | high << 4), *_k_factors(blocks))


def _q6_k(blocks: _Bytes) -> Grouped:
    """Two halves of 128 columns: four stretches of 32, whose low bits are in 64 bytes and whose
    pairs of high bits are in 32."""
    shape = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(*shape, 2, 1, 2, 32)
    low = np.concatenate((low & 0xF, low >> 4), axis=3).reshape(*shape, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, :, 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4) - np.uint8(32)
    scale = Factors(_halves(blocks, 208), _rows(blocks[:, :, 192:208]).view(np.int8))
    return Grouped(8, 16, _rows(codes), scale)


_UNPACK: Mapping[str, Callable[[_Bytes], Grouped]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
