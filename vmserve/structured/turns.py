"""Choose the next grammar to compile. Tenants take turns: a flood delays no other tenant."""

from __future__ import annotations

from collections import Counter

from vmserve.structured.spec import Constraint

__all__ = ["TenantTurns"]


class TenantTurns:
    """Constraints that wait, each for one tenant or more. Not thread-safe.

    ``most_running``: places that one tenant may have at a time.
    """

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        #: Tenants in the order of their turns, and what each waits for, in order of arrival.
        self._waiting: dict[str, dict[Constraint, None]] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return len({constraint for queue in self._waiting.values() for constraint in queue})

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, tenant: str, constraint: Constraint) -> None:
        """Let ``tenant`` wait for a constraint; a second call changes nothing."""
        self._waiting.setdefault(tenant, {})[constraint] = None

    def remove(self, tenant: str, constraint: Constraint) -> None:
        """Let ``tenant`` wait no longer."""
        queue = self._waiting.get(tenant, {})
        queue.pop(constraint, None)
        if not queue:
            self._waiting.pop(tenant, None)

    def take(self) -> tuple[str, Constraint] | None:
        """What is next, and whose turn that was: its place is theirs until :meth:`done`.

        None: nothing waits, or only what belongs to tenants that have all the places they may.
        """
        for tenant, queue in self._waiting.items():
            if self._running[tenant] < self._most_running:
                constraint = next(iter(queue))
                break
        else:
            return None
        for other in list(self._waiting):
            self.remove(other, constraint)
        if tenant in self._waiting:  # a tenant that had a turn goes after the others
            self._waiting[tenant] = self._waiting.pop(tenant)
        self._running[tenant] += 1
        return tenant, constraint

    def done(self, tenant: str) -> None:
        """Free a place of ``tenant``."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
