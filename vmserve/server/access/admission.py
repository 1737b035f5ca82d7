"""Limits on queued requests and on bytes of bodies; beyond them requests get 429."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from vmserve.errors import InvalidRequestError
from vmserve.server.errors import ApiError
from vmserve.server.limits import MAX_HELD_BYTES, MAX_HELD_BYTES_OF_ONE

__all__ = ["Admission", "BodyBytes", "Ticket", "Visit"]


#: Requests and tokens that may wait at least, where options do not say.
_REQUESTS: Final = 1024
_TOKENS: Final = 8_000_000


@dataclass(eq=False, slots=True)
class Visit:
    """A running HTTP request: its tenant and the size of its body so far."""

    #: The key's owner; where there are no keys, the client's address.
    tenant: str
    num_bytes: int = 0


class BodyBytes:
    """Count the bytes of bodies from their first byte to the end of their request.

    What is made of a body stays for as long, while the request waits for the engine too.
    """

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()
        self._in_all = 0

    def grow(self, visit: Visit, num_bytes: int) -> None:
        """Add bytes; raises :class:`ApiError` 429 above the limit of the tenant or of all."""
        held = self._of[visit.tenant] + num_bytes
        if held > MAX_HELD_BYTES_OF_ONE or self._in_all + num_bytes > MAX_HELD_BYTES:
            raise ApiError(
                429,
                f"The bodies of your requests that have not ended hold {held - num_bytes} bytes, "
                f"those of all {self._in_all}; at most {MAX_HELD_BYTES_OF_ONE} and "
                f"{MAX_HELD_BYTES} may. Try again later.",
                headers={"retry-after": "1"},
            )
        visit.num_bytes += num_bytes
        self._of[visit.tenant] = held
        self._in_all += num_bytes

    def release(self, visit: Visit) -> None:
        self._in_all -= visit.num_bytes
        self._of[visit.tenant] -= visit.num_bytes
        if not self._of[visit.tenant]:
            del self._of[visit.tenant]
        visit.num_bytes = 0


@dataclass(eq=False, slots=True)
class Ticket:
    """The share of one HTTP request: ``num_requests`` prompts, ``num_tokens`` asked for in all."""

    tenant: str
    num_requests: int
    num_tokens: int


class Admission:
    """Count admitted requests that have not ended.

    What waits is what was admitted less what the engine says is running; it is
    first-come first-served, so the youngest tickets are taken to be the waiting ones. The
    tokens of a request are n · (prompt + max_tokens). One tenant may fill the queue; another is
    admitted nevertheless while all its requests are less than an equal part of it.

    ``max_requests`` and ``max_tokens``: None: twice what engines run at once, but not few.
    ``num_running`` and ``max_running``: requests that engines run now, and at most.
    """

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        num_running: Callable[[], int],
        max_running: Callable[[], int],
    ) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._num_running = num_running
        self._max_running = max_running
        #: Tickets from the oldest to the youngest: those that counted as running at the last look,
        #: and those that counted as waiting, with their sums.
        self._running: OrderedDict[Ticket, None] = OrderedDict()
        self._waiting: OrderedDict[Ticket, None] = OrderedDict()
        self._waiting_requests = self._waiting_tokens = 0
        self._num_requests = 0
        #: Requests and tokens of each tenant that has any.
        self._requests_of: Counter[str] = Counter()
        self._tokens_of: Counter[str] = Counter()
        self.num_rejected = 0

    @property
    def max_requests(self) -> int:
        """Most requests that may wait."""
        if self._max_requests is not None:
            return self._max_requests
        return self._usual_requests

    @property
    def max_tokens(self) -> int:
        """Most tokens that waiting requests may ask for."""
        if self._max_tokens is not None:
            return self._max_tokens
        return _TOKENS * self._usual_requests // _REQUESTS

    @property
    def _usual_requests(self) -> int:
        """Most requests that may wait if no option says it."""
        return max(_REQUESTS, 2 * self._max_running())

    @property
    def most_held(self) -> int:
        """Requests that may run or wait."""
        return self.max_requests + self._max_running()

    def admit(self, tenant: str, num_requests: int, num_tokens: int) -> Ticket:
        """Raises :class:`ApiError` 429 while the queue is full, and
        :class:`InvalidRequestError` for what would not fit an empty queue either.
        """
        max_requests, max_tokens = self.max_requests, self.max_tokens
        if num_requests > max_requests:
            raise InvalidRequestError(
                f"{num_requests} prompts in one request are more than the queue may ever hold, "
                f"{max_requests}: send fewer prompts per request",
                "prompt",
            )
        if num_tokens > max_tokens:
            raise InvalidRequestError(
                f"{num_tokens} tokens, n times prompt and max_tokens, are more than the queue may "
                f"ever hold, {max_tokens}: lower n or max_tokens, or send fewer prompts",
                "max_tokens",
            )
        waiting_requests, waiting_tokens = self.waiting()
        if (
            waiting_requests + num_requests > max_requests
            or waiting_tokens + num_tokens > max_tokens
        ) and not self._is_below_part(tenant, num_requests, num_tokens):
            self.num_rejected += 1
            raise ApiError(
                429,
                f"The server is overloaded: {waiting_requests} requests of {waiting_tokens} tokens "
                f"are waiting, and at most {max_requests} of {max_tokens} may "
                "(--max-queued-requests, --max-queued-tokens). Try again later.",
                headers={"retry-after": "1"},
            )
        ticket = Ticket(tenant, num_requests, num_tokens)
        self._wait(ticket)
        self._num_requests += num_requests
        self._requests_of[tenant] += num_requests
        self._tokens_of[tenant] += num_tokens
        return ticket

    def _is_below_part(self, tenant: str, num_requests: int, num_tokens: int) -> bool:
        """Whether the tenant has less than an equal part of the queue, with these."""
        num_tenants = len(self._requests_of) + (tenant not in self._requests_of)
        return (
            num_tenants * (self._requests_of[tenant] + num_requests) <= self.max_requests
            and num_tenants * (self._tokens_of[tenant] + num_tokens) <= self.max_tokens
        )

    def release(self, ticket: Ticket) -> None:
        if ticket in self._waiting:
            self._leave_waiting(ticket)
        else:
            del self._running[ticket]
        self._num_requests -= ticket.num_requests
        self._requests_of[ticket.tenant] -= ticket.num_requests
        self._tokens_of[ticket.tenant] -= ticket.num_tokens
        if not self._requests_of[ticket.tenant]:
            del self._requests_of[ticket.tenant], self._tokens_of[ticket.tenant]

    def waiting(self) -> tuple[int, int]:
        """Requests admitted that do not run yet, and the tokens they ask for."""
        waiting = max(0, self._num_requests - self._num_running())
        while self._waiting_requests < waiting:
            ticket, _ = self._running.popitem()
            self._wait(ticket)
            self._waiting.move_to_end(ticket, last=False)
        while self._waiting:
            oldest = next(iter(self._waiting))
            too_many = self._waiting_requests - waiting
            if too_many < oldest.num_requests:
                # Only the waiting share of a ticket that runs in part.
                share = oldest.num_tokens * (oldest.num_requests - too_many) // oldest.num_requests
                return waiting, self._waiting_tokens - oldest.num_tokens + share
            self._leave_waiting(oldest)
            self._running[oldest] = None
        return 0, 0

    def _wait(self, ticket: Ticket) -> None:
        self._waiting[ticket] = None
        self._waiting_requests += ticket.num_requests
        self._waiting_tokens += ticket.num_tokens

    def _leave_waiting(self, ticket: Ticket) -> None:
        del self._waiting[ticket]
        self._waiting_requests -= ticket.num_requests
        self._waiting_tokens -= ticket.num_tokens
