"""What can be asked of an engine in another process, by name.

A question is answered in the engine's thread, between two steps, with plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vmserve.engine.engine import LLMEngine
from vmserve.telemetry.snapshot import EngineSnapshot

__all__ = ["QUESTIONS"]


def _hold_prefix(
    engine: LLMEngine, token_ids: list[int], cache_salt: str, isolation: str
) -> tuple[int, int]:
    pin = engine.hold_prefix(token_ids, cache_salt=cache_salt, isolation=isolation)
    return pin.handle, pin.num_tokens


def _unpin_prefix(engine: LLMEngine, handle: int) -> None:
    engine.unpin_prefix(handle)


def _reset_prefix_cache(engine: LLMEngine, unpin: bool) -> None:
    engine.reset_prefix_cache(unpin=unpin)


def _set_kv_cache_memory(engine: LLMEngine, size: int | str) -> int:
    return engine.set_kv_cache_memory(size)


def _stats(engine: LLMEngine) -> dict[str, float | int]:
    return engine.stats()


def _snapshot(engine: LLMEngine) -> EngineSnapshot:
    return engine.snapshot()


QUESTIONS: Mapping[str, Callable[..., Any]] = {
    "hold_prefix": _hold_prefix,
    "reset_prefix_cache": _reset_prefix_cache,
    "set_kv_cache_memory": _set_kv_cache_memory,
    "snapshot": _snapshot,
    "stats": _stats,
    "unpin_prefix": _unpin_prefix,
}
