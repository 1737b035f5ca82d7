"""Several engines that have loaded the same model, as one.

Each request goes to one member, which the router chooses. If its engine dies before its reader has
something of it, or is silent for long, another member gets it: nobody notices, since a request's
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import msgspec

from vmserve.client.callers import Callers
from vmserve.client.messages import (
    Abort,
    Add,
    Ask,
    Ended,
    FromEngine,
    Happened,
    Lost,
    Noted,
    Reply,
    Revived,
    StartOver,
    StepUpdate,
    ToEngine,
    Unpin,
)
from vmserve.client.questions import QUESTIONS, Arguments, Asked
from vmserve.client.transports.base import Facts, Receive, Transport
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.router.policy import Policy, Reason, Router
from vmserve.telemetry.counters import merged_stats

__all__ = ["Fleet", "FleetEngine", "MemberState"]

logger = logging.getLogger(__name__)

#: "suspect": the engine has been silent for long, although it owes an answer.
MemberState = Literal["ready", "draining", "suspect", "down"]

#: Engines that may die under a request before it fails: it may be the cause.
_MOST_DEATHS = 3
#: Times that a request may leave a suspected engine: its own step may be what takes long. A request
#: which is not streamed may be nearly done: it moves once.
_MOST_MOVES, _MOST_MOVES_WHOLE = 3, 1
#: Engines that are asked in one turn of the event loop.
_ASKED_AT_ONCE = 16
#: Seconds that their answers are waited for before others are asked too.
_TURN_SECONDS = 0.01
_SILENT = "nothing was heard of the engine for too long"
_MAY_MISS = frozenset(name for name, question in QUESTIONS.items() if question.may_miss)


@dataclass(slots=True, eq=False)
class _Placed:
    """A request, and the member that has it under ``handle``.

    ``add``: as the client sent it. ``is_accepted`` and ``has_begun``: whether the client was told
    that it is queued, and has been given some of it. ``has_passed``: whether tokens were passed on,
    of which its reader has been given nothing. ``is_aborted``: its member was told to end it.
    ``ends_at``: its deadline in monotonic seconds.
    """

    add: Add
    member: FleetEngine
    handle: int
    ends_at: float | None
    is_accepted: bool = False
    has_begun: bool = False
    has_passed: bool = False
    is_aborted: bool = False
    num_deaths: int = 0
    num_moves: int = 0

    @property
    def may_move(self) -> bool:
        return not self.is_aborted and self.num_moves < (
            _MOST_MOVES if self.add.is_stream else _MOST_MOVES_WHOLE
        )

    def again(self, member: FleetEngine, handle: int) -> Add:
        """The message that queues it at another member."""
        self.member, self.handle = member, handle
        terms = self.add.terms
        if self.ends_at is not None:
            terms = replace(terms, timeout=max(0.001, self.ends_at - time.monotonic()))
        return msgspec.structs.replace(self.add, handle=handle, terms=terms)


@dataclass(eq=False)
class FleetEngine:
    """One engine. ``requests``: those that it has by the handles it knows, which are its load.

    ``is_chosen``: whether the router may choose it. ``asked``: questions that it has not answered.
    ``noted``: its state as of the last change; None: it is no member yet, or no longer;
    ``identity`` and ``num_running``: as of the last change.
    """

    transport: Transport
    name: str = ""
    is_draining: bool = False
    is_chosen: bool = False
    noted: MemberState | None = None
    identity: str = ""
    num_running: int = 0
    requests: dict[int, _Placed] = field(default_factory=dict)
    asked: Asked = field(default_factory=lambda: Asked(Callers(), itertools.count(1)))

    @property
    def facts(self) -> Facts:
        return self.transport.facts

    @property
    def state(self) -> MemberState:
        if self.facts.is_dead:
            return "down"
        if self.is_draining:
            return "draining"
        return "suspect" if self.facts.is_suspect else "ready"

    async def ask(self, question: str, arguments: Arguments) -> Any:
        """Raises what its answer raises."""
        if question in _MAY_MISS and self.facts.is_suspect:
            raise EngineDeadError(_SILENT)
        return await self.asked.ask(self.transport.send, question, arguments)


class Fleet:
    """The engines behind ``transports``. For one event loop.

    Raises :class:`~vmserve.errors.ConfigurationError` if they differ.
    """

    def __init__(self, transports: Sequence[Transport], policy: Policy = "prefix") -> None:
        first = transports[0].facts
        # Settings are those of one member: a request runs in one.
        self.facts = replace(first, latest=self._stats, num_engines=0)
        self.facts.max_num_running = self.facts.num_running = 0
        self.callers = Callers()
        self._receive: Receive = lambda message: None
        self._router = Router(policy, block_tokens=first.resolved.block_tokens)
        self._members: dict[str, FleetEngine] = {}
        self._names = map(str, itertools.count())
        #: Requests by the client's handles, and handles of those that begin again elsewhere.
        self._placed: dict[int, _Placed] = {}
        self._new_handles = itertools.count(-1, -1)
        self._identities: Counter[str] = Counter()
        #: Number of members in each state, and the state of those that take requests.
        self._states: Counter[MemberState] = Counter()
        self._takers: MemberState = "suspect"
        self._starting: asyncio.Future[list[None]] | None = None
        self._is_closing = False
        #: Arguments of what pinned each prefix.
        self._pins: dict[int, Arguments] = {}
        self._choices: Counter[Reason] = Counter()
        self._num_failovers = 0
        self._expected_tokens = 0
        self._choice_seconds = 0.0
        #: Work besides requests: not begun, and going on.
        self._works: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Future[None]] = set()
        for transport in transports:
            self._add(FleetEngine(transport))

    # -- members ------------------------------------------------------------------------

    @property
    def members(self) -> list[FleetEngine]:
        return list(self._members.values())

    def _add(self, member: FleetEngine) -> None:
        facts = member.facts
        self.facts.check_same(facts)
        facts.tokenizer = self.facts.tokenizer  # several would only take memory
        member.name = next(self._names)
        self._members[member.name] = member
        member.transport.on(partial(self._hear, member))
        self._enter(member)
        self._count(member, facts.num_running)
        self.facts.max_num_running += facts.max_num_running
        self.facts.num_engines += 1
        self._renew(member)

    def _count(self, member: FleetEngine, num_running: int) -> None:
        self.facts.num_running += num_running - member.num_running
        member.num_running = num_running

    def _enter(self, member: FleetEngine) -> None:
        """Let the router know how much a member can have cached; it has nothing yet."""
        facts = member.facts
        stats = facts.latest()
        blocks = int(stats.get("limit_pages", 0) * stats.get("blocks_per_page", 0))
        self._router.join(member.name, blocks if facts.resolved.prefix_caching else 0)

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
            member.noted, member.identity = member.state, member.facts.identity
            self._states[member.noted] += 1
            self._identities[member.identity] += 1
        self._note_facts()
        takers: MemberState = "ready" if self._states["ready"] else "suspect"
        concerned = [member] if takers == self._takers else self.members
        self._takers = takers
        for each in concerned:
            each.is_chosen = each.noted == takers
            self._note(each)
        for each in concerned:
            if each.facts.is_suspect:
                each.asked.fail(EngineDeadError(_SILENT), _MAY_MISS)
                if takers == "ready":
                    self._leave_silent(each)
        match before, member.noted:
            case "ready", "suspect":
                logger.warning("engine %s: nothing was heard of it for long", member.name)
            case "suspect", "ready":
                logger.info("engine %s: it is heard of again", member.name)

    def _note_facts(self) -> None:
        """What concerns all members. It is made anew when one has changed, which is seldom."""
        facts, down = self.facts, self._states["down"]
        facts.identity = "+".join(sorted(self._identities))
        facts.is_dead = down == len(self._members)
        each = [member.facts for member in self.members] if down else []
        pauses = (one.retry_seconds for one in each if one.is_dead)
        facts.retry_seconds = min((one for one in pauses if one is not None), default=None)
        was_ended, facts.is_ended = facts.is_ended, bool(each) and all(o.is_ended for o in each)
        if facts.is_ended and not was_ended:
            self._receive(Ended())

    def _note(self, member: FleetEngine) -> None:
        if member.name in self._members:
            load = len(member.requests) if member.is_chosen else None
            self._router.note(member.name, load)

    async def join(self, transport: Transport) -> FleetEngine:
        """Serve with another engine too, once it holds what is pinned.

        Raises :class:`~vmserve.errors.ConfigurationError` for another model, and what pinning
        raises; then it is no member.
        """
        self.facts.check_same(transport.facts)
        member = FleetEngine(transport)
        transport.on(partial(self._hear, member))
        await transport.start()
        held: set[int] = set()
        while missing := self._pins.keys() - held:  # others come while one is computed
            handle = min(missing)
            held.add(handle)
            await member.ask("pin_prefix", self._pins[handle])
        for handle in held - self._pins.keys():
            transport.send(Unpin(handle))
        self._add(member)
        return member

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
        while member.requests and not member.facts.is_dead and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self._members.pop(name, None) is not None:
            self._router.leave(name)
            self._count(member, 0)
            self.facts.max_num_running -= member.facts.max_num_running
            self.facts.num_engines -= 1
            self._renew(member)
        await member.transport.close()
        return member

    # -- its life -----------------------------------------------------------------------

    async def start(self, *, again: bool = False) -> None:
        """Begin to listen to all engines; ``again``: all start, or none."""
        if again:
            await self._start_again()
            return
        while self._works:
            task = asyncio.ensure_future(self._works.pop()())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._starting is None:
            starts = (each.transport.start() for each in self.members)
            self._starting = asyncio.gather(*starts)
        if not self._starting.done():
            await asyncio.shield(self._starting)  # which goes on if this caller leaves

    async def _start_again(self) -> None:
        self._is_closing = False
        starts = (each.transport.start(again=True) for each in self.members)
        began = await asyncio.gather(*starts, return_exceptions=True)
        for error in began:
            if error is not None:
                await self.close()
                raise error

    async def close(self) -> None:
        self._is_closing = True
        self._works.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.transport.close() for each in self.members))

    # -- messages -----------------------------------------------------------------------

    def on(self, receive: Receive) -> None:
        self._receive = receive

    def send(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._place(message)
            case Abort():
                placed = self._placed.get(message.handle)
                if placed is not None:
                    self._abort(placed, tell=message.tell)
            case Ask():
                if message.question == "pin_prefix":
                    self._pins[message.arguments["pin"]] = message.arguments
                task = asyncio.ensure_future(self._ask_all(message.question, message.arguments))
                self._tasks.add(task)
                task.add_done_callback(partial(self._answer, message.serial))
            case Unpin():
                self._pins.pop(message.pin, None)
                for member in self.members:
                    with contextlib.suppress(EngineDeadError):  # a dead one holds nothing
                        member.transport.send(message)
            case _:
                raise TypeError(f"{type(message).__name__} is for a single engine")

    def _hear(self, member: FleetEngine, message: FromEngine | Happened) -> None:
        match message:
            case StepUpdate():
                self._pass_on(member, message)
            case Reply():
                member.asked.take(message)
            case Lost():
                self._lose(member)
            case Noted() | Ended() | Revived():
                if member.name in self._members:
                    self._renew(member)

    # -- requests -----------------------------------------------------------------------

    def _choose(self, add: Add) -> FleetEngine:
        """Raises :class:`~vmserve.errors.EngineDeadError` if no member takes requests."""
        began = time.perf_counter()
        if not self._states[self._takers]:
            raise EngineDeadError("no engine takes requests now")
        terms = add.terms
        choice = self._router.choose(add.prompt_token_ids, (terms.isolation, terms.cache_salt))
        self._choices[choice.reason] += 1
        self._expected_tokens += choice.cached_tokens
        self._choice_seconds += time.perf_counter() - began
        return self._members[choice.member]

    def _place(self, add: Add) -> None:
        """Send a new request to a member."""
        timeout = add.terms.timeout
        ends_at = None if timeout is None else time.monotonic() + timeout
        member = self._choose(add)
        placed = _Placed(add, member, add.handle, ends_at)
        self._placed[add.handle] = placed
        try:
            self._send(placed, add)
        except EngineDeadError as error:
            self._place_again(placed, error)

    def _send(self, placed: _Placed, add: Add) -> None:
        placed.member.transport.send(add)
        placed.member.requests[placed.handle] = placed
        self._note(placed.member)

    def _place_again(self, placed: _Placed, error: EngineDeadError | None) -> None:
        """Send a request to another member, unless its engine's death was one too many.

        ``error``: of its engine, which has died; None: it is silent.
        """
        while True:
            placed.num_deaths += error is not None
            placed.num_moves += error is None
            is_over = placed.has_begun or placed.is_aborted or self._is_closing
            is_lost = is_over or placed.num_deaths == _MOST_DEATHS
            if is_lost or not self._states[self._takers]:
                del self._placed[placed.add.handle]
                dead = error or EngineDeadError(_SILENT)
                self._receive(StepUpdate(0, 0, [], [], [(placed.add.handle, dead)]))
                return
            self._num_failovers += 1
            if placed.has_passed:
                placed.has_passed = False
                self._receive(StartOver(placed.add.handle))
            add = placed.again(self._choose(placed.add), next(self._new_handles))
            try:
                self._send(placed, add)
            except EngineDeadError as death:
                error = death
            else:
                return

    def _forget(self, placed: _Placed) -> None:
        """It has ended."""
        self._placed.pop(placed.add.handle, None)
        self._take_from(placed)

    def _take_from(self, placed: _Placed) -> None:
        member = placed.member
        if member.requests.pop(placed.handle, None) is not None:
            self._note(member)

    def _abort(self, placed: _Placed, *, tell: bool) -> None:
        """End a request at its member, whose last update is passed on if ``tell``."""
        placed.is_aborted = True
        if not tell:
            self._forget(placed)
        placed.member.transport.send(Abort(placed.handle, tell))

    def _leave_silent(self, member: FleetEngine) -> None:
        """Take from a suspected member what has not begun and may move."""
        for placed in [each for each in member.requests.values() if not each.has_begun]:
            if placed.may_move:
                self._take_from(placed)
                with contextlib.suppress(EngineDeadError):
                    member.transport.send(Abort(placed.handle, tell=False))
                self._place_again(placed, None)

    def _lose(self, member: FleetEngine) -> None:
        """A member's engine has ended."""
        dead = EngineDeadError("the engine has stopped")
        member.asked.fail(dead)
        self._count(member, 0)
        requests = list(member.requests.values())
        member.requests.clear()
        if member.name in self._members:
            self._router.forget(member.name)
            self._renew(member)
        for placed in requests:
            self._place_again(placed, dead)

    def _pass_on(self, member: FleetEngine, news: StepUpdate) -> None:
        """Give the client what a step brought, under its own handles."""
        if member.name in self._members:
            self._count(member, news.num_running)
        requests = member.requests
        accepted, updates, failures = [], [], []
        for handle in news.accepted:
            placed = requests.get(handle)
            if placed is not None and not placed.is_accepted:
                placed.is_accepted = True
                accepted.append(placed.add.handle)
        for each in news.updates:
            handle, update = each
            placed = requests.get(handle)
            if placed is None:
                continue  # it is another member's now
            if not placed.has_begun:
                placed.has_passed = True
                placed.has_begun = placed.add.is_stream and bool(update.outputs)
            if update.finished:
                self._forget(placed)
            updates.append(each if handle == placed.add.handle else (placed.add.handle, update))
        for handle, error in news.failures:
            placed = requests.get(handle)
            if placed is not None:
                self._forget(placed)
                failures.append((placed.add.handle, error))
        if accepted or updates or failures:
            counts = (self.facts.num_running, news.num_waiting)
            self._receive(StepUpdate(*counts, accepted, updates, failures))

    # -- questions ----------------------------------------------------------------------

    def _answer(self, serial: int, task: asyncio.Future[Any]) -> None:
        """Reply with the outcome, also of a task that was cancelled before it began."""
        self._tasks.discard(task)
        try:
            reply = Reply(serial, task.result())
        except asyncio.CancelledError:  # all engines end
            reply = Reply(serial, None, EngineDeadError("the engines have stopped"))
        except Exception as error:  # noqa: BLE001  whoever asked gets it
            reply = Reply(serial, None, error)
        self._receive(reply)

    async def _ask_all(self, question: str, arguments: Arguments) -> Any:
        """Ask all members; one that is down or dies meanwhile has no answer.

        Raises :class:`~vmserve.errors.EngineDeadError` if there are none.
        """
        members, asked = self.members, QUESTIONS[question]
        if asked.needs_all and any(member.facts.is_dead for member in members):
            raise EngineDeadError("an engine is down: nothing was changed")
        part = asked.split(arguments, len(members))
        if question == "reset_prefix_cache":
            for member in members:
                self._router.forget(member.name)
        works: list[asyncio.Future[Any]] = []
        for first in range(0, len(members), _ASKED_AT_ONCE):  # others come in between
            some = [
                asyncio.ensure_future(self._ask(member, question, part))
                for member in members[first : first + _ASKED_AT_ONCE]
            ]
            works += some
            try:
                await asyncio.wait(some, timeout=_TURN_SECONDS)
            except asyncio.CancelledError:  # all engines end
                for each in works:
                    each.cancel()
                await asyncio.gather(*works, return_exceptions=True)
                raise
        answers = await asyncio.gather(*works, return_exceptions=True)
        for answer in answers:
            is_missing = isinstance(answer, EngineDeadError) and not asked.needs_all
            if isinstance(answer, BaseException) and not is_missing:
                raise answer
        given = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not given:
            raise EngineDeadError("the engines have stopped")
        if question == "set_kv_cache_memory":
            for member in self.members:  # some may have left
                self._enter(member)
                self._note(member)
        return asked.merge(given)

    async def _ask(self, member: FleetEngine, question: str, arguments: Arguments) -> Any:
        if question == "pin_prefix" and arguments["pin"] not in self._pins:
            raise EngineDeadError("the prefix was unpinned before it was pinned")
        return await member.ask(question, arguments)

    def _stats(self) -> dict[str, float | int]:
        """The figures of all engines together, and the router's."""
        return {**merged_stats([each.facts.latest() for each in self.members]), **self.own_stats()}

    def own_stats(self) -> dict[str, float | int]:
        """The router's figures."""
        return {
            "router_choices_total": self._choices.total(),
            "router_spills_total": self._choices["spill"],
            "router_failovers_total": self._num_failovers,
            "router_expected_hit_tokens_total": self._expected_tokens,
            "router_choice_seconds_total": self._choice_seconds,
        }
