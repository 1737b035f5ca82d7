"""Engines whose pool holds few requests: they are preempted and swapped, in each run the same."""

from __future__ import annotations

from typing import Any, Final

from vmserve.engine.engine import LLMEngine

__all__ = ["SMALL", "assert_nothing_left"]

SMALL: Final[dict[str, Any]] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "kv_page_size": "16KiB",
    "kv_regime": "virtual",
    "kv_mapper": "off",  # what is preempted does not depend on the time that it takes
    "swap_space": "4MiB",
}


def assert_nothing_left(engine: LLMEngine) -> None:
    """No request, and no memory but the prefix cache's."""
    engine.memory.wait()
    engine.memory.check()
    stats, scheduler = engine.stats(), engine.scheduler
    assert stats["num_seqs"] == stats["used_pages"] == stats["waiting_pages"] == 0
    assert scheduler.num_running == scheduler.num_waiting == 0
    left = (
        scheduler._families._donors,  # type: ignore[attr-defined]
        scheduler._regimes._converting,  # type: ignore[attr-defined]
        engine._acceptor._answers,
        engine._requests,
    )
    assert not any(left), left
