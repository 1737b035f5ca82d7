"""What the server reports on models: rows of the live page, cards of ``/v1/models``, metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final, get_args

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from vmserve.client.lending import PoolMember
from vmserve.client.transports.fleet import MemberState
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ModelState, ServedModel

__all__ = [
    "engine_figures",
    "engine_rows",
    "group_rows",
    "model_card",
    "model_families",
    "model_row",
    "pool_row",
]

_LABELS: Final = ["model_name", "engine"]
#: Figures of a member of the pool, as gauges and as counters.
_BYTES: Final = {
    "granted_bytes": "KV cache memory that the pool lends to a model.",
    "committed_bytes": "KV cache memory that a model has taken of what it was lent.",
    "used_bytes": "KV cache memory that requests of a model hold.",
    "wanted_bytes": "KV cache memory that a model would like to have.",
    "floor_bytes": "KV cache memory that no other model can take.",
    "cap_bytes": "Most KV cache memory of a model.",
}
_COUNTS: Final = {
    "num_recalls": ("recalls", "How often a model was asked to give memory back."),
    "recalled_bytes": ("recalled_bytes", "Memory that a model gave back when asked."),
    "num_needs": ("shortages", "How often requests of a model were short of memory."),
    "waited_seconds": ("short_seconds", "For how long requests of a model were short of memory."),
}


def model_card(name: str, served: ServedModel, *, tells_state: bool) -> dict[str, Any]:
    """What ``/v1/models`` says of the model by one of its names."""
    card = {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "vmserve",
        "root": served.name,  # never a path that was not given as a name
        "max_model_len": served.max_model_len if served.is_loaded else None,
    }
    return {**card, "state": served.state} if tells_state else card


def model_row(served: ServedModel) -> dict[str, Any]:
    """Its state, its requests, and how it stands in the pool, if there is one."""
    row: dict[str, Any] = {
        "name": served.name,
        "state": served.state,
        "failure": served.failure,
        "num_requests": served.num_requests,
        "num_active": served.lifecycle.num_active,
        "num_waiting": served.num_waiting,
        "num_wakes": served.wake_seconds.count,
        "waited_seconds": served.waited_seconds,
        "idle_seconds": 0.0 if served.lifecycle.num_active else time.monotonic() - served.last_used,
    }
    if served.memory is not None:
        member = served.memory.state()
        row["weight"] = served.memory.weight
        row["memory"] = None if member is None else _memory(member)
    return row


def _memory(member: PoolMember) -> dict[str, Any]:
    row = asdict(member)
    del row["name"], row["weight"]  # of the model's row
    return row


def engine_rows(served: ServedModel) -> list[dict[str, Any]]:
    """How each of its engines stands; empty for a model that has one."""
    members = [] if served.fleet is None else served.fleet.members
    return [
        _engine_row(each.name, each.state, len(each.requests), each.facts.latest())
        for each in members
    ]


def group_rows(served: ServedModel) -> list[dict[str, Any]]:
    """The row of a model's only engine if that is a group of ranks; else empty."""
    if served.fleet is not None or not served.is_loaded:
        return []
    stats = served.engine.stats()
    if stats.get("tensor_parallel_size", 1) == 1:
        return []
    state: MemberState = "down" if served.engine.errored else "ready"
    return [_engine_row("0", state, served.num_requests, stats)]


def _engine_row(
    name: str, state: MemberState, num_requests: int, stats: Mapping[str, float | int]
) -> dict[str, Any]:
    num_ranks = stats.get("tensor_parallel_size", 1)
    names = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "engine_restarts_total"),
    )
    return {
        "id": name,
        "state": state,
        "num_requests": num_requests,
        "num_ranks": num_ranks,
        "num_live_ranks": 0 if state == "down" else num_ranks,  # one that ends, ends them all
        **{each: stats.get(each, 0) for each in names},
    }


def engine_figures(served: ServedModel) -> dict[str, dict[str, float | int]]:
    """The figures of each of its engines by id; empty for a model that has one."""
    members = [] if served.fleet is None else served.fleet.members
    return {
        each.name: {
            **each.facts.latest(),
            "engine_up": int(each.state != "down"),
            "engine_draining": int(each.is_draining),
            "engine_suspect": int(each.facts.is_suspect),
        }
        for each in members
    }


def pool_row(models: Models) -> dict[str, int] | None:
    """The pool's size and what was lent to none; None without a pool."""
    pool = models.pool
    return None if pool is None else {"size_bytes": pool.size_bytes, "free_bytes": pool.free_bytes}


def model_families(models: Models) -> Iterator[Metric]:
    """States, wakings, and how models stand in the pool."""
    state = GaugeMetricFamily(
        "model_state", "1 for the state that a model is in.", labels=[*_LABELS, "state"]
    )
    waiting = GaugeMetricFamily(
        "model_requests_waiting", "Requests that wait for a model to wake.", labels=_LABELS
    )
    waited = CounterMetricFamily(
        "model_waited_seconds", "For how long requests waited for a model to wake.", labels=_LABELS
    )
    wakes = HistogramMetricFamily(
        "model_wake_seconds", "How long a model took to load or wake.", labels=_LABELS
    )
    for served in models:
        labels = [served.name, "0"]
        for each in get_args(ModelState):
            state.add_metric([*labels, each], served.state == each)
        waiting.add_metric(labels, served.num_waiting)
        waited.add_metric(labels, served.waited_seconds)
        wakes.add_metric(labels, served.wake_seconds.buckets(), served.wake_seconds.total)
    yield from (state, waiting, waited, wakes)
    if models.pool is not None:
        yield from _pool_families(models)


def _pool_families(models: Models) -> Iterator[Metric]:
    assert models.pool is not None
    members = models.pool.state()
    yield GaugeMetricFamily("kv_pool_size_bytes", "The pool's size.", models.pool.size_bytes)
    yield GaugeMetricFamily(
        "kv_pool_free_bytes", "Memory of the pool that no model was lent.", models.pool.free_bytes
    )
    for name, text in _BYTES.items():
        gauge = GaugeMetricFamily(f"kv_pool_{name}", text, labels=_LABELS)
        for member in members:
            gauge.add_metric([member.name, "0"], getattr(member, name))
        yield gauge
    for field, (name, text) in _COUNTS.items():
        counter = CounterMetricFamily(f"kv_pool_{name}", text, labels=_LABELS)
        for member in members:
            counter.add_metric([member.name, "0"], getattr(member, field))
        yield counter
