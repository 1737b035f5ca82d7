"""Sizes of one probe run: the real ones, and tiny ones for a dry run on the host."""

from __future__ import annotations

from dataclasses import dataclass

from vmserve.memory.layout import HOST_GRANULARITY, KVLayout, plan_layout

from .common import GIB, KIB, MIB, TIB


@dataclass(frozen=True)
class ModelShape:
    """Attention geometry of a model in bf16."""

    name: str
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int

    def read_bytes(self, num_tokens: int) -> int:
        """K and V bytes that one layer's attention must read for ``num_tokens`` tokens."""
        return 4 * self.kv_heads * self.head_dim * num_tokens

    def layout(self, page_bytes: int, layers: int = 1, *, split_kv: bool = False) -> KVLayout:
        """``layers`` side by side in a group, in pages of ``page_bytes``."""
        return plan_layout(
            self.num_layers,
            self.kv_heads,
            self.head_dim,
            "bfloat16",
            HOST_GRANULARITY,
            layers_per_group=layers,
            split_kv=split_kv,
            page_bytes=page_bytes,
            block_tokens=1,
        )

    def layouts(self, page_bytes: int) -> list[KVLayout]:
        """K and V apart, then 1, 2, 4 and all layers per group, as far as they divide the model."""
        sizes = [layers for layers in (1, 2, 4) if self.num_layers % layers == 0]
        sizes = list(dict.fromkeys([*sizes, self.num_layers]))
        whole = [self.layout(page_bytes, layers) for layers in sizes]
        return [self.layout(page_bytes, split_kv=True), *whole]


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
    copy_bytes: int
    spin_ns: int
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
    copy_bytes=2 * GIB,
    spin_ns=20_000_000,
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
    copy_bytes=256 * KIB,
    spin_ns=1_000_000,
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
