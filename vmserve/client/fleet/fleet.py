"""The interface of :class:`~vmserve.client.process_llm.ProcessLLM` over several engines.

Each request goes to one member, which the router chooses. If its engine dies before the request has
a token, or is silent for long, another member gets it: nobody notices, since a request's
tokens depend on its seed alone. What a request costs does not depend on the number of members: they
report what changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar

from vmserve.client.core import Pin
from vmserve.client.fleet.figures import merged_snapshot
from vmserve.config import ResolvedConfig
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.numbers.sizes import parse_size
from vmserve.router.policy import Policy, Reason, Router
from vmserve.sampling import GenerationParams
from vmserve.telemetry.counters import merged_stats
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.prompts import Prompt, PromptLike, encode_prompt
from vmserve.text.tokenizer import Tokenizer
from vmserve.types import PinnedPrefix, RequestOutput, RequestTerms

__all__ = ["FleetEngine", "FleetLLM", "MemberState", "Replica"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: "suspect": the engine has been silent for long, although it owes an answer.
MemberState = Literal["ready", "draining", "suspect", "down"]

#: Engines that may die under a request before it fails: it may be the cause.
_MOST_DEATHS = 3
#: Times that a request may leave a suspected engine: its own step may be what takes long. A request
#: which is not streamed may be nearly done: it moves once.
_MOST_MOVES, _MOST_MOVES_WHOLE = 3, 1
#: Engines whose figures are asked for in one turn of the event loop.
_ASKED_AT_ONCE = 16
_SILENT = "nothing was heard of the engine for too long"


class _SilentError(EngineDeadError):
    """A member was suspected before it had an answer."""


class Replica(Protocol):
    """What a fleet asks of a member's client. Each is used on one event loop.

    ``on_lost`` is called when its engine ends, before its requests and questions fail;
    ``on_change`` when ``errored`` or ``is_suspect`` has changed, and ``on_running`` with how many
    more requests run than before.
    """

    resolved: ResolvedConfig
    model_config: Any
    identity: str
    tokenizer: Tokenizer
    on_lost: Callable[[], None]
    on_change: Callable[[], None]
    on_running: Callable[[int], None]

    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def errored(self) -> bool: ...
    @property
    def is_suspect(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def retry_seconds(self) -> float | None: ...
    def facts(self) -> Mapping[str, Any]: ...
    async def start(self) -> None: ...
    def check(
        self, prompt: PromptLike, params: GenerationParams | None
    ) -> tuple[Prompt, GenerationParams]: ...
    def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncGenerator[RequestOutput, None]: ...
    async def abort(self, request_id: str) -> None: ...
    def stats(self) -> dict[str, float | int]: ...
    async def fetch_stats(self) -> dict[str, float | int]: ...
    async def snapshot(self) -> EngineSnapshot: ...
    async def until_dead(self) -> None: ...
    async def set_kv_cache_memory(self, size: int | str) -> int: ...
    async def reset_prefix_cache(self) -> None: ...
    def remember(self, pin: Pin) -> None: ...
    async def keep(self, pin: Pin) -> int: ...
    async def unpin_prefix(self, handle: int) -> None: ...
    async def sleep(self, timeout: float = 0.0) -> None: ...
    async def wake(self) -> None: ...
    async def shutdown(self, timeout: float = 0.0) -> None: ...


@dataclass(eq=False)
class FleetEngine:
    """One engine. ``requests``: one object for each that it has, which is its load.

    ``is_chosen``: whether the router may choose it. ``unstarted`` and ``questions``: what waits for
    it, and is given up when it is suspected: requests without a token if another takes them.
    ``noted``: its state as of the last change; None: it is no member yet, or no longer;
    ``identity``: as of the last change.
    """

    name: str
    client: Replica
    is_draining: bool = False
    is_chosen: bool = False
    noted: MemberState | None = None
    identity: str = ""
    requests: set[object] = field(default_factory=set)
    unstarted: set[asyncio.Future[Any]] = field(default_factory=set)
    questions: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def state(self) -> MemberState:
        if self.client.errored:
            return "down"
        if self.is_draining:
            return "draining"
        return "suspect" if self.client.is_suspect else "ready"


class FleetLLM:
    """A client of ``members`` by name, which have loaded the same model. For one event loop.

    Raises :class:`~vmserve.errors.ConfigurationError` if they differ.
    """

    def __init__(self, clients: Sequence[Replica], policy: Policy = "prefix") -> None:
        first = clients[0]
        self.tokenizer = first.tokenizer
        self.model_config = first.model_config
        #: Settings of one member: a request runs in one.
        self.resolved = first.resolved
        self._facts = first.facts()
        self.default_sampling = first.default_sampling
        self._router = Router(policy, block_tokens=first.resolved.block_tokens)
        self._members: dict[str, FleetEngine] = {}
        self._names = map(str, itertools.count())
        #: Members by the names of their requests, where requests have names.
        self._homes: dict[str, FleetEngine] = {}
        #: The members' identities, joined where machines differ: any may answer.
        self.identity = ""
        self._identities: Counter[str] = Counter()
        #: Number of members in each state, and the state of those that take requests.
        self._states: Counter[MemberState] = Counter()
        self._takers: MemberState = "suspect"
        #: Requests which run in all engines, and their limit.
        self.num_running = self.max_num_running = 0
        self._is_listening = False
        self._changed = asyncio.Event()
        self._pins: dict[int, Pin] = {}
        self._pin_handles = itertools.count()
        self._choices: Counter[Reason] = Counter()
        self._num_failovers = 0
        self._expected_tokens = 0
        self._choice_seconds = 0.0
        #: Work besides requests: not begun, and going on.
        self._works: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Future[None]] = set()
        for client in clients:
            self._add(client)

    # -- members ------------------------------------------------------------------------

    @property
    def members(self) -> list[FleetEngine]:
        return list(self._members.values())

    def _add(self, client: Replica) -> FleetEngine:
        _check_same(self._facts, client.facts())
        client.tokenizer = self.tokenizer  # several would only take memory
        member = FleetEngine(next(self._names), client)
        self._members[member.name] = member
        self._enter(member)
        client.on_lost = lambda: self._router.forget(member.name)
        client.on_change = lambda: self._renew(member)
        client.on_running = self._count
        self._count(client.num_running)
        self.max_num_running += client.resolved.max_num_seqs
        self._renew(member)
        self._changed.set()
        return member

    def _count(self, more: int) -> None:
        self.num_running += more

    def _enter(self, member: FleetEngine) -> None:
        """Let the router know how much a member can have cached; it has nothing yet."""
        stats, resolved = member.client.stats(), member.client.resolved
        blocks = int(stats.get("limit_pages", 0) * stats.get("blocks_per_page", 0))
        self._router.join(member.name, blocks if resolved.prefix_caching else 0)

    def _renew(self, member: FleetEngine) -> None:
        """Take note of a member's state, which may have changed. Ready members take requests; if
        there are none, suspected ones do.

        What has not begun leaves the suspected for the others.
        """
        before, member.noted = member.noted, None
        if before is not None:
            self._states[before] -= 1
            self._identities -= Counter([member.identity])
        if member.name in self._members:
            member.noted, member.identity = member.state, member.client.identity
            self._states[member.noted] += 1
            self._identities[member.identity] += 1
        self.identity = "+".join(sorted(self._identities))
        takers: MemberState = "ready" if self._states["ready"] else "suspect"
        concerned = [member] if takers == self._takers else self.members
        self._takers = takers
        for each in concerned:
            each.is_chosen = each.noted == takers
            self._note(each)
            if each.client.is_suspect:
                _give_up(each.questions)
                if takers == "ready":
                    _give_up(each.unstarted)
        match before, member.noted:
            case "ready", "suspect":
                logger.warning("engine %s: nothing was heard of it for long", member.name)
            case "suspect", "ready":
                logger.info("engine %s: it is heard of again", member.name)

    def _note(self, member: FleetEngine) -> None:
        if member.name in self._members:
            load = len(member.requests) if member.is_chosen else None
            self._router.note(member.name, load)

    async def join(self, client: Replica) -> FleetEngine:
        """Serve with another engine too, once it holds what is pinned.

        Raises :class:`~vmserve.errors.ConfigurationError` for another model, and what pinning
        raises; then it is no member.
        """
        _check_same(self._facts, client.facts())
        await client.start()
        for pin in list(self._pins.values()):
            await client.keep(pin)
        return self._add(client)

    def meanwhile(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` once, e.g. find a member that joins, from :meth:`start` to the end."""
        self._works.append(work)

    def find(self, name: str) -> FleetEngine:
        """Raises ``KeyError``."""
        return self._members[name]

    def drain(self, name: str) -> FleetEngine:
        """Send a member no more requests; those that it has go on.

        Raises :class:`~vmserve.errors.ConfigurationError` if no other takes requests.
        """
        member = self.find(name)
        if not any(each.state == "ready" for each in self.members if each is not member):
            raise ConfigurationError(f"no other engine takes requests: {name} cannot be drained")
        member.is_draining = True
        self._renew(member)
        return member

    def resume(self, name: str) -> FleetEngine:
        """Send a member requests again."""
        member = self.find(name)
        member.is_draining = False
        self._renew(member)
        return member

    async def leave(self, name: str, timeout: float) -> FleetEngine:
        """End a member, after ``timeout`` seconds for its requests. Raises as :meth:`drain`."""
        member = self.drain(name)
        end = time.monotonic() + timeout
        while member.requests and not member.client.errored and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._members.pop(name, None) is not None:
            self._router.leave(name)
            client = member.client
            client.on_lost = client.on_change = lambda: None
            client.on_running = lambda more: None
            self._count(-client.num_running)
            self.max_num_running -= client.resolved.max_num_seqs
            self._renew(member)
            self._changed.set()
        await member.client.shutdown(0.0)
        return member

    # -- requests -----------------------------------------------------------------------

    @property
    def errored(self) -> bool:
        """Whether no engine serves requests now."""
        return all(member.client.errored for member in self._members.values())

    @property
    def retry_seconds(self) -> float | None:
        """The shortest pause before an engine that has died is started again; None if none is."""
        pauses = (member.client.retry_seconds for member in self.members)
        return min((pause for pause in pauses if pause is not None), default=None)

    async def start(self) -> None:
        """Begin to listen to all engines. Every call begins with it."""
        while self._works:
            task = asyncio.ensure_future(self._works.pop()())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not self._is_listening:
            self._is_listening = True
            # Also if the first caller leaves.
            await asyncio.shield(asyncio.gather(*(each.client.start() for each in self.members)))

    def generate(
        self,
        prompt: PromptLike,
        params: GenerationParams | None = None,
        *,
        request_id: str | None = None,
        **terms: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Generate as :meth:`vmserve.AsyncLLM.generate` does."""
        return self.serve(prompt, params, request_id=request_id, terms=RequestTerms(**terms))

    def check(
        self, prompt: PromptLike, params: GenerationParams | None
    ) -> tuple[Prompt, GenerationParams]:
        """Return a request as any member would send it.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        member = next(iter(self._members.values()))
        return member.client.check(prompt, params)

    async def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Do the same as :meth:`generate`, with its terms as one value."""
        await self.start()
        encoded = encode_prompt(prompt, self.tokenizer)
        end = None if terms.timeout is None else time.monotonic() + terms.timeout
        is_accepted = has_tokens = False
        num_deaths = num_moves = 0
        most_moves = _MOST_MOVES if terms.stream else _MOST_MOVES_WHOLE
        while True:
            member = self._choose(encoded, terms)
            try:
                with self._placed(member, request_id):
                    outputs = member.client.serve(
                        encoded, params, request_id=request_id, terms=terms
                    )
                    async with contextlib.aclosing(outputs):
                        while not has_tokens:
                            if num_moves < most_moves:
                                output = await self._begin(member, outputs)
                            else:
                                output = await anext(outputs, None)
                            if output is None:
                                return
                            has_tokens = bool(output.outputs) or output.finished
                            if has_tokens or not is_accepted:
                                is_accepted = True
                                yield output
                        async for output in outputs:
                            yield output
                return
            except EngineDeadError as error:
                is_silent = isinstance(error, _SilentError)
                num_deaths, num_moves = num_deaths + (not is_silent), num_moves + is_silent
                if has_tokens or num_deaths == _MOST_DEATHS or not self._states[self._takers]:
                    raise
                self._num_failovers += 1
                if end is not None:
                    terms = replace(terms, timeout=max(0.001, end - time.monotonic()))

    async def _begin(
        self, member: FleetEngine, outputs: AsyncGenerator[RequestOutput, None]
    ) -> RequestOutput | None:
        """The next output of a request without a token. Raises :class:`_SilentError` if another
        member is to have it."""
        if member.client.is_suspect and self._takers == "ready":
            raise _SilentError(_SILENT)
        return await _unless_given_up(anext(outputs, None), member.unstarted)

    @contextlib.contextmanager
    def _placed(self, member: FleetEngine, request_id: str | None) -> Iterator[None]:
        """Count a request as one of a member's."""
        place = object()
        member.requests.add(place)
        self._note(member)
        if request_id is not None:
            self._homes[request_id] = member
        try:
            yield
        finally:
            member.requests.discard(place)
            self._note(member)
            if request_id is not None:
                self._homes.pop(request_id, None)

    async def abort(self, request_id: str) -> None:
        """End a request. Its stream gets a last output with finish_reason "abort"."""
        member = self._homes.get(request_id)
        if member is not None:
            await member.client.abort(request_id)

    def _choose(self, prompt: Prompt, terms: RequestTerms) -> FleetEngine:
        """Raises :class:`~vmserve.errors.EngineDeadError` if no member takes requests."""
        began = time.perf_counter()
        if not self._states[self._takers]:
            raise EngineDeadError("no engine takes requests now")
        choice = self._router.choose(prompt.token_ids, (terms.isolation, terms.cache_salt))
        self._choices[choice.reason] += 1
        self._expected_tokens += choice.cached_tokens
        self._choice_seconds += time.perf_counter() - began
        return self._members[choice.member]

    # -- what concerns all --------------------------------------------------------------

    async def _live(self, ask: Callable[[FleetEngine], Awaitable[T]]) -> list[T]:
        """Ask all that are up; one that dies meanwhile has no answer.

        Raises :class:`~vmserve.errors.EngineDeadError` if there are none.
        """
        await self.start()
        asked = [ask(member) for member in self.members if not member.client.errored]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDeadError):
                raise answer
        given = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not given:
            raise EngineDeadError("the engines have stopped")
        return given

    def stats(self) -> dict[str, float | int]:
        """The figures of all engines together, and the router's."""
        return {**merged_stats([each.client.stats() for each in self.members]), **self.own_stats()}

    async def fetch_stats(self) -> dict[str, float | int]:
        await self.refresh()
        return self.stats()

    async def refresh(self) -> None:
        """Ask all engines for their figures; those that are suspected keep what is known."""
        asked = [each.client for each in self.members if not each.client.is_suspect]
        for first in range(0, len(asked), _ASKED_AT_ONCE):  # others come in between
            some = asked[first : first + _ASKED_AT_ONCE]
            await asyncio.gather(*(client.fetch_stats() for client in some))

    def own_stats(self) -> dict[str, float | int]:
        """The router's figures."""
        return {
            "router_choices_total": self._choices.total(),
            "router_spills_total": self._choices["spill"],
            "router_failovers_total": self._num_failovers,
            "router_expected_hit_tokens_total": self._expected_tokens,
            "router_choice_seconds_total": self._choice_seconds,
        }

    async def snapshot(self) -> EngineSnapshot:
        """Take a picture of all engines as one, but for those that are suspected.

        Raises :class:`~vmserve.errors.EngineDeadError` if there is none.
        """

        async def take(member: FleetEngine) -> EngineSnapshot:
            if member.client.is_suspect:
                raise _SilentError(_SILENT)
            return await _unless_given_up(member.client.snapshot(), member.questions)

        merged = merged_snapshot(await self._live(take))
        return replace(merged, stats={**merged.stats, **self.own_stats()})

    async def until_dead(self) -> None:
        """Return when all engines have died and are not started again."""
        await self.start()
        while True:
            self._changed.clear()
            dying = asyncio.gather(*(member.client.until_dead() for member in self.members))
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                waits: list[asyncio.Future[Any]] = [dying, changed]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if not self._changed.is_set():
                    return
            finally:
                dying.cancel()
                changed.cancel()
                await asyncio.gather(dying, changed, return_exceptions=True)

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """Change how far the KV caches may grow, in equal parts; returns the sum.

        Raises :class:`~vmserve.errors.EngineDeadError` while an engine is down.
        """
        part = parse_size(size, "kv_cache_memory") // len(self._members)
        limits = [await member.client.set_kv_cache_memory(part) for member in self.members]
        for member in self.members:
            self._enter(member)
            self._note(member)
        return sum(limits)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and compute pinned ones again."""
        for member in self.members:
            self._router.forget(member.name)
        await self._live(lambda member: member.client.reset_prefix_cache())

    # -- pinned prefixes ----------------------------------------------------------------

    async def pin_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Pin a prefix in all engines, and in those that join or are started again later."""
        pin = Pin(next(self._pin_handles), token_ids, cache_salt, isolation)

        async def keep(member: FleetEngine) -> int:
            try:
                return await member.client.keep(pin)
            except EngineDeadError:
                member.client.remember(pin)
                raise

        self._pins[pin.handle] = pin
        try:
            held = await self._live(keep)
        except BaseException:
            await self.unpin_prefix(pin.handle)
            raise
        for member in self.members:
            if member.client.errored:
                member.client.remember(pin)
        return PinnedPrefix(pin.handle, min(held))

    async def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        if self._pins.pop(handle, None) is None:
            raise ValueError(f"no prefix is pinned with the handle {handle}")
        for member in self.members:
            with contextlib.suppress(EngineDeadError, ValueError):  # a dead one holds nothing
                await member.client.unpin_prefix(handle)

    # -- processes ----------------------------------------------------------------------

    async def sleep(self, timeout: float = 0.0) -> None:
        """End all engines' processes until :meth:`wake`."""
        await asyncio.gather(*(member.client.sleep(timeout) for member in self.members))

    async def wake(self) -> None:
        """Start all engines again. Raises what loading raises; all then sleep on."""
        began = await asyncio.gather(
            *(member.client.wake() for member in self.members), return_exceptions=True
        )
        errors = [error for error in began if error is not None]
        if errors:
            await self.sleep()
            raise errors[0]

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, and end all engines."""
        self._works.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.client.shutdown(timeout) for member in self.members))


async def _unless_given_up(work: Awaitable[T], waits: set[asyncio.Future[Any]]) -> T:
    """Await ``work``, which is one of ``waits`` meanwhile.

    Raises :class:`_SilentError` if it is given up.
    """
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    waits.add(task)
    try:
        return await task
    except asyncio.CancelledError:
        own = asyncio.current_task()
        if task in waits or (own is not None and own.cancelling()):
            raise
        raise _SilentError(_SILENT) from None
    finally:
        waits.discard(task)


def _give_up(waits: set[asyncio.Future[Any]]) -> None:
    given_up = list(waits)
    waits.clear()
    for task in given_up:
        task.cancel()


def _check_same(facts: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Check that a request means the same to two engines.

    Raises :class:`~vmserve.errors.ConfigurationError`, which names the first thing that differs.
    """
    for name, value in facts.items():
        other = others.get(name)
        if other != value:
            shown = "" if len(f"{value}{other}") > 200 else f": {other}, not {value}"
            raise ConfigurationError(
                f"an engine has another {name} than the others{shown}: all must serve one model"
            )
