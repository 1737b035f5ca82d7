"""What one tenant may have at once, and in a minute, before the engine sees its requests.

A tenant is whoever has a key; on a server without keys, whom a request names as its ``user``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vmserve.errors import InvalidRequestError
from vmserve.server.auth import KeyLimits
from vmserve.server.errors import ApiError

__all__ = ["KeyLedger", "KeyUse"]

#: Number of accounts at which those of tenants that have nothing under way are looked through.
_MANY_ACCOUNTS = 1024


@dataclass(eq=False, slots=True)
class _Account:
    limits: KeyLimits
    #: Tokens that may be used now; below 0 after answers that took more.
    balance: float
    counted: float
    num_requests: int = 0
    num_running: int = 0
    #: Requests which wait for sequences to end, in order, and how many each wants.
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def refill(self, now: float) -> None:
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self.balance = min(limit, self.balance + (now - self.counted) * limit / 60)
        self.counted = now

    def has_room(self, num_sequences: int) -> bool:
        most = self.limits.sequences
        return most is None or self.num_running + num_sequences <= most

    def wake(self) -> None:
        while self.waiting:
            num, future = self.waiting[0]
            if not future.done():  # else the caller has left
                if not self.has_room(num):
                    return
                self.num_running += num
                future.set_result(None)
            self.waiting.popleft()


class KeyLedger:
    """Accounts of all tenants. Belongs to the event loop's thread.

    ``by_name``: limits of keys that differ from ``default``. ``clock``: in seconds.
    """

    def __init__(
        self,
        default: KeyLimits,
        by_name: Mapping[str, KeyLimits],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._default = default
        self._by_name = by_name
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._many = _MANY_ACCOUNTS
        self.num_rejected = 0

    def admit(
        self, tenant: str, num_requests: int, num_sequences: int, num_prompt_tokens: int
    ) -> KeyUse:
        """One HTTP request with so many prompts, and choices or beams of all of them.

        Raises :class:`ApiError` 429 while the tenant has as much as it may have, and
        :class:`InvalidRequestError` for what it may never have.
        """
        account = self._account(tenant)
        limits = account.limits
        if num_sequences > (limits.sequences or num_sequences):
            raise InvalidRequestError(
                f"{num_sequences} sequences, n for each prompt, are more than {_who(tenant)} may "
                f"run at once, {limits.sequences}: lower n, or send fewer prompts per request",
                "n",
            )
        if num_requests > (limits.requests or num_requests):
            raise InvalidRequestError(
                f"{num_requests} prompts in one request are more than {_who(tenant)} may have "
                f"under way, {limits.requests}: send fewer prompts per request",
                "prompt",
            )
        if num_prompt_tokens > (limits.tokens_per_minute or num_prompt_tokens):
            raise InvalidRequestError(
                f"{num_prompt_tokens} tokens of prompts are more than {_who(tenant)} may use in a "
                f"minute, {limits.tokens_per_minute}: shorten the prompt",
                "prompt",
            )
        if limits.requests is not None and account.num_requests + num_requests > limits.requests:
            raise self._refusal(
                account,
                f"{account.num_requests} requests of {_who(tenant)} are under way, and at most "
                f"{limits.requests} may be: wait for some of them to end.",
                1,
            )
        if limits.tokens_per_minute is not None and account.balance < num_prompt_tokens:
            missing = num_prompt_tokens - account.balance
            seconds = math.ceil(missing * 60 / limits.tokens_per_minute)
            raise self._refusal(
                account,
                f"This minute has {max(0, math.floor(account.balance))} tokens left of the "
                f"{limits.tokens_per_minute} that {_who(tenant)} may use, and the prompt takes "
                f"{num_prompt_tokens}: try again in {seconds} s.",
                seconds,
            )
        return KeyUse(account, num_requests, num_sequences, num_prompt_tokens)

    def _account(self, tenant: str) -> _Account:
        now = self._clock()
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._many:
                self._forget(now)
            limits = self._by_name.get(tenant, KeyLimits()).or_else(self._default)
            account = _Account(limits, limits.tokens_per_minute or 0, now)
            self._accounts[tenant] = account
        account.refill(now)
        return account

    def _forget(self, now: float) -> None:
        """Drop the accounts that are as new ones would be."""
        for tenant, account in list(self._accounts.items()):
            account.refill(now)
            limit = account.limits.tokens_per_minute
            if not account.num_requests and (limit is None or account.balance >= limit):
                del self._accounts[tenant]
        self._many = max(_MANY_ACCOUNTS, 2 * len(self._accounts))

    def _refusal(self, account: _Account, message: str, seconds: int) -> ApiError:
        self.num_rejected += 1
        limits = account.limits
        headers = {"retry-after": str(seconds)}
        if limits.requests is not None:
            headers["x-ratelimit-limit-requests"] = str(limits.requests)
            headers["x-ratelimit-remaining-requests"] = str(limits.requests - account.num_requests)
        if limits.tokens_per_minute is not None:
            left = max(0, math.floor(account.balance))
            missing = (limits.tokens_per_minute - account.balance) * 60 / limits.tokens_per_minute
            headers["x-ratelimit-limit-tokens"] = str(limits.tokens_per_minute)
            headers["x-ratelimit-remaining-tokens"] = str(left)
            headers["x-ratelimit-reset-tokens"] = f"{math.ceil(missing)}s"
        return ApiError(429, message, headers=headers)


class KeyUse:
    """What one HTTP request takes of its tenant's limits, until :meth:`release`."""

    def __init__(
        self, account: _Account, num_requests: int, num_sequences: int, num_prompt_tokens: int
    ) -> None:
        self._account = account
        self._num_requests = num_requests
        self._num_sequences = num_sequences
        self._num_running = 0
        account.num_requests += num_requests
        self.charge(num_prompt_tokens)

    def charge(self, num_tokens: int) -> None:
        """Tokens read or generated. Answers are not cut off: the next request waits for them."""
        self._account.balance -= num_tokens

    def enters_now(self) -> bool:
        """Whether the request's sequences run without having to wait for others of the tenant."""
        account = self._account
        if account.waiting or not account.has_room(self._num_sequences):
            return False
        self._num_running = self._num_sequences
        account.num_running += self._num_sequences
        return True

    async def enter(self) -> None:
        """Wait, in order, until enough of the tenant's other sequences have ended."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._account.waiting.append((self._num_sequences, future))
        try:
            await future
        finally:
            if future.done() and not future.cancelled():
                self._num_running = self._num_sequences
            else:
                future.cancel()
                self._account.wake()

    def leave(self, num_sequences: int) -> None:
        """Note that so many of the request's sequences have ended."""
        self._num_running -= num_sequences
        self._account.num_running -= num_sequences
        self._account.wake()

    def release(self) -> None:
        """The request has ended."""
        self._account.num_requests -= self._num_requests
        self.leave(self._num_running)


def _who(tenant: str) -> str:
    return repr(tenant[:64]) if tenant else "anonymous users together"
