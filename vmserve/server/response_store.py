"""Responses that were stored, for later requests of the same key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vmserve.server.wire import dump_json

__all__ = ["MAX_STORED", "MAX_STORED_BYTES", "STORED_SECONDS", "ResponseStore", "StoredResponse"]

#: Beyond these the oldest are forgotten.
MAX_STORED = 1000
MAX_STORED_BYTES = 64 << 20
STORED_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """``messages``: the conversation up to and with its output, without instructions."""

    reply: dict[str, Any]
    messages: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: StoredResponse
    num_bytes: int
    until: float


class ResponseStore:
    """In memory, bounded in number, size and time. Each tenant finds only its own.

    One thread at a time. ``clock``: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._num_bytes = 0

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """What is larger than all the room there is, is not kept."""
        num_bytes = len(dump_json([stored.reply, stored.messages]))
        self.delete(tenant, response_id)
        self._entries[tenant, response_id] = _Entry(
            stored, num_bytes, self._clock() + STORED_SECONDS
        )
        self._num_bytes += num_bytes
        while self._entries and self._is_over():
            self._remove(next(iter(self._entries)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            return None
        if entry.until <= self._clock():
            self._remove((tenant, response_id))
            return None
        return entry.stored

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether there was one."""
        if self.get(tenant, response_id) is None:
            return False
        self._remove((tenant, response_id))
        return True

    def _is_over(self) -> bool:
        oldest = next(iter(self._entries.values()))
        return (
            len(self._entries) > MAX_STORED
            or self._num_bytes > MAX_STORED_BYTES
            or oldest.until <= self._clock()
        )

    def _remove(self, key: tuple[str, str]) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
