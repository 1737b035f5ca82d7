"""Virtual time: run arrivals and steps in order, as fast as they can be computed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmserve_bench.simulation.records import Run
    from vmserve_bench.simulation.requests import Asked

__all__ = ["System", "replay"]


class System(Protocol):
    """The simulated engine, or a baseline. ``now``: virtual time in seconds.

    ``add``: the request arrives now, or at its own time if that is earlier (during a step).
    ``step`` moves the clock by its time.
    """

    now: float
    run: Run

    def add(self, what: Asked) -> None: ...

    @property
    def has_unfinished(self) -> bool: ...

    def step(self) -> None: ...


def replay(
    system: System,
    requests: Iterable[Asked],
    *,
    until: float = float("inf"),
    max_steps: float = float("inf"),
) -> Run:
    """Serve all requests; no new step begins at ``until`` or later.

    Raises ``RuntimeError`` if ``max_steps`` are not enough.
    """
    coming = deque(sorted(requests, key=lambda what: what.arrival_s))
    num_steps = 0
    while (coming or system.has_unfinished) and system.now < until:
        while coming and coming[0].arrival_s <= system.now:
            system.add(coming.popleft())
        if not system.has_unfinished:
            system.now = coming[0].arrival_s
            continue
        if num_steps == max_steps:
            raise RuntimeError(f"{max_steps} steps did not end all requests")
        system.step()
        num_steps += 1
    return system.run
