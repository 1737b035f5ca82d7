"""Sizes of a run of the probe: the real ones, and tiny ones for a dry run."""

from __future__ import annotations

from types import SimpleNamespace

from vmserve.memory.layout import HOST_GRANULARITY, KVLayout, plan_layout

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


def layout(scale: SimpleNamespace, layers: int = 1) -> KVLayout:
    """K and V in bf16, of so many layers side by side."""
    return plan_layout(
        scale.num_layers, scale.kv_heads, scale.head_dim, "bfloat16", HOST_GRANULARITY,
        layers_per_group=layers, page_bytes=scale.page_bytes, block_tokens=1,
    )  # fmt: skip


#: Llama 3 8B's heads. ``groups``: layers that share a page.
FULL = SimpleNamespace(
    num_layers=32,
    q_heads=32,
    kv_heads=8,
    head_dim=128,
    groups=(32, 4),
    page_bytes=2 * MIB,
    spin_ns=20_000_000,
    alias_bytes=32 * MIB,
    alias_rounds=32,
    num_mappings=100_000,
    reservations_tib=(1, 4, 16, 32, 64, 100, 128),
    elastic_bytes=1 * GIB,
)
TINY = SimpleNamespace(
    num_layers=8,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    groups=(8, 4),
    page_bytes=64 * KIB,
    spin_ns=1_000_000,
    alias_bytes=128 * KIB,
    alias_rounds=2,
    num_mappings=300,
    reservations_tib=(1, 4096),
    elastic_bytes=1 * MIB,
)
