"""Several engines behind one client: choices, deaths, draining, pins, what differs."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.clients import FleetClient
from tests.support import loops
from vmserve import ConfigurationError, EngineDeadError, SamplingParams
from vmserve.client.figures import merged_snapshot
from vmserve.client.messages import Ask, ToEngine
from vmserve.errors import InvalidRequestError
from vmserve.telemetry.snapshot import EngineSnapshot, PoolMap
from vmserve.testing import ScriptedTransport
from vmserve.text.prompts import Prompt
from vmserve.types import RequestOutput, RequestTerms

HELLO = SamplingParams(max_tokens=20)


class Engine(ScriptedTransport):
    """``facts``: those in which it differs. ``is_mute``: it answers no questions until then."""

    def __init__(self, text: str = "hello", **facts: Any) -> None:
        super().__init__(text)
        self.facts = replace(self.facts, **facts)
        self.is_mute = False
        self.unanswered: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        if self.is_mute and isinstance(message, Ask):
            self.unanswered.append(message)
        else:
            super().send(message)

    def speak(self) -> None:
        self.is_mute = False
        for message in self.unanswered:
            self.send(message)

    def revive(self) -> None:
        self.fail, self.pause = None, None
        super().revive()


def held(engine: Engine, after: int = 0) -> asyncio.Event:
    """Let an engine say no more after so many tokens, until the event is set."""
    engine.pause, engine.pause_after = asyncio.Event(), after
    return engine.pause


def fleet_of(*engines: Engine, **options: Any) -> FleetClient:
    return FleetClient(engines, **options)


class Pair(FleetClient):
    """Of two engines. The first of several requests goes to ``one``."""

    def __init__(self) -> None:
        self.one, self.other = Engine(), Engine()
        super().__init__([self.one, self.other])


@pytest.fixture
def fleet() -> Pair:
    return Pair()


def ask(
    fleet: FleetClient,
    prompt: list[int] | None = None,
    *,
    stream: bool = False,
    name: str = "r",
    **terms: Any,
) -> AsyncIterator[RequestOutput]:
    return fleet.serve(
        Prompt(None, prompt or [5] * 9),
        HELLO,
        request_id=name,
        terms=RequestTerms(stream=stream, **terms),
    )


async def text_of(outputs: AsyncIterator[RequestOutput], accepted: list[bool] | None = None) -> str:
    """``accepted``: of each output whether it says only that the request is accepted."""
    text = ""
    async for output in outputs:
        text += "".join(choice.text for choice in output.outputs)
        if accepted is not None:
            accepted.append(not output.outputs)
    return text


async def until(holds: Callable[[], bool]) -> None:
    """Looked for in each turn."""
    await loops.until(holds, pause=0)


async def begun(fleet: Pair, accepted: list[bool] | None = None, **how: Any) -> asyncio.Task[str]:
    """A request that runs at the first engine, which is held."""
    task = asyncio.create_task(text_of(ask(fleet, **how), accepted))
    await until(lambda: bool(fleet.one.running))
    return task


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def expected_hits(fleet: FleetClient) -> float:
    return fleet.stats()["router_expected_hit_tokens_total"]


async def test_its_identity_is_that_of_all_engines_that_may_answer() -> None:
    engines = [Engine(), Engine()]
    assert fleet_of(*engines).identity == engines[0].facts.identity
    engines[1].facts.identity = "another processor"
    mixed = fleet_of(*reversed(engines)).identity
    fleet = fleet_of(*engines)
    assert fleet.identity == mixed
    assert mixed not in {engine.facts.identity for engine in engines}

    def start_elsewhere(identity: str) -> None:
        engines[0].lose()
        engines[0].facts.identity = identity
        engines[0].revive()

    start_elsewhere("another processor")
    assert fleet.identity == "another processor"
    start_elsewhere("a third")
    await fleet.transport.leave("1", 0)
    assert fleet.identity == "a third"


async def test_a_conversation_stays_with_its_engine_and_others_spread(fleet: Pair) -> None:
    first, second = [5] * 40, [6] * 40
    for turn in range(4):
        assert await text_of(ask(fleet, first + [7] * turn)) == "hello"
        assert await text_of(ask(fleet, second + [7] * turn)) == "hello"
    assert [len(fleet.one.requests), len(fleet.other.requests)] == [4, 4]
    assert {prompt[0] for prompt, _, _ in fleet.one.requests} == {5}
    assert expected_hits(fleet) == 3 * 2 * 40
    assert fleet.stats()["page_bytes"] == 512
    assert fleet.stats()["prompt_tokens_total"] == 14


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("happens", [Engine.lose, Engine.suspect])
async def test_a_request_without_a_token_outlives_its_engine(
    happens: Callable[[Engine], None], stream: bool, fleet: Pair
) -> None:
    """It is answered once, also if a suspected engine goes on."""
    speak = held(fleet.one)
    accepted: list[bool] = []
    reading = await begun(fleet, accepted, stream=stream)
    happens(fleet.one)
    assert await reading == "hello"
    speak.set()
    await turns(1)
    assert sum(accepted) == int(stream)
    assert (fleet.one.aborted, fleet.other.finished) == (["r"], ["r"])
    assert fleet.stats()["router_failovers_total"] == 1
    assert fleet.num_running == 0
    assert [len(member.requests) for member in fleet.members] == [0, 0]


async def test_a_stream_with_tokens_ends_with_an_error(fleet: Pair) -> None:
    held(fleet.one, 2)
    stream = ask(fleet, stream=True)
    while not (await anext(stream)).outputs:
        pass
    fleet.one.lose()
    with pytest.raises(EngineDeadError):
        await text_of(stream)
    assert fleet.other.requests == []


async def test_a_request_that_kills_engines_does_not_kill_all() -> None:
    engines = [Engine() for _ in range(5)]
    fleet = fleet_of(*engines)
    for engine in engines:
        # It dies of its first request.
        engine.reply = lambda prompt, index, engine=engine: engine.lose() or [1]  # type: ignore
    with pytest.raises(EngineDeadError):
        await text_of(ask(fleet))
    assert sum(engine.facts.is_dead for engine in engines) == 3


async def test_a_request_that_an_engine_refuses_goes_to_no_other(fleet: Pair) -> None:
    fleet.one.fail = InvalidRequestError("it is too long")
    with pytest.raises(InvalidRequestError, match="too long"):
        await text_of(ask(fleet))
    assert fleet.other.requests == []
    assert not any(member.requests for member in fleet.members)


async def test_without_a_live_engine_a_request_fails_and_with_one_it_is_served(fleet: Pair) -> None:
    fleet.one.lose()
    assert not fleet.errored
    assert await text_of(ask(fleet)) == "hello"
    fleet.other.lose()
    assert fleet.errored
    with pytest.raises(EngineDeadError, match="no engine"):
        await text_of(ask(fleet))
    fleet.one.revive()
    assert await text_of(ask(fleet)) == "hello"


@pytest.mark.parametrize("why", ["death", "reset"])
async def test_an_engine_that_lost_its_cache_is_expected_to_have_nothing(
    why: str, fleet: Pair
) -> None:
    await text_of(ask(fleet, [5] * 40))
    if why == "reset":
        await fleet.reset_prefix_cache()
        assert [fleet.one.num_resets, fleet.other.num_resets] == [1, 1]
    else:
        fleet.one.lose()
        fleet.one.revive()
    before = expected_hits(fleet)
    await text_of(ask(fleet, [5] * 40))
    assert expected_hits(fleet) == before


async def test_an_engine_that_drains_finishes_what_it_has_and_gets_no_more(fleet: Pair) -> None:
    speak = held(fleet.one)
    running = await begun(fleet)
    leaving = asyncio.create_task(fleet.transport.leave("0", 30))
    await asyncio.sleep(0)
    assert [member.state for member in fleet.members] == ["draining", "ready"]
    for _ in range(3):
        await text_of(ask(fleet))
    with pytest.raises(ConfigurationError, match="no other engine"):
        fleet.transport.drain("1")
    speak.set()
    assert await running == "hello"
    await leaving
    assert fleet.one.stopped
    assert len(fleet.one.requests) == 1
    assert [member.name for member in fleet.members] == ["1"]


@pytest.mark.parametrize("happens", [Engine.lose, Engine.suspect])
async def test_a_request_that_was_aborted_begins_nowhere_else(
    happens: Callable[[Engine], None], fleet: Pair
) -> None:
    speak = held(fleet.one)
    reading = await begun(fleet, name="x")
    await fleet.abort("x")
    happens(fleet.one)  # before it has said so
    await turns(9)
    speak.set()
    await asyncio.gather(reading, return_exceptions=True)
    assert fleet.other.requests == []


async def test_an_engine_that_leaves_while_memory_is_set_is_forgotten(fleet: Pair) -> None:
    slow = fleet.other
    slow.is_mute = True
    setting = asyncio.create_task(fleet.set_kv_cache_memory("8KiB"))
    await until(lambda: bool(slow.unanswered))
    await fleet.transport.leave("0", 0)
    slow.speak()
    assert await setting == 2 * 4096
    assert set(fleet.transport._router.members) == {"1"}


async def test_pins_are_kept_by_all_also_by_those_that_were_down_or_join(fleet: Pair) -> None:
    one, other, late = fleet.one, fleet.other, Engine()
    one.lose()
    pin = await fleet.pin_prefix([5] * 12, cache_salt="s")
    assert pin.num_tokens == 12
    await fleet.transport.join(late)
    assert [list(each.pins) for each in (one, other, late)] == [[0]] * 3
    await fleet.unpin_prefix(pin.handle)
    assert [list(each.pins) for each in (one, other, late)] == [[]] * 3
    late.refuses_pins = InvalidRequestError("too many prefixes are pinned")
    with pytest.raises(InvalidRequestError):
        await fleet.pin_prefix([6] * 12)
    assert [list(each.pins) for each in (other, late)] == [[]] * 2


async def test_pins_that_come_and_go_while_an_engine_joins_are_those_that_it_has() -> None:
    one, late = Engine(), Engine()
    fleet = fleet_of(one)
    gone = await fleet.pin_prefix([5] * 12)
    late.is_mute = True
    joining = asyncio.create_task(fleet.transport.join(late))
    await until(lambda: bool(late.unanswered))
    await fleet.unpin_prefix(gone.handle)
    kept = await fleet.pin_prefix([6] * 12)
    late.speak()
    await joining
    assert [list(each.pins) for each in (one, late)] == [[kept.handle]] * 2


async def test_memory_is_changed_in_all_engines_or_in_none(fleet: Pair) -> None:
    assert await fleet.set_kv_cache_memory("4MiB") == 2 * 4096
    assert [fleet.one.kv_cache_memory, fleet.other.kv_cache_memory] == [2 << 20] * 2
    fleet.other.lose()
    with pytest.raises(EngineDeadError, match="nothing was changed"):
        await fleet.set_kv_cache_memory("8MiB")
    assert fleet.one.kv_cache_memory == 2 << 20


async def test_all_engines_wake_or_none(fleet: Pair) -> None:
    await fleet.start()
    await fleet.sleep()
    assert fleet.one.stopped
    assert fleet.other.stopped
    fleet.other.fail_to_wake = ConfigurationError("its files have gone")
    with pytest.raises(ConfigurationError, match="its files have gone"):
        await fleet.wake()
    assert fleet.one.stopped
    with pytest.raises(EngineDeadError):
        await text_of(ask(fleet))
    fleet.other.fail_to_wake = None
    await fleet.wake()
    assert await text_of(ask(fleet)) == "hello"


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_pin_whose_caller_leaves_at_once_is_nowhere(num_turns: int) -> None:
    engines = [Engine() for _ in range(40)]
    pinning = asyncio.create_task(fleet_of(*engines).pin_prefix([5] * 12))
    await turns(num_turns)
    pinning.cancel()
    await asyncio.gather(pinning, return_exceptions=True)
    await turns(20)
    assert not pinning.cancelled() or not any(engine.pins for engine in engines)


async def test_what_differs_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="another limits than the others: 128"):
        fleet_of(Engine(), Engine(limits=128))
    fleet = fleet_of(Engine())
    with pytest.raises(ConfigurationError, match="another model"):
        await fleet.transport.join(Engine(model="n"))
    assert len(fleet.members) == 1


async def test_it_is_dead_when_all_that_are_there_are(fleet: Pair) -> None:
    late = Engine()
    dying = asyncio.create_task(fleet.until_dead())
    await turns(1)
    fleet.one.died.set_result(None)
    await fleet.transport.join(late)
    fleet.other.died.set_result(None)
    await turns(20)
    assert not dying.done()
    late.died.set_result(None)
    await dying


async def test_slots_of_the_second_engine_count_those_of_the_first(fleet: Pair) -> None:
    speak = held(fleet.one)
    running = await begun(fleet)
    await fleet.transport.leave("1", 0)
    full = await fleet.snapshot()
    empty = EngineSnapshot(fleet.one.stats(), replace(full.pool, slots=[(0, 0)] * 3), [], 0)
    merged = merged_snapshot([empty, full])
    assert merged.requests[0].slots == [3]
    assert isinstance(merged.pool, PoolMap)
    assert merged.pool.num_pages == len(merged.pool.cells) == 8
    assert len(merged.pool.slots) == 4
    speak.set()
    await running


async def test_no_request_is_lost_under_ten_thousand_deaths() -> None:
    """Each request is answered in full, or fails for a reason that is allowed.

    Engines are suspected too, and say each step's tokens also of answers that are not streamed.
    """
    chance = random.Random(7)
    engines = [Engine(is_apart=True) for _ in range(4)]
    fleet = fleet_of(*engines)
    deaths, ends = 0, {"answered": 0, "failed": 0}

    async def client(number: int) -> None:
        while deaths < 10_000:
            is_stream, text = number % 2 == 0, ""
            outputs = ask(fleet, [5 + number] * 9, stream=is_stream, name=str(number))
            try:
                async for output in outputs:
                    text += "".join(choice.text for choice in output.outputs)
            except EngineDeadError:
                ends["failed"] += 1
                assert "hello".startswith(text)
            else:
                ends["answered"] += 1
                assert text == "hello"

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    while deaths < 10_000:
        live = [engine for engine in engines if not engine.facts.is_dead]
        if len(live) > 1:
            chance.choice(live).lose()
            deaths += 1
        await turns(chance.randrange(4))
        for engine in engines:
            if engine.facts.is_dead and chance.random() < 0.7:
                engine.revive()
            elif chance.random() < 0.2:
                engine.suspect(not engine.facts.is_suspect)
    for engine in engines:
        engine.revive()
        engine.suspect(False)
    await asyncio.gather(*clients)
    assert min(ends.values()) > 100
    assert all(not member.requests for member in fleet.members)
    assert all(not engine.running for engine in engines)


async def test_a_deadline_and_what_belongs_to_a_request_survive_the_death_of_an_engine(
    fleet: Pair,
) -> None:
    """The time that is left is passed on, and salt, tenant and isolation as they were."""
    held(fleet.one)
    kept = {"cache_salt": "salt", "tenant": "tenant", "isolation": "group"}
    reading = await begun(fleet, timeout=30.0, priority=3, **kept)
    await asyncio.sleep(0.05)
    fleet.one.lose()
    assert await reading == "hello"
    [(_, params, before)], [(_, same_params, after)] = fleet.one.requests, fleet.other.requests
    assert params == same_params
    assert before.pop("timeout") == 30.0
    assert 0 < after.pop("timeout") <= 30.0 - 0.05
    assert before == after
    assert before.items() >= kept.items()


async def test_requests_of_other_keys_or_salts_are_expected_to_have_nothing(fleet: Pair) -> None:
    for terms in ({}, {"cache_salt": "a"}, {"isolation": "k"}, {"isolation": "l"}):
        for expected in (0, 40):
            before = expected_hits(fleet)
            await text_of(ask(fleet, [5] * 40, **terms))
            assert expected_hits(fleet) - before == expected


# -- engines that are not heard of -------------------------------------------------------------


async def test_an_engine_that_is_suspected_gets_nothing_new_until_it_is_heard_of(
    fleet: Pair,
) -> None:
    fleet.one.suspect()
    assert [member.state for member in fleet.members] == ["suspect", "ready"]
    for _ in range(4):
        assert await text_of(ask(fleet)) == "hello"
    assert (len(fleet.one.requests), len(fleet.other.requests)) == (0, 4)
    fleet.one.suspect(False)
    for number in range(4):
        assert await text_of(ask(fleet, [6 + number] * 9)) == "hello"
    assert len(fleet.one.requests) >= 2


async def test_a_stream_that_has_begun_stays_with_its_engine(fleet: Pair) -> None:
    speak = held(fleet.one, 2)
    stream = ask(fleet, stream=True)
    while not (output := await anext(stream)).outputs:
        pass
    fleet.one.suspect()
    reading = asyncio.create_task(text_of(stream))
    await until(lambda: fleet.one.facts.num_running == 1)
    fleet.one.suspect(False)
    speak.set()
    assert output.outputs[0].text + await reading == "hello"
    assert fleet.other.requests == []


async def test_when_all_are_suspected_requests_still_go_somewhere(fleet: Pair) -> None:
    """They stay there, until another is heard of."""
    held(fleet.one)
    fleet.other.suspect()
    fleet.one.suspect()
    reading = await begun(fleet)
    assert not reading.done()
    fleet.other.suspect(False)
    assert await reading == "hello"
    assert (fleet.one.aborted, fleet.other.finished) == (["r"], ["r"])
    fleet.one.lose()
    fleet.other.suspect()
    assert await text_of(ask(fleet)) == "hello"


@pytest.mark.parametrize(("stream", "moves"), [(False, 1), (True, 3)])
async def test_a_request_whose_own_step_is_long_is_not_moved_for_ever(
    stream: bool, moves: int, fleet: Pair
) -> None:
    """What is not streamed may be nearly done when its engine is suspected."""
    engines = [fleet.one, fleet.other]
    speak = [held(engine) for engine in engines]

    def has_it(engine: Engine) -> bool:
        member = fleet.members[engines.index(engine)]
        return bool(member.requests) and bool(engine.running)

    reading = asyncio.create_task(text_of(ask(fleet, stream=stream)))
    for turn in range(moves):
        await until(lambda: any(map(has_it, engines)))
        at = next(filter(has_it, engines))
        at.suspect()
        await until(lambda turn=turn: fleet.stats()["router_failovers_total"] == turn + 1)
        at.suspect(False)
    await until(lambda: any(map(has_it, engines)))
    next(filter(has_it, engines)).suspect()
    for event in speak:
        event.set()
    assert await reading == "hello"
    assert fleet.stats()["router_failovers_total"] == moves


async def test_who_leaves_a_request_at_a_suspected_engine_has_left(fleet: Pair) -> None:
    held(fleet.one)
    reading = await begun(fleet)
    reading.cancel()
    fleet.one.suspect()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (fleet.one.aborted, fleet.other.requests) == (["r"], [])
    assert not any(member.requests for member in fleet.members)


async def test_a_picture_is_taken_of_those_that_are_heard_of(fleet: Pair) -> None:
    fleet.one.is_mute = True
    taking = asyncio.create_task(fleet.snapshot())
    await until(lambda: bool(fleet.members[0].asked))
    assert not taking.done()
    fleet.one.suspect()
    assert (await taking).pool.num_pages == 4
    assert (await fleet.snapshot()).pool.num_pages == 4


# -- what a request costs ------------------------------------------------------------------------


async def test_running_requests_are_counted_where_they_change() -> None:
    """Also those of engines that die, leave and join."""
    engines = [Engine() for _ in range(3)]
    events = [held(engine) for engine in engines]
    fleet = fleet_of(*engines)
    tasks = [
        asyncio.create_task(text_of(ask(fleet, [5 + number] * 9, name=str(number))))
        for number in range(6)
    ]
    await until(lambda: fleet.num_running == 6)
    assert fleet.max_num_running == 3 * 128
    leaving = asyncio.create_task(fleet.transport.leave("0", 60))
    await fleet.transport.join(Engine())
    events[0].set()
    await leaving
    await until(lambda: fleet.num_running == 4)
    engines[1].lose()
    await until(lambda: fleet.num_running == 2)
    for event in events:
        event.set()
    await asyncio.gather(*tasks)
    assert fleet.num_running == sum(each.facts.num_running for each in fleet.members) == 0
    assert fleet.max_num_running == 3 * 128


@pytest.mark.parametrize("num_turns", range(1, 7))
async def test_whoever_waits_for_an_answer_when_all_engines_end_is_told(
    num_turns: int, fleet: Pair
) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))
    await fleet.start()
    fleet.one.lose()
    fleet.other.is_mute = True
    asking = [
        asyncio.create_task(each)
        for each in (fleet.snapshot(), fleet.pin_prefix([5] * 12), fleet.reset_prefix_cache())
    ]
    await turns(num_turns)
    await fleet.shutdown()
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert {type(answer) for answer in answers} == {EngineDeadError}
    await asyncio.sleep(0)
    del asking, answers
    gc.collect()
    assert unheard == []
