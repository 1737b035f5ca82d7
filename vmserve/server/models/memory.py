"""A model's share of the pool that the KV caches of all models are lent from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vmserve.client.client import Client
from vmserve.client.lending import KVPool, PoolMember
from vmserve.numbers.sizes import parse_size

__all__ = ["PoolShare"]


class PoolShare:
    """The terms on which a model has memory of ``pool``, while it is awake.

    ``weight``, ``floor`` and ``cap``: see :meth:`vmserve.client.lending.KVPool.join`.
    """

    def __init__(
        self,
        pool: KVPool,
        name: str,
        weight: float = 1.0,
        floor: int | str | None = None,
        cap: int | str | None = None,
    ) -> None:
        self.pool = pool
        self._name = name
        self._terms: dict[str, Any] = {"weight": weight, "floor": floor, "cap": cap}
        #: Bytes that the model needed when it was last awake; 0: it never was.
        self._least_bytes = 0

    async def join(self, client: Client, pinned: Sequence[int] = ()) -> None:
        """Borrow for the engine of ``client``, which will have so many tokens ``pinned``.

        Raises :class:`~vmserve.errors.ConfigurationError` if the floors of all do not fit.
        """
        await self.pool.join(client, self._name, pinned=pinned, **self._terms)

    def leave(self) -> None:
        """Give all back. The engine must have ended."""
        if self._name in self.pool:
            self._least_bytes = self.pool.least_bytes(self._name)
        self.pool.leave(self._name)

    def change(self, **terms: Any) -> int:
        """Change ``weight``, ``floor`` or ``cap``, now and for when the model wakes.

        Returns the cap in bytes. Raises :class:`~vmserve.errors.ConfigurationError`.
        """
        changed = self._terms | terms
        if self._name in self.pool:
            self.pool.set(self._name, **terms)
        else:
            self.pool.check(self._name, self._least_bytes, **changed)
        self._terms = changed
        member = self.state()
        cap = self._terms["cap"]
        if member is not None:
            return member.cap_bytes
        return self.pool.size_bytes if cap is None else parse_size(cap, "kv_cap")

    def check_pool(self, size: int | str) -> None:
        """Check that a pool of this size holds the model, if it sleeps now, when it wakes.

        Raises :class:`~vmserve.errors.ConfigurationError`.
        """
        if self._name not in self.pool:
            self.pool.check(self._name, self._least_bytes, **self._terms, size=size)

    @property
    def weight(self) -> float:
        return float(self._terms["weight"])

    def state(self) -> PoolMember | None:
        """How it stands; None while it sleeps."""
        return next((row for row in self.pool.state() if row.name == self._name), None)
