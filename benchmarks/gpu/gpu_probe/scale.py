"""Sizes of one probe run: the real ones, and tiny ones for a dry run on the host."""

from __future__ import annotations

from dataclasses import dataclass

from .common import GIB, KIB, MIB, TIB
from .layout import ModelShape

LLAMA3_8B = ModelShape("llama-3-8b", num_layers=32, q_heads=32, kv_heads=8, head_dim=128)
LLAMA2_7B = ModelShape("llama-2-7b", num_layers=32, q_heads=32, kv_heads=32, head_dim=128)
TINY_GQA = ModelShape("tiny-gqa", num_layers=8, q_heads=4, kv_heads=2, head_dim=16)
TINY_MHA = ModelShape("tiny-mha", num_layers=8, q_heads=4, kv_heads=4, head_dim=16)


@dataclass(frozen=True)
class AttentionCase:
    """One attention call: the last ``q_len`` of ``context_len`` tokens are the queries."""

    shape: ModelShape
    batch: int
    q_len: int
    context_len: int

    @property
    def phase(self) -> str:
        """``decode`` for one query token per sequence, else ``prefill``."""
        return "decode" if self.q_len == 1 else "prefill"

    @property
    def label(self) -> str:
        """For example ``llama-3-8b decode b8 8192``."""
        return f"{self.shape.name} {self.phase} b{self.batch} {self.context_len}"


@dataclass(frozen=True)
class Scale:
    """Every size that a section uses; bytes unless the name says otherwise."""

    page_sizes: tuple[int, ...]
    run_lengths: tuple[int, ...]
    cell_seconds: float
    copy_bytes: int
    spin_ns: int
    mapper_seconds: float
    alias_bytes: int
    alias_rounds: int
    mapping_page: int
    num_mappings: int
    reservations: tuple[int, ...]
    attention_pages: tuple[int, ...]
    attention_cases: tuple[AttentionCase, ...]
    pool_bytes: int
    cache_bytes: int
    hazard_page: int
    hazard_shape: ModelShape
    hazard_groups: tuple[int, ...]
    elastic_bytes: int


FULL = Scale(
    page_sizes=tuple(size * MIB for size in (2, 4, 8, 14, 16, 32, 64)),
    run_lengths=(1, 4, 16, 64),
    cell_seconds=0.6,
    copy_bytes=2 * GIB,
    spin_ns=20_000_000,
    mapper_seconds=1.0,
    alias_bytes=32 * MIB,
    alias_rounds=32,
    mapping_page=2 * MIB,
    num_mappings=100_000,
    reservations=tuple(size * TIB for size in (1, 4, 16, 32, 64, 100, 128)),
    attention_pages=tuple(size * MIB for size in (2, 16, 4, 8)),
    attention_cases=(
        *(
            AttentionCase(LLAMA3_8B, batch, 1, context)
            for context in (8192, 32768, 2048)
            for batch in (8, 1, 32)
        ),
        AttentionCase(LLAMA3_8B, 1, 2048, 8192),
        AttentionCase(LLAMA2_7B, 1, 1, 8192),
        AttentionCase(LLAMA2_7B, 8, 1, 8192),
    ),
    pool_bytes=32 * GIB,
    cache_bytes=50 * MIB,
    hazard_page=2 * MIB,
    hazard_shape=LLAMA3_8B,
    hazard_groups=(32, 4),
    elastic_bytes=4 * GIB,
)

TINY = Scale(
    page_sizes=(64 * KIB, 128 * KIB),
    run_lengths=(1, 4),
    cell_seconds=0.002,
    copy_bytes=256 * KIB,
    spin_ns=1_000_000,
    mapper_seconds=0.02,
    alias_bytes=128 * KIB,
    alias_rounds=2,
    mapping_page=64 * KIB,
    num_mappings=300,
    reservations=(1 * TIB, 4096 * TIB),
    attention_pages=(64 * KIB, 128 * KIB),
    attention_cases=(
        AttentionCase(TINY_GQA, 2, 1, 192),
        AttentionCase(TINY_GQA, 1, 1, 192),
        AttentionCase(TINY_GQA, 1, 32, 192),
        AttentionCase(TINY_MHA, 2, 1, 192),
    ),
    pool_bytes=8 * MIB,
    cache_bytes=16 * KIB,
    hazard_page=64 * KIB,
    hazard_shape=TINY_GQA,
    hazard_groups=(8, 4),
    elastic_bytes=1 * MIB,
)


def scale_for(dry_run: bool) -> Scale:
    """The sizes of a real run, or of a dry run."""
    return TINY if dry_run else FULL
