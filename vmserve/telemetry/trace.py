"""Write what each step did to a file for Perfetto (https://ui.perfetto.dev).

The format is Chrome's trace event format, its array form: an array that is cut off (the process
was killed) opens as well.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmserve.memory.manager import MemoryManager
    from vmserve.scheduler.base import Scheduler, StepPlan
    from vmserve.telemetry.phases import StepPhases
    from vmserve.text.update import RequestUpdate
    from vmserve.types import RequestMetrics

__all__ = ["NoTrace", "StepTrace"]

logger = logging.getLogger(__name__)

_STEPS, _REQUESTS, _OTHER_STEPS = 1, 2, 3
_PAGES = ("free_pages", "used_pages", "idle_pages", "waiting_pages", "held_pages")
_CALLS = ("unhidden_calls_total", "hidden_calls_total")
_EVENTS = (
    "num_preemptions_total",
    "converted_to_virtual_total",
    "converted_to_paged_total",
    "forks_total",
    "swapped_out_blocks_total",
    "swapped_in_blocks_total",
)


class NoTrace:
    """Writes nothing."""

    def step(self, *_: object, ahead: bool) -> None:
        pass

    def close(self) -> None:
        pass


class StepTrace:
    """Writes events as they happen; raises :class:`ConfigurationError` for a file that cannot be.

    One thread at a time. Times are microseconds since the trace began. Where the file can be
    written no further (its disk is full) the trace ends, and what is traced goes on.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"trace_file: cannot write {path}: {error.strerror}"
            ) from error
        self._path = path
        self._began = time.monotonic()
        self._offset = time.monotonic() - self._began
        self._last: dict[str, float] = {}
        self._write("[")
        self._is_first = True
        self._track = _STEPS
        names = {_STEPS: "steps", _OTHER_STEPS: "steps beside them", _REQUESTS: "requests"}
        for thread, name in names.items():
            self._event("M", "thread_name", 0.0, tid=thread, args={"name": name})

    def step(
        self,
        plan: StepPlan,
        phases: StepPhases,
        scheduler: Scheduler,
        memory: MemoryManager,
        outputs: Iterable[RequestUpdate],
        *,
        ahead: bool,
    ) -> None:
        """One step: its phases, what it computed, how the memory is after it, and the requests that
        have ended with it.

        ``ahead``: it began before the last one ended, and so has a track next to that one's.
        """
        self._track = _OTHER_STEPS if ahead and self._track == _STEPS else _STEPS
        num_virtual = sum(item.regime is Regime.VIRTUAL for item in plan.scheduled)
        num_decoding = int((plan.ends - plan.num_past == 1).sum())
        args = {
            "tokens": plan.num_tokens,
            "sequences": len(plan.scheduled),
            "decoding": num_decoding,
            "virtual": num_virtual,
            "paged": len(plan.scheduled) - num_virtual,
            "needed_pages": plan.memory.needed_pages,
        }
        spans = phases.spans
        self._span("step", spans[0].began, spans[-1].ended, args)
        for span in spans:
            self._span(span.phase, span.began, span.ended, {})
        now, stats = spans[-1].ended, memory.stats()
        values = {**stats.as_dict(), **scheduler.totals.by_name()}
        self._count("pages", now, {name: values[name] for name in _PAGES})
        running = {"virtual": stats.virtual_seqs, "paged": stats.paged_seqs}
        self._count("sequences", now, {**running, "waiting": scheduler.num_waiting})
        self._count("driver calls", now, self._since(values, _CALLS))
        for name, count in self._since(values, _EVENTS).items():
            if count:
                label = name.removesuffix("_total")
                self._event("i", label, now, tid=_STEPS, s="t", args={"count": count})
        for output in outputs:
            if output.finished and output.metrics is not None:
                self.request(output.request_id, output.metrics)

    def request(self, request_id: str, metrics: RequestMetrics) -> None:
        """Write a request that has ended."""
        if metrics.finished_time is None:
            return
        args = {
            "regime": metrics.kv_regime,
            "reason": metrics.kv_regime_reason,
            "preemptions": metrics.num_preemptions,
            "cached_tokens": metrics.num_cached_tokens,
        }
        marks = [
            ("queued", metrics.arrival_time),
            ("prefill", metrics.first_scheduled_time),
            ("decode", metrics.first_token_time),
            ("", metrics.finished_time),
        ]
        reached = [(name, when - self._offset) for name, when in marks if when is not None]
        self._async("b", request_id, request_id, reached[0][1], args)
        for (name, began), (_, ended) in itertools.pairwise(reached):
            self._async("b", request_id, name, began, {})
            self._async("e", request_id, name, ended, {})
        self._async("e", request_id, request_id, reached[-1][1], {})

    def close(self) -> None:
        self._write("\n]\n")
        try:
            self._file.close()
        except OSError as error:
            logger.warning("trace_file: the end of %s is lost: %s", self._path, error.strerror)

    # -- events -------------------------------------------------------------------------

    def _since(self, values: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
        """Return how much counters have grown since the last step."""
        moved = {name: values[name] - self._last.get(name, 0) for name in names}
        self._last |= {name: values[name] for name in names}
        return moved

    def _span(self, name: str, began: float, ended: float, args: dict[str, Any]) -> None:
        self._event("X", name, began, tid=self._track, dur=(ended - began) * 1e6, args=args)

    def _count(self, name: str, when: float, values: dict[str, float]) -> None:
        self._event("C", name, when, tid=_STEPS, args=values)

    def _async(
        self, phase: str, request_id: str, name: str, when: float, args: dict[str, Any]
    ) -> None:
        self._event(phase, name, when, tid=_REQUESTS, cat="request", id=request_id, args=args)

    def _event(self, phase: str, name: str, when: float, **fields: Any) -> None:
        timestamp = max(0.0, (when - self._began) * 1e6)
        event = {"ph": phase, "name": name, "ts": timestamp, "pid": os.getpid(), **fields}
        self._write(("\n" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False

    def _write(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
        except OSError as error:
            logger.warning("trace_file: %s ends here: %s", self._path, error.strerror)
            with contextlib.suppress(OSError):  # what is left of it cannot be written either
                self._file.close()
