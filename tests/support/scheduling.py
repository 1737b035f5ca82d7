"""A scheduler over a memory that counts, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tests.scheduler.fake_memory import CountingMemory
from vmserve.memory.base import Fork, Regime
from vmserve.sampling.params import SamplingParams
from vmserve.scheduler.base import StepPlan
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.types import RequestMetrics

__all__ = ["Steps", "make_request", "said", "shape"]

_ARRIVALS = itertools.count()


def make_request(
    name: str,
    num_prompt: int = 4,
    *,
    max_tokens: int = 4,
    n: int = 1,
    tenant: str = "",
    rank: int = 0,
    **params: Any,
) -> Request:
    prompt, asked = list(range(num_prompt)), SamplingParams(max_tokens=max_tokens, n=n, **params)
    request = Request(
        name,
        prompt,
        asked,
        max_tokens,
        seed=0,
        arrival=next(_ARRIVALS),
        metrics=RequestMetrics(0.0),
        num_branches=n,
    )
    request.tenant, request.rank = tenant, rank
    request.sequences = [Sequence(request, j, list(prompt), num_prompt) for j in range(n)]
    return request


def shape(plan: StepPlan | None) -> list[tuple[str, int, int]]:
    """Of each sequence: its request, tokens that it has computed, and those that are new."""
    assert plan is not None
    return [(i.sequence.request.request_id, i.num_past, i.num_new) for i in plan.scheduled]


def said(plan: StepPlan | None) -> str:
    """The same as "a 0+16, b 4+1"."""
    return ", ".join(f"{name} {num_past}+{num_new}" for name, num_past, num_new in shape(plan))


class Steps:
    """A scheduler over a memory that counts, and an engine that samples token 7 for everybody.

    ``how``: arguments of the memory, fields of the scheduler's limits, and its other arguments.
    """

    last: StepPlan

    def __init__(
        self,
        pages: int = 64,
        *,
        seqs: int = 8,
        budget: int = 64,
        watermark: float = 0.0,
        memory: type[CountingMemory] = CountingMemory,
        **how: Any,
    ) -> None:
        def taken(names: Iterable[str]) -> dict[str, Any]:
            return {each: how.pop(each) for each in how.keys() & set(names)}

        self.memory = memory(pages, **taken({"num_slots", "cached", "swap_pages"}))
        more = taken(field.name for field in fields(SchedulerLimits))
        limits = SchedulerLimits(seqs, budget, watermark, **more)
        self.scheduler = FCFSScheduler(self.memory, limits, **how)
        self.requests: list[Request] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)

    def ask(self, **prompts: int) -> list[Request]:
        """Requests by name, each with a prompt of so many tokens; ``max_tokens`` and ``n`` are of
        all."""
        options = {each: prompts.pop(each) for each in ("max_tokens", "n") if each in prompts}
        asked = [make_request(name, size, **options) for name, size in prompts.items()]
        self.add(*asked)
        return asked

    # -- steps ----------------------------------------------------------------------------

    def launch(self, *, ahead: bool = False) -> str:
        """A step of which no token is drawn yet."""
        plan = self.scheduler.schedule(ahead=ahead)
        assert plan is not None
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> str:
        self.last = plan
        self.memory.apply(plan.memory)
        self.scheduler.applied(plan)
        self.scheduler.computed(plan)
        return said(plan)

    def step(self) -> str:
        """A step; nothing if there is nothing to run."""
        plan = self.scheduler.schedule()
        if plan is None:
            return ""
        found = self._compute(plan)
        for sequence in [item.sequence for item in plan.scheduled if item.samples]:
            drawing = [sequence]
            if sequence.num_output == 0:
                drawing += sequence.request.first_tokens_due
            for drawn in drawing:
                drawn.tokens.append(7)
                if drawn.num_output == drawn.request.max_tokens:
                    self.scheduler.finish(drawn)
        return found

    def steps(self, num: int) -> str:
        return " | ".join([self.step() for _ in range(num)])

    def steps_until(self, request: Request, most: int = 10_000) -> int:
        for num in range(1, most):
            self.step()
            if request.finished:
                return num
        raise AssertionError(f"{request.request_id} has not ended after {most} steps")

    def to_the_end(self, most: int = 20_000) -> list[str]:
        """All steps until nothing runs or waits, or can."""
        found: list[str] = []
        while step := self.step():
            found.append(step)
            assert len(found) < most, f"no end: {self.scheduler.running_request_ids}"
        return found

    # -- what is seen ---------------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """The tenants of those that run, in order."""
        return [seq.request.tenant for seq in self.scheduler._running]

    @property
    def names(self) -> list[str]:
        """The requests of the last step."""
        return [item.sequence.request.request_id for item in self.last.scheduled]

    @property
    def left(self) -> tuple[int, int]:
        """How many run, and wait."""
        return self.scheduler.num_running, self.scheduler.num_waiting

    @property
    def forks(self) -> list[tuple[int, int, int]]:
        """Of the last step: child, parent, tokens."""
        ops = self.last.memory.ops
        return [(op.seq, op.parent, op.num_tokens) for op in ops if isinstance(op, Fork)]

    @property
    def regimes(self) -> list[Regime]:
        """Of the last step's sequences."""
        return [item.regime for item in self.last.scheduled]
