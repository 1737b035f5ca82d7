"""Responses that were stored, for later requests of the same key."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vmserve.server.limits import MAX_BODY_BYTES
from vmserve.server.wire import dump_json

__all__ = ["MAX_STORED_BYTES", "STORED_SECONDS", "ResponseStore", "StoredResponse"]

#: Bytes that all tenants may store together, in equal shares, and bytes that one may store.
MAX_STORED_BYTES = 256 << 20
MAX_TENANT_BYTES = 64 << 20
STORED_SECONDS = 3600.0
#: Bytes of an entry besides its two texts: objects, keys, places in dictionaries.
_ENTRY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """JSON as it was written: as Python objects it would take up to thirty times the memory.

    ``conversation``: the messages up to and with the response's output, without instructions.
    """

    reply: bytes
    conversation: bytes

    @classmethod
    def of(cls, reply: dict[str, Any], messages: list[dict[str, Any]]) -> StoredResponse:
        return cls(dump_json(reply), dump_json(messages))

    @property
    def num_bytes(self) -> int:
        return len(self.reply) + len(self.conversation) + _ENTRY_BYTES


class ResponseStore:
    """Responses in memory, bounded in size and time. Each tenant finds only its own, and has a
    share of its own, in which its oldest give way to its newest.

    One thread at a time. ``num_tenants``: how many there can be. ``clock``: seconds.
    """

    def __init__(self, num_tenants: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = min(MAX_TENANT_BYTES, MAX_STORED_BYTES // num_tenants)
        self._clock = clock
        #: Expiry of all entries, oldest first.
        self._until: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._stored: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: Counter[str] = Counter()

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Store a response; return False if it is larger than the tenant's share, or its
        conversation larger than a request may be."""
        self._expire()
        if stored.num_bytes > self._share or len(stored.conversation) > MAX_BODY_BYTES:
            return False
        own = self._stored.setdefault(tenant, OrderedDict())
        while own and self._num_bytes[tenant] + stored.num_bytes > self._share:
            self._remove(tenant, next(iter(own)))
        own[response_id] = stored
        self._until[tenant, response_id] = self._clock() + STORED_SECONDS
        self._num_bytes[tenant] += stored.num_bytes
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        self._expire()
        own = self._stored.get(tenant)
        return None if own is None else own.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return whether it was there."""
        if self.get(tenant, response_id) is None:
            return False
        self._remove(tenant, response_id)
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._remove(*next(iter(self._until)))

    def _remove(self, tenant: str, response_id: str) -> None:
        del self._until[tenant, response_id]
        self._num_bytes[tenant] -= self._stored[tenant].pop(response_id).num_bytes
