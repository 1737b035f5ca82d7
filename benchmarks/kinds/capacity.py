"""Requests at once in a fixed pool: kinds of layers against pages of equal size, simulated.

The real scheduler and memory core over a null driver in virtual time
(``vmserve_bench.simulation``). All requests wait at the start; counted is how many run together
while others wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from vmserve.cli.planning.report import PRESETS, ModelShape
from vmserve.memory.kind_pages import equal_pages
from vmserve.memory.layout import LayerKind, layer_kinds, plan_layout
from vmserve.numbers.sizes import format_size
from vmserve_bench.simulation import Asked, SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.devices import OPT_13B_A100
from vmserve_bench.workloads.shapes import lognormal, shared_prefix, sharegpt

CONTEXT = 16384
#: Models with sliding windows, and their pools.
POOLS = {"gemma-3-27b": 16 << 30, "gpt-oss-20b": 4 << 30}
DOCUMENTS = {"mean_in": 5000, "mean_out": 300, "sigma_in": 0.6, "sigma_out": 0.5}
PREFIXES = {"num_prefix_tokens": 2000, "num_question_tokens": 100, "num_output_tokens": 200}


def mixed(num_requests: int, seed: int) -> list[Asked]:
    """Chats, long documents and requests with a prefix in common, a third of each, in turn."""
    each = num_requests // 3
    parts = {
        "chat": sharegpt(each, seed),
        "document": lognormal(each, seed + 1, **DOCUMENTS, max_total_tokens=CONTEXT),
        "prefix": shared_prefix(each, seed + 2, num_groups=4, **PREFIXES),
    }
    requests = [
        [
            replace(one, name=f"{name}-{one.name}", seed=1000 * index + one.seed, arrival_s=0.0)
            for one in asked(shapes, seed=seed + index)
        ]
        for index, (name, shapes) in enumerate(parts.items())
    ]
    return [one for three in zip(*requests, strict=True) for one in three]


class Way(NamedTuple):
    """How layers share pages. ``num_layers``: with those that only pad."""

    name: str
    num_layers: int
    kinds: tuple[LayerKind, ...] = ()
    page_tokens: int | None = 16
    regime: str = "paged"


def ways(shape: ModelShape) -> Iterator[Way]:
    """Ways of a model with sliding windows."""
    kinds = shape.layer_kinds()
    yield Way("one page for all layers", shape.num_layers)
    yield Way("equal pages (vLLM's groups)", *_padded(shape))
    yield Way("kinds, block tables", shape.num_layers, kinds)
    yield Way("kinds, slots", shape.num_layers, kinds, regime="virtual")
    yield Way("kinds, slots, default pages", shape.num_layers, kinds, None, "virtual")


def _padded(shape: ModelShape) -> tuple[int, tuple[LayerKind, ...]]:
    """The model with the layers that vLLM's groups pad each kind to.

    All groups of a kind take and give up their pages together, so that their bytes are those of
    one kind with as many layers.
    """
    windows: list[int | None] = []
    for kind in equal_pages(shape.kinds()):
        assert kind.page_tokens == 16
        windows += [kind.shape.window] * (kind.page_bytes // (16 * kind.shape.token_bytes))
    return len(windows), layer_kinds(windows)


def serve(shape: ModelShape, way: Way, limit_bytes: int, requests: list[Asked]) -> dict[str, Any]:
    """Serve all requests; count what ran together, what was preempted and what was cached."""
    heads = (shape.kv_heads, shape.head_dim, shape.dtype)
    layout = plan_layout(way.num_layers, *heads, 4096, page_tokens=way.page_tokens)
    config = SimulationConfig(
        layout=layout,
        limit_bytes=limit_bytes,
        profile=OPT_13B_A100.profile,
        max_model_len=CONTEXT,
        regime=way.regime,  # type: ignore[arg-type]
        kinds=way.kinds,
        mapper="off",
    )
    with SimulatedEngine(config) as engine:
        run = replay(engine, requests)
    assert run.num_finished == len(requests)
    while_waiting = [step for step in run.steps if step.num_waiting]
    prompt_tokens = sum(record.num_prompt for record in run.requests)
    return {
        "page_tokens": layout.page_tokens,
        "requests_at_once": sum(s.num_requests for s in while_waiting) / max(1, len(while_waiting)),
        "most_at_once": max(step.num_requests for step in run.steps),
        "steps": len(run.steps),
        "preemptions": sum(record.num_preemptions for record in run.requests),
        "cached_tokens": sum(record.num_cached_tokens for record in run.requests) / prompt_tokens,
    }


def rows(num_requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Every way of every model."""
    requests = mixed(num_requests, seed)
    for model, limit_bytes in POOLS.items():
        for way in ways(PRESETS[model]):
            served = serve(PRESETS[model], way, limit_bytes, requests)
            yield {"model": model, "way": way.name, "pool_bytes": limit_bytes, **served}


TITLE = "{}, in a fixed pool"
COLUMNS = {
    "way": "{way}",
    "pool": lambda row: format_size(row["pool_bytes"]),
    "tokens/page": "{page_tokens}",
    "requests at once": "{requests_at_once:.1f}",
    "most": "{most_at_once}",
    "steps": "{steps:,}",
    "preemptions": "{preemptions}",
    "prompt tokens cached": "{cached_tokens:.1%}",
}
NOTE = "requests at once: the mean of the steps while others waited."
