"""Simulated engines over small pools; what their steps computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vmserve.memory.layout import KVLayout, plan_layout
from vmserve.scheduler.profile import DeviceProfile, KernelCosts
from vmserve_bench.simulation import Asked, Run, SimulatedEngine, SimulationConfig, replay

__all__ = ["FREE", "LAYOUT", "SECONDS", "config", "one_layer", "simulate", "steps_of"]

FREE = KernelCosts(call=0.0, sequence=0.0, read=0.0, pair=0.0)
#: A step takes a second, a token in it a hundredth, a page that it waits for ten.
SECONDS = DeviceProfile(
    name="whole seconds",
    virtual=FREE,
    paged=FREE,
    step=1.0,
    weights=0.0,
    token=0.01,
    map_page=10.0,
    map_page_hidden=0.0,
    copy_bytes_per_second=1e15,
    swap_bytes_per_second=1e15,
)
LAYOUT = plan_layout(4, 2, 64, "float32", 4096, page_tokens=32)


def one_layer(page_tokens: int, block_tokens: int, state_bytes: int = 0) -> KVLayout:
    tokens = {"page_tokens": page_tokens, "block_tokens": block_tokens}
    return plan_layout(1, 1, 64, "float32", 4096, state_bytes=state_bytes, **tokens)


def config(pages: int = 12, layout: KVLayout = LAYOUT, **options: Any) -> SimulationConfig:
    made = SimulationConfig(
        layout=layout,
        limit_bytes=pages * layout.total_page_bytes,
        profile=SECONDS,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        check_every=1,
    )
    return replace(made, **options)


def simulate(
    requests: list[Asked], max_steps: int = 10_000, **options: Any
) -> tuple[Run, SimulatedEngine]:
    with SimulatedEngine(config(**options)) as engine:
        run = replay(engine, requests, max_steps=max_steps)
    return run, engine


def steps_of(scheduler: Any) -> list[list[tuple[str, int, int, int, str]]]:
    """Request, index of the sequence, past tokens, new ones and the regime of what each step to
    come computes."""
    steps: list[list[tuple[str, int, int, int, str]]] = []
    applied = scheduler.applied

    def note(plan: Any) -> None:
        steps.append([])
        for item in plan.scheduled:
            who = item.sequence.request.request_id, item.sequence.index
            steps[-1].append((*who, item.num_past, item.num_new, item.regime.value))
        applied(plan)

    scheduler.applied = note
    return steps
