"""The variants of the CUDA kernels, and their needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = [
    "HEAD_DIMS",
    "KERNELS",
    "PART_TOKENS",
    "TILE_TOKENS",
    "Kernel",
    "Sizes",
    "Variant",
    "append_rows",
    "append_scratch",
    "architecture",
    "sizes_for",
]

HEAD_DIMS = (64, 128, 256)
_TYPES = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}
#: Positions of a tile of keys, and of a part. Both kernels add up at multiples of these.
TILE_TOKENS, PART_TOKENS = 32, 512
_WARPS, _DECODE_ROWS = 4, 16
#: Fewest and most tiles of the decode kernel, in use and in flight.
_LEAST_STAGES, _MOST_STAGES = 4, 8
#: Shared memory that the device reserves for each block.
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Variant:
    """One compilation of csrc/cuda/kernels.cu. ``dtype``: bfloat16 or float16; ``fp8``: the KV
    cache has codes of 8 bits with scales, else ``dtype``."""

    dtype: torch.dtype
    head_dim: int
    paged: bool
    fp8: bool = False

    @property
    def name(self) -> str:
        """For example ``bf16-128-paged``, or ``bf16-128-paged-fp8``."""
        view = "paged" if self.paged else "slots"
        cache = "-fp8" if self.fp8 else ""
        return f"{_TYPES[self.dtype].lower()}-{self.head_dim}-{view}{cache}"

    @staticmethod
    def refusal(head_dim: int, dtype: torch.dtype) -> str | None:
        if dtype not in _TYPES:
            return f"its kernels have no {str(dtype).removeprefix('torch.')}"
        if head_dim not in HEAD_DIMS:
            return f"its kernels want a head_dim of {', '.join(map(str, HEAD_DIMS))}"
        return None

    def macros(self, sizes: Sizes) -> list[tuple[str, str]]:
        return [
            ("VMS_TYPE", _TYPES[self.dtype]),
            ("VMS_KV", "E4m3" if self.fp8 else _TYPES[self.dtype]),
            ("VMS_HEAD_DIM", str(self.head_dim)),
            ("VMS_PAGED", str(self.paged).lower()),
            ("VMS_STAGES", str(sizes.stages)),
            ("VMS_PART_TOKENS", str(PART_TOKENS)),
            ("VMS_DECODE_BLOCKS", str(sizes.decode_blocks)),
            ("VMS_APPEND_BLOCKS", str(sizes.append_blocks)),
        ]


class Kernel(NamedTuple):
    """``shared_bytes``: of a block, for kernels that :class:`Sizes` does not mention."""

    name: str
    threads: int
    shared_bytes: int = 0


KERNELS = (
    Kernel("vms_decode", 32 * _WARPS),
    Kernel("vms_append", 32 * _WARPS),
    Kernel("vms_combine", 128),
    Kernel("vms_write", 128),
    Kernel("vms_norm", 256, 32),
    Kernel("vms_gate", 128),
    Kernel("vms_copy", 256),
    Kernel("vms_zero", 256),
)


class Sizes(NamedTuple):
    """``stages``: tiles of the decode kernel. ``*_blocks``: blocks that are to run at once on a
    multiprocessor. ``*_bytes``: shared memory of a block."""

    stages: int
    decode_blocks: int
    append_blocks: int
    decode_bytes: int
    append_bytes: int

    def shared_bytes(self, kernel: str) -> int:
        return {"vms_decode": self.decode_bytes, "vms_append": self.append_bytes}.get(kernel, 0)


def sizes_for(
    head_dim: int, block_bytes: int, multiprocessor_bytes: int, *, fp8: bool = False
) -> Sizes:
    """Sizes for shared memory of ``block_bytes`` in a block, ``multiprocessor_bytes`` in all.

    The decode takes two blocks, with as many stages (4 to 8) as fit; one block if two do not fit.
    More blocks would not have their registers without spills (benchmarks/gpu/compile_matrix.py).
    Raises ``ValueError``, with the numbers, if not even one fits.
    """
    stage = 2 * TILE_TOKENS * (head_dim + 4 if fp8 else 2 * head_dim)
    fixed = _DECODE_ROWS * head_dim * 2 + _DECODE_ROWS * (TILE_TOKENS + 8) * 4
    append = append_rows(head_dim) * head_dim * 2 + 2 * stage
    for blocks in (2, 1):
        room = min(block_bytes, multiprocessor_bytes // blocks - _RESERVED_BYTES)
        stages = min(_MOST_STAGES, (room - fixed) // stage)
        if stages < _LEAST_STAGES:
            continue
        decode = fixed + stages * stage
        fitting = min(4, multiprocessor_bytes // (decode + _RESERVED_BYTES))
        return Sizes(
            stages=stages,
            decode_blocks=min(fitting, 3 if head_dim == 64 else 2),
            append_blocks=min(multiprocessor_bytes // (append + _RESERVED_BYTES), 2),
            decode_bytes=decode,
            append_bytes=append,
        )
    raise ValueError(
        f"heads of {head_dim} need {fixed + _LEAST_STAGES * stage} bytes of shared memory for a "
        f"block; this device has {block_bytes}"
    )


def append_rows(head_dim: int) -> int:
    """Query rows of an item of the append kernel: limited by a warp's registers."""
    return 64 if head_dim == 256 else 128


def append_scratch(head_dim: int) -> int:
    """Floats in which a block of the append kernel keeps the sums over parts (append.cuh)."""
    return append_rows(head_dim) * (head_dim + 8)


def architecture(major: int, minor: int) -> str:
    """The target of the compiler for a compute capability: ``sm_80``, ``sm_90a`` ..."""
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
