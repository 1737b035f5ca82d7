"""Several engines behind one client: choices, deaths, draining, pins, what differs."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.clients import FleetClient
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


def fleet_of(*engines: Engine, **options: Any) -> FleetClient:
    return FleetClient(engines, **options)


def ask(
    fleet: FleetClient, prompt: list[int] | None = None, *, stream: bool = False, name: str = "r"
) -> AsyncIterator[RequestOutput]:
    terms = RequestTerms(stream=stream)
    return fleet.serve(Prompt(None, prompt or [5] * 9), HELLO, request_id=name, terms=terms)


async def all_of(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def text_of(outputs: AsyncIterator[RequestOutput]) -> str:
    return "".join([choice.text async for output in outputs for choice in output.outputs])


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_its_identity_is_that_of_all_engines_that_may_answer() -> None:
    engines = [Engine(), Engine()]
    assert fleet_of(*engines).identity == engines[0].facts.identity
    engines[1].facts.identity = "another processor"
    mixed = fleet_of(*engines).identity
    assert mixed == fleet_of(*reversed(engines)).identity
    assert mixed not in {engine.facts.identity for engine in engines}

    async def test() -> None:
        fleet = fleet_of(*engines)
        engines[0].lose()
        engines[0].facts.identity = "another processor"  # it was started again elsewhere
        engines[0].revive()
        assert fleet.identity == "another processor"
        engines[0].lose()
        engines[0].facts.identity = "a third"
        engines[0].revive()
        await fleet.transport.leave("1", 0)
        assert fleet.identity == "a third"

    run(test)


def test_a_conversation_stays_with_its_engine_and_others_spread() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        first, second = [5] * 40, [6] * 40
        for turn in range(4):
            assert await text_of(ask(fleet, first + [7] * turn)) == "hello"
            assert await text_of(ask(fleet, second + [7] * turn)) == "hello"
        assert [len(one.requests), len(other.requests)] == [4, 4]
        assert {prompt[0] for prompt, _, _ in one.requests} == {5}
        assert fleet.stats()["router_expected_hit_tokens_total"] == 3 * 2 * 40
        assert fleet.stats()["page_bytes"] == 512
        assert fleet.stats()["prompt_tokens_total"] == 14

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_outlives_its_engine(stream: bool) -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        one.pause, one.pause_after = asyncio.Event(), 0
        fleet = fleet_of(one, other)
        reading = asyncio.create_task(all_of(ask(fleet, stream=stream)))
        await until(lambda: bool(one.running))
        one.lose()
        outputs = await reading
        assert "".join(choice.text for each in outputs for choice in each.outputs) == "hello"
        assert sum(not each.outputs for each in outputs) == int(stream)  # accepted once
        assert fleet.stats()["router_failovers_total"] == 1
        assert [len(member.requests) for member in fleet.members] == [0, 0]

    run(test)


def test_a_stream_with_tokens_ends_with_an_error() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        one.pause, one.pause_after = asyncio.Event(), 2
        fleet = fleet_of(one, other)
        stream = ask(fleet, stream=True)
        while not (await anext(stream)).outputs:
            pass
        one.lose()
        with pytest.raises(EngineDeadError):
            await text_of(stream)
        assert other.requests == []

    run(test)


def test_a_request_that_kills_engines_does_not_kill_all() -> None:
    async def test() -> None:
        engines = [Engine() for _ in range(5)]
        fleet = fleet_of(*engines)
        for engine in engines:
            # It dies of its first request.
            engine.reply = lambda prompt, index, engine=engine: engine.lose() or [1]  # type: ignore
        with pytest.raises(EngineDeadError):
            await text_of(ask(fleet))
        assert sum(engine.facts.is_dead for engine in engines) == 3

    run(test)


def test_without_a_live_engine_a_request_fails_and_with_one_it_is_served() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        one.lose()
        assert not fleet.errored
        assert await text_of(ask(fleet)) == "hello"
        other.lose()
        assert fleet.errored
        with pytest.raises(EngineDeadError, match="no engine"):
            await text_of(ask(fleet))
        one.revive()
        assert await text_of(ask(fleet)) == "hello"

    run(test)


@pytest.mark.parametrize("why", ["death", "reset"])
def test_an_engine_that_lost_its_cache_is_not_expected_to_have_anything(why: str) -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        await text_of(ask(fleet, [5] * 40))
        if why == "reset":
            await fleet.reset_prefix_cache()
            assert [one.num_resets, other.num_resets] == [1, 1]
        else:
            one.lose()
            one.revive()
        before = fleet.stats()["router_expected_hit_tokens_total"]
        await text_of(ask(fleet, [5] * 40))
        assert fleet.stats()["router_expected_hit_tokens_total"] == before

    run(test)


def test_an_engine_that_drains_finishes_what_it_has_and_gets_no_more() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        one.pause = asyncio.Event()
        fleet = fleet_of(one, other)
        running = asyncio.create_task(text_of(ask(fleet)))
        await until(lambda: bool(one.running))
        leaving = asyncio.create_task(fleet.transport.leave("0", 30))
        await asyncio.sleep(0)
        assert [member.state for member in fleet.members] == ["draining", "ready"]
        for _ in range(3):
            await text_of(ask(fleet))
        with pytest.raises(ConfigurationError, match="no other engine"):
            fleet.transport.drain("1")
        one.pause.set()
        assert await running == "hello"
        await leaving
        assert one.stopped
        assert len(one.requests) == 1
        assert [member.name for member in fleet.members] == ["1"]

    run(test)


@pytest.mark.parametrize("happens", [Engine.lose, Engine.suspect])
def test_a_request_that_was_aborted_begins_nowhere_else(happens: Callable[[Engine], None]) -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        one.pause, one.pause_after = asyncio.Event(), 0
        fleet = fleet_of(one, other)
        reading = asyncio.create_task(text_of(ask(fleet, name="x")))
        await until(lambda: bool(one.running))
        await fleet.abort("x")
        happens(one)  # before it has said so
        for _ in range(9):
            await asyncio.sleep(0)
        one.pause.set()
        await asyncio.gather(reading, return_exceptions=True)
        assert other.requests == []

    run(test)


def test_an_engine_that_leaves_while_memory_is_set_is_forgotten() -> None:
    async def test() -> None:
        leaving, slow = Engine(), Engine()
        fleet = fleet_of(leaving, slow)
        slow.is_mute = True
        setting = asyncio.create_task(fleet.set_kv_cache_memory("8KiB"))
        await until(lambda: bool(slow.unanswered))
        await fleet.transport.leave("0", 0)
        slow.speak()
        assert await setting == 2 * 4096
        assert set(fleet.transport._router.members) == {"1"}

    run(test)


def test_pins_are_kept_by_all_also_by_those_that_were_down_or_join() -> None:
    async def test() -> None:
        one, other, late = Engine(), Engine(), Engine()
        fleet = fleet_of(one, other)
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

    run(test)


def test_pins_that_come_and_go_while_an_engine_joins_are_those_that_it_has() -> None:
    async def test() -> None:
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

    run(test)


def test_memory_is_changed_in_all_engines_or_in_none() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        assert await fleet.set_kv_cache_memory("4MiB") == 2 * 4096
        assert [one.kv_cache_memory, other.kv_cache_memory] == [2 << 20] * 2
        other.lose()
        with pytest.raises(EngineDeadError, match="nothing was changed"):
            await fleet.set_kv_cache_memory("8MiB")
        assert one.kv_cache_memory == 2 << 20

    run(test)


def test_all_engines_wake_or_none() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        await fleet.start()
        await fleet.sleep()
        assert one.stopped
        assert other.stopped
        other.fail_to_wake = ConfigurationError("its files have gone")
        with pytest.raises(ConfigurationError, match="its files have gone"):
            await fleet.wake()
        assert one.stopped
        with pytest.raises(EngineDeadError):
            await text_of(ask(fleet))
        other.fail_to_wake = None
        await fleet.wake()
        assert await text_of(ask(fleet)) == "hello"

    run(test)


def test_a_pin_whose_caller_leaves_at_once_is_nowhere() -> None:
    async def test(num_turns: int) -> None:
        engines = [Engine() for _ in range(40)]
        fleet = fleet_of(*engines)
        pinning = asyncio.create_task(fleet.pin_prefix([5] * 12))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        pinning.cancel()
        await asyncio.gather(pinning, return_exceptions=True)
        for _ in range(20):
            await asyncio.sleep(0)
        if pinning.cancelled():
            assert not any(engine.pins for engine in engines)

    for num_turns in range(8):
        run(partial(test, num_turns))


def test_what_differs_is_refused_by_name() -> None:
    async def test() -> None:
        with pytest.raises(ConfigurationError, match="another limits than the others: 128"):
            fleet_of(Engine(), Engine(limits=128))
        fleet = fleet_of(Engine())
        with pytest.raises(ConfigurationError, match="another model"):
            await fleet.transport.join(Engine(model="n"))
        assert len(fleet.members) == 1

    run(test)


def test_it_is_dead_when_all_that_are_there_are() -> None:
    async def test() -> None:
        one, other, late = Engine(), Engine(), Engine()
        fleet = fleet_of(one, other)
        dying = asyncio.create_task(fleet.until_dead())
        await asyncio.sleep(0)
        one.died.set_result(None)
        await fleet.transport.join(late)
        other.died.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not dying.done()
        late.died.set_result(None)
        await dying

    run(test)


def test_slots_of_the_second_engine_count_those_of_the_first() -> None:
    async def test() -> None:
        engine = Engine()
        engine.pause = asyncio.Event()
        fleet = fleet_of(engine)
        running = asyncio.create_task(text_of(ask(fleet)))
        await until(lambda: bool(engine.running))
        full = await fleet.snapshot()
        empty = EngineSnapshot(engine.stats(), replace(full.pool, slots=[(0, 0)] * 3), [], 0)
        merged = merged_snapshot([empty, full])
        assert merged.requests[0].slots == [3]
        assert isinstance(merged.pool, PoolMap)
        assert merged.pool.num_pages == len(merged.pool.cells) == 8
        assert len(merged.pool.slots) == 4
        engine.pause.set()
        await running

    run(test)


def test_no_request_is_lost_under_ten_thousand_deaths() -> None:
    """Each request is answered in full, or fails for a reason that is allowed.

    Engines are suspected too, and say each step's tokens also of answers that are not streamed.
    """

    async def test() -> None:
        chance = random.Random(7)
        engines = [Engine(is_apart=True) for _ in range(4)]
        fleet = fleet_of(*engines)
        deaths, ends = 0, {"answered": 0, "failed": 0}

        async def client(number: int) -> None:
            while deaths < 10_000:
                is_stream, text = number % 2 == 0, ""
                try:
                    async for output in ask(
                        fleet, [5 + number] * 9, stream=is_stream, name=str(number)
                    ):
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
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
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

    run(test)


def test_a_deadline_and_what_belongs_to_a_request_survive_the_death_of_an_engine() -> None:
    """The time that is left is passed on, and salt, tenant and isolation as they were."""

    async def test() -> None:
        one, other = Engine(), Engine()
        one.pause, one.pause_after = asyncio.Event(), 0
        fleet = fleet_of(one, other)
        terms = RequestTerms(
            timeout=30.0, cache_salt="salt", tenant="tenant", isolation="group", priority=3
        )
        prompt = Prompt(None, [5] * 9)
        reading = asyncio.create_task(
            text_of(fleet.serve(prompt, HELLO, request_id="r", terms=terms))
        )
        await until(lambda: bool(one.running))
        await asyncio.sleep(0.05)
        one.lose()
        assert await reading == "hello"
        [(_, params, before)], [(_, same_params, after)] = one.requests, other.requests
        assert params == same_params
        assert before.pop("timeout") == 30.0
        assert 0 < after.pop("timeout") <= 30.0 - 0.05
        assert before == after
        assert before.items() >= {
            "cache_salt": "salt", "tenant": "tenant", "isolation": "group"
        }.items()  # fmt: skip

    run(test)


def test_requests_of_other_keys_or_salts_are_expected_to_have_nothing() -> None:
    async def test() -> None:
        fleet = fleet_of(Engine(), Engine())
        prompt = Prompt(None, [5] * 40)

        async def expected(**terms: Any) -> float:
            before = fleet.stats()["router_expected_hit_tokens_total"]
            stream = fleet.serve(prompt, HELLO, request_id="r", terms=RequestTerms(**terms))
            await text_of(stream)
            return fleet.stats()["router_expected_hit_tokens_total"] - before

        for terms in ({}, {"cache_salt": "a"}, {"isolation": "k"}, {"isolation": "l"}):
            assert await expected(**terms) == 0
            assert await expected(**terms) == 40

    run(test)


# -- engines that are not heard of -------------------------------------------------------------


def held(engine: Engine, after: int = 0) -> asyncio.Event:
    """Let an engine say no more after so many tokens, until the event is set."""
    engine.pause, engine.pause_after = asyncio.Event(), after
    return engine.pause


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_has_not_begun_leaves_an_engine_that_is_suspected(stream: bool) -> None:
    """It is answered once, also if the engine goes on; it has as much time as was left."""

    async def test() -> None:
        one, other = Engine(), Engine()
        speak = held(one)
        fleet = fleet_of(one, other)
        reading = asyncio.create_task(all_of(ask(fleet, stream=stream)))
        await until(lambda: bool(one.running))
        one.suspect()
        outputs = await reading
        speak.set()
        await asyncio.sleep(0)
        assert "".join(choice.text for each in outputs for choice in each.outputs) == "hello"
        assert sum(not each.outputs for each in outputs) == int(stream)  # accepted once
        assert (one.aborted, other.finished) == (["r"], ["r"])
        assert fleet.stats()["router_failovers_total"] == 1
        assert fleet.num_running == 0

    run(test)


def test_an_engine_that_is_suspected_gets_nothing_new_until_it_is_heard_of() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        one.suspect()
        assert [member.state for member in fleet.members] == ["suspect", "ready"]
        for _ in range(4):
            assert await text_of(ask(fleet)) == "hello"
        assert (len(one.requests), len(other.requests)) == (0, 4)
        one.suspect(False)
        for number in range(4):
            assert await text_of(ask(fleet, [6 + number] * 9)) == "hello"
        assert len(one.requests) >= 2

    run(test)


def test_a_stream_that_has_begun_stays_with_its_engine() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        speak = held(one, 2)
        fleet = fleet_of(one, other)
        stream = ask(fleet, stream=True)
        while not (output := await anext(stream)).outputs:
            pass
        one.suspect()
        reading = asyncio.create_task(text_of(stream))
        await until(lambda: one.facts.num_running == 1)
        one.suspect(False)
        speak.set()
        assert output.outputs[0].text + await reading == "hello"
        assert other.requests == []

    run(test)


def test_when_all_are_suspected_requests_still_go_somewhere() -> None:
    """They stay there, until another is heard of."""

    async def test() -> None:
        one, other = Engine(), Engine()
        held(one)
        fleet = fleet_of(one, other)
        other.suspect()
        one.suspect()
        reading = asyncio.create_task(text_of(ask(fleet)))
        await until(lambda: bool(one.running))
        assert not reading.done()
        other.suspect(False)
        assert await reading == "hello"
        assert (one.aborted, other.finished) == (["r"], ["r"])
        one.lose()
        other.suspect()
        assert await text_of(ask(fleet)) == "hello"

    run(test)


@pytest.mark.parametrize(("stream", "moves"), [(False, 1), (True, 3)])
def test_a_request_whose_own_step_is_long_is_not_moved_for_ever(stream: bool, moves: int) -> None:
    """What is not streamed may be nearly done when its engine is suspected."""

    async def test() -> None:
        engines = [Engine(), Engine()]
        speak = [held(engine) for engine in engines]
        fleet = fleet_of(*engines)

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

    run(test)


def test_who_leaves_a_request_at_a_suspected_engine_has_left() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        held(one)
        fleet = fleet_of(one, other)
        reading = asyncio.create_task(text_of(ask(fleet)))
        await until(lambda: bool(one.running))
        reading.cancel()
        one.suspect()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (one.aborted, other.requests) == (["r"], [])
        assert not any(member.requests for member in fleet.members)

    run(test)


def test_a_picture_is_taken_of_those_that_are_heard_of() -> None:
    async def test() -> None:
        one, other = Engine(), Engine()
        fleet = fleet_of(one, other)
        one.is_mute = True
        taking = asyncio.create_task(fleet.snapshot())
        await until(lambda: bool(fleet.members[0].asked))
        assert not taking.done()
        one.suspect()
        assert (await taking).pool.num_pages == 4
        assert (await fleet.snapshot()).pool.num_pages == 4

    run(test)


# -- what a request costs ------------------------------------------------------------------------


def test_running_requests_are_counted_where_they_change() -> None:
    """Also those of engines that die, leave and join."""

    async def test() -> None:
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

    run(test)


@pytest.mark.parametrize("num_turns", range(1, 7))
def test_whoever_waits_for_an_answer_when_all_engines_end_is_told(num_turns: int) -> None:
    async def test() -> None:
        unheard: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))
        dead, mute = Engine(), Engine()
        fleet = fleet_of(dead, mute)
        await fleet.start()
        dead.lose()
        mute.is_mute = True
        asking = [
            asyncio.create_task(each)
            for each in (fleet.snapshot(), fleet.pin_prefix([5] * 12), fleet.reset_prefix_cache())
        ]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await fleet.shutdown()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(answer) for answer in answers} == {EngineDeadError}
        await asyncio.sleep(0)
        del asking, answers
        gc.collect()
        assert unheard == []

    run(test)
