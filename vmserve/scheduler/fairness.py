"""Fair sharing between tenants: a virtual token counter for each.

After Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Tenants with waiting
requests are served in order of the tokens that they have had. No tenant is held back while the
others have nothing to run. :mod:`vmserve.scheduler.claims` preempts for a tenant's share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences

from vmserve.scheduler.base import StepGrant, StepPlan
from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["OneTenant", "TenantShares"]

#: Cost of generating a token, as a multiple of that of reading one.
_OUTPUT_WEIGHT = 2.0


class OneTenant:
    """Requests share nothing out: all are one tenant's."""

    #: Whether a step's tokens are divided among tenants.
    divides = False
    num_tenants = 1

    def tenant_of(self, sequence: Sequence) -> str:
        return ""

    def tokens_of(self, tenant: str) -> float:
        return 0.0

    def arrived(self, request: Request) -> None:
        pass

    def left(self, request: Request) -> None:
        pass

    def computed(self, plan: StepPlan) -> None:
        pass

    def accepted(self, request: Request, num_tokens: int) -> None:
        pass

    def next_of(self, waiting: Sequences[Sequence], granted: Iterable[StepGrant] = ()) -> Sequence:
        return waiting[0]


class TenantShares:
    """Tokens had by each tenant with waiting or running requests."""

    divides = True

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        #: Unfinished requests, by tenant.
        self._active: dict[str, set[Request]] = {}
        #: Service that the last tenant to leave had: a new tenant starts there if no other is
        #: active.
        self._last = 0.0

    def arrived(self, request: Request) -> None:
        """Count the request. A tenant that comes back gains no credit from its absence."""
        tenant = request.tenant
        if tenant not in self._active:
            least = min((self._had[other] for other in self._active), default=self._last)
            self._had[tenant] = max(self._had.get(tenant, 0.0), least)
            self._active[tenant] = set()
        self._active[tenant].add(request)

    def left(self, request: Request) -> None:
        """The request has ended. Calling twice is harmless."""
        tenant = request.tenant
        requests = self._active.get(tenant, set())
        requests.discard(request)
        if not requests and self._active.pop(tenant, None) is not None:
            self._last = self._had[tenant]
            if not self._active:
                self._had.clear()  # no other tenant to compare with

    def computed(self, plan: StepPlan) -> None:
        """Charge tenants for what a step computed, but not for what a preemption made necessary
        again."""
        columns = plan.sequences, plan.num_past.tolist(), plan.num_new.tolist(), plan.samples
        for sequence, num_past, num_new, samples in zip(*columns, strict=True):
            num_read = 0
            if num_past < sequence.num_prompt and not sequence.was_preempted:
                num_read = min(num_past + num_new, sequence.num_prompt) - num_past
            self.served(sequence.request, num_read=num_read, num_generated=int(samples))

    def accepted(self, request: Request, num_tokens: int) -> None:
        """Charge for drafted tokens that are known now."""
        self.served(request, num_generated=num_tokens)

    def served(self, request: Request, *, num_read: int = 0, num_generated: int = 0) -> None:
        """Charge tokens computed for the request: of its prompt, and of its answers."""
        if request.tenant in self._had:
            self._had[request.tenant] += num_read + _OUTPUT_WEIGHT * num_generated

    def tenant_of(self, sequence: Sequence) -> str:
        """Whose turn the sequence takes."""
        return sequence.request.tenant

    def next_of(self, waiting: Sequences[Sequence], granted: Iterable[StepGrant] = ()) -> Sequence:
        """The first preempted sequence, whose tokens are paid for; else the first one of the tenant
        that has had least, ``granted`` included.

        Only sequences of the first one's rank are considered: priority comes before fairness.
        """
        preempted = next((sequence for sequence in waiting if sequence.was_preempted), None)
        if preempted is not None:
            return preempted
        had = Counter(self._had)
        for sequence, num_new in granted:
            had[sequence.request.tenant] += num_new
        queue = iter(waiting)
        best = next(queue)
        rank = best.rank
        seen = {best.request.tenant}
        for sequence in queue:
            if sequence.rank != rank or len(seen) == len(self._active):
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
        """Tenants with unfinished requests."""
        return len(self._active)

    def tokens_of(self, tenant: str) -> float:
        return self._had[tenant]

    @property
    def tokens(self) -> dict[str, float]:
        """What each active tenant has had, in tokens read; generated ones count twice."""
        return {tenant: self._had[tenant] for tenant in self._active}
