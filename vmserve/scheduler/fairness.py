"""Whose turn it is: a virtual token counter for each tenant.

(Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.) Tenants who have requests
waiting are served in turn of the tokens that they have had; nobody is held back while the others
have nothing to do. When those that run give way to another tenant: :mod:`vmserve.scheduler.claims`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vmserve.scheduler.base import StepGrant
from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["TenantShares"]

#: Generating a token costs about so many times what reading one costs.
_OUTPUT_WEIGHT = 2.0


class TenantShares:
    """Tokens that each tenant has had, of those who have something waiting or running."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        #: Requests that have not ended, by tenant.
        self._active: dict[str, set[Request]] = {}
        #: What the last tenant to leave had: where the next one begins if nobody is there.
        self._last = 0.0

    def arrived(self, request: Request) -> None:
        """Who comes anew saved nothing up by having stayed away."""
        tenant = request.tenant
        if tenant not in self._active:
            least = min((self._had[other] for other in self._active), default=self._last)
            self._had[tenant] = max(self._had.get(tenant, 0.0), least)
            self._active[tenant] = set()
        self._active[tenant].add(request)

    def left(self, request: Request) -> None:
        """The request has ended; it may be told twice."""
        tenant = request.tenant
        requests = self._active.get(tenant, set())
        requests.discard(request)
        if not requests and self._active.pop(tenant, None) is not None:
            self._last = self._had[tenant]
            if not self._active:
                self._had.clear()  # nobody is there to compare with

    def served(self, request: Request, *, num_read: int = 0, num_generated: int = 0) -> None:
        """Tokens computed for the request: of its prompt, and of its answers."""
        if request.tenant in self._had:
            self._had[request.tenant] += num_read + _OUTPUT_WEIGHT * num_generated

    def next_of(self, waiting: Iterable[Sequence], granted: Iterable[StepGrant] = ()) -> Sequence:
        """The first, in the given order, of the tenant who has had least, ``granted`` included.

        Only those of the first one's rank are looked at: priorities come before shares.
        """
        had = Counter(self._had)
        for sequence, num_new in granted:
            had[sequence.request.tenant] += num_new
        queue = iter(waiting)
        best = next(queue)
        rank = best.rank
        seen = {best.request.tenant}
        for sequence in queue:
            if sequence.rank != rank:
                break
            tenant = sequence.request.tenant
            if tenant in seen:
                continue
            seen.add(tenant)
            if had[tenant] < had[best.request.tenant]:
                best = sequence
        return best

    @property
    def num_tenants(self) -> int:
        """Those with requests that have not ended."""
        return len(self._active)

    def tokens_of(self, tenant: str) -> float:
        return self._had[tenant]

    @property
    def tokens(self) -> dict[str, float]:
        """What each tenant with requests has had, in tokens read (generated ones count twice)."""
        return {tenant: self._had[tenant] for tenant in self._active}
