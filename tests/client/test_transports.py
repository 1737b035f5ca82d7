"""One client and one service, whatever carries the messages between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from vmserve import AsyncLLM, InvalidRequestError, SamplingParams
from vmserve.client.codec import decode_from_engine, encode
from vmserve.client.messages import (
    Abort,
    Add,
    Ask,
    FromEngine,
    Lend,
    Ping,
    Pong,
    Reply,
    Shutdown,
    StepUpdate,
    Unpin,
)
from vmserve.client.service import EngineService
from vmserve.client.transports.inline import InlineTransport
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.engine.requests import memory_tenant
from vmserve.errors import EngineDeadError, RankLostError
from vmserve.testing import NullRuntime
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestTerms

OPTIONS: dict[str, Any] = {"kv_cache_memory": "32MiB", "max_model_len": 512, "device": "cpu"}
STREAM = RequestTerms(stream=True)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture
def sent() -> list[FromEngine]:
    """What the service sends."""
    return []


@pytest.fixture
def service(sent: list[FromEngine]) -> Iterator[EngineService]:
    engine = LLMEngine(EngineConfig(**OPTIONS), runtime=NullRuntime(token_id=300))
    yield EngineService(engine, sent.append)
    engine.close()


def taken(sent: list[FromEngine]) -> list[FromEngine]:
    """What was sent since the last call, which arrives the same through a socket."""
    messages, sent[:] = list(sent), []
    for message in messages:
        arrived = decode_from_engine(encode(message))
        if isinstance(message, StepUpdate) and message.failures:
            assert isinstance(arrived, StepUpdate)
            [(handle, error)], [(other, expected)] = arrived.failures, message.failures
            assert (handle, type(error), str(error)) == (other, type(expected), str(expected))
        elif isinstance(message, Reply) and message.error is not None:
            assert isinstance(arrived, Reply)
            assert repr(arrived.error) == repr(message.error)
        else:
            assert arrived == message
    return messages


def updates(message: FromEngine) -> list[tuple[int, RequestUpdate]]:
    assert isinstance(message, StepUpdate)
    return message.updates


def test_a_request_in_messages(service: EngineService, sent: list[FromEngine]) -> None:
    service.handle(Add(1, "a", [5, 6], params(3), STREAM, is_stream=True))
    service.flush()
    assert taken(sent) == [StepUpdate(0, 1, [1], [], [])]
    for place in range(3):
        service.step()
        [message] = taken(sent)
        [(handle, update)] = updates(message)
        [choice] = update.outputs
        assert (handle, choice.token_ids, update.request_id) == (1, [300], "")
        assert update.finished == (place == 2)
        # With the first tokens and at the end.
        assert (update.metrics is None) == (place == 1)
    assert not service.engine.has_unfinished


def test_each_step_and_acceptance_are_asked_for_apart(
    service: EngineService, sent: list[FromEngine]
) -> None:
    service.handle(Add(1, "whole", [5], params(2), RequestTerms(), is_stream=False))
    service.handle(Add(2, "steps", [5], params(2), STREAM, is_stream=False))
    service.flush()
    assert taken(sent) == [StepUpdate(0, 2, [], [], [])]
    service.step()
    assert [handle for handle, _ in updates(taken(sent)[-1])] == [2]
    service.step()
    lengths = {handle: len(u.outputs[0].token_ids) for handle, u in updates(taken(sent)[-1])}
    assert lengths == {1: 2, 2: 1}


def test_terms_are_those_of_the_engines_request(service: EngineService) -> None:
    terms = RequestTerms(priority=-1, cache_salt="s", tenant="t", isolation="i", timeout=1e-9)
    service.handle(Add(1, "a", [5] * 20, params(9), terms, is_stream=False))
    [request] = service.engine._requests.values()
    found = (request.priority, request.cache_salt, request.tenant, request.memory_tenant)
    assert found == (-1, b"s", "t", memory_tenant("i"))
    service.step()
    assert not service.engine.has_unfinished  # it is late


def test_what_the_engine_refuses(service: EngineService, sent: list[FromEngine]) -> None:
    service.handle(Add(1, "same", [5], params(9), STREAM, is_stream=False))
    service.handle(Add(2, "same", [5], params(9), STREAM, is_stream=False))
    service.flush()
    [message] = taken(sent)
    assert isinstance(message, StepUpdate)
    [(handle, error)] = message.failures
    assert handle == 2
    assert isinstance(error, InvalidRequestError)
    with pytest.raises(TypeError, match="Pong is no message to a running engine"):
        service.handle(Pong(1))  # type: ignore[arg-type]


def test_the_ends_of_requests(service: EngineService, sent: list[FromEngine]) -> None:
    for handle in (1, 2, 3):
        service.handle(Add(handle, f"r{handle}", [5], params(99), STREAM, is_stream=False))
    service.step()
    taken(sent)
    service.handle(Abort(1, tell=True))
    service.handle(Abort(2, tell=False))
    service.handle(Abort(7, tell=True))  # one that has ended
    service.flush()
    [message] = taken(sent)
    [(handle, update)] = updates(message)
    assert (handle, update.finished, update.outputs[0].finish_reason) == (1, True, "abort")
    # A service that runs tells those that are left when it is shut down, and takes nothing more.
    service.post(Ping(8))
    service.post(Shutdown())
    with pytest.raises(EngineDeadError):
        service.post(Ping(9))
    service.run()
    pong, *_, last = taken(sent)
    assert pong == Pong(8)
    [(handle, update)] = updates(last)
    assert (handle, update.finished, update.outputs[0].finish_reason) == (3, True, "abort")
    assert not service.engine.has_unfinished


def test_pins_in_messages(service: EngineService, sent: list[FromEngine]) -> None:
    def ask(question: str, **arguments: Any) -> Reply:
        service.handle(Ask(1, question, arguments))
        while service.engine.has_unfinished:
            service.step()
        service.flush()
        [answer] = [each for each in taken(sent) if isinstance(each, Reply)]
        return answer

    def num_pinned() -> float:
        return service.engine.stats()["pinned_prefixes"]

    prefix = list(range(5, 69))
    pin = {"pin": 4, "token_ids": prefix, "cache_salt": "", "isolation": ""}
    for _ in range(2):  # the second takes the place of the first
        assert ask("pin_prefix", **pin).value == 64
        assert num_pinned() == 1
    assert ask("reset_prefix_cache").value is None
    assert num_pinned() == 1
    service.handle(Unpin(4))
    service.handle(Unpin(4))
    assert num_pinned() == 0
    assert ask("reset_prefix_cache").value is None
    # One that is given up, or whose request fails, as it is computed.
    service.handle(Ask(2, "pin_prefix", pin))
    service.handle(Unpin(4))
    assert not service.engine.has_unfinished
    assert taken(sent)[-1] == Reply(2, 0)
    refused = ask("pin_prefix", **{**pin, "token_ids": [5] * 1000})
    assert isinstance(refused.error, InvalidRequestError)
    service.handle(Ask(3, "pin_prefix", pin))
    service.start_over()
    assert ask("pin_prefix", **pin).value == 64
    assert num_pinned() == 1
    service.unpin_all()
    assert num_pinned() == 0


def test_a_cache_that_is_reset_has_the_pins_that_are_halfway_computed() -> None:
    """Also those that another reset, or an interrupted one, has computed anew."""
    sent: list[FromEngine] = []
    engine = LLMEngine(EngineConfig(**OPTIONS, max_num_batched_tokens=64))
    service = EngineService(engine, sent.append)

    def finish() -> list[Reply]:
        while engine.has_unfinished:
            service.step()
        return [each for each in taken(sent) if isinstance(each, Reply)]

    def num_held() -> int:
        assert engine.stats()["pinned_prefixes"] == len(service._pins)
        return len(service._pins)

    pin = {"pin": 4, "token_ids": list(range(5, 405)), "cache_salt": "", "isolation": ""}
    service.handle(Ask(1, "pin_prefix", pin))
    for serial in (2, 3):
        service.step()
        service.handle(Ask(serial, "reset_prefix_cache", {}))
    service.step()
    assert finish() == [Reply(1, 400), Reply(2, None), Reply(3, None)]
    for serial in (4, 5):
        service.handle(Ask(serial, "reset_prefix_cache", {}))
        service.step()
    assert finish() == [Reply(4, None), Reply(5, None)]
    assert num_held() == 1
    service.handle(Ask(6, "reset_prefix_cache", {}))
    service.step()
    service.start_over()
    assert finish() == []
    assert num_held() == 1
    service.handle(Ask(7, "reset_prefix_cache", {}))
    service.handle(Unpin(4))
    assert finish() == [Reply(7, None)]
    assert num_held() == 0
    engine.close()


async def test_a_pin_that_is_halfway_computed_when_its_thread_ends_fails() -> None:
    llm = AsyncLLM(**OPTIONS, max_num_batched_tokens=64)
    await llm.snapshot()
    pinning = asyncio.create_task(llm.pin_prefix(list(range(5, 405))))
    await asyncio.sleep(0)
    llm.transport.send(Shutdown())  # read with the pin, or a few steps later
    with pytest.raises(EngineDeadError):
        await pinning
    await llm.shutdown()
    assert not llm.errored


def test_event_loops_hear_of_their_own_requests() -> None:
    llm = AsyncLLM(**OPTIONS)

    async def answer(token_id: int) -> list[list[int]]:
        """Of four requests at a time, as the loop of one thread gets them."""

        async def one(place: int) -> list[int]:
            stream = llm.generate([token_id + place], params(30), stream=True)
            return [i async for output in stream for c in output.outputs for i in c.token_ids]

        return await asyncio.gather(*map(one, range(4)))

    alone = [asyncio.run(answer(token_id)) for token_id in (5, 50, 500)]
    with ThreadPoolExecutor(3) as pool:
        together = pool.map(lambda token_id: asyncio.run(answer(token_id)), (5, 50, 500))
        assert list(together) == alone
    asyncio.run(llm.shutdown())
    assert not llm.errored


def test_an_engine_that_has_lost_a_rank_is_asked_nothing_more(
    service: EngineService, sent: list[FromEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its memory reports to a pool might wait for the rank; who waits is told first."""
    engine, lost = service.engine, RankLostError("rank 1 of 2 has ended")
    engine.lend(engine.memory.limit_bytes, reclaim=False)
    service.post(Add(0, "a", [5] * 20, params(50), STREAM, is_stream=True))

    def step() -> None:
        monkeypatch.setattr(engine, "memory_news", pytest.fail)
        raise lost

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(RankLostError) as raised:
        service.run()
    assert raised.value is lost
    assert [each.failures for each in sent if isinstance(each, StepUpdate)][-1] == [(0, lost)]


def test_an_order_that_another_thread_carries_out_first_is_not_slept_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have had the turn between the look at what is posted and the taking of the turn."""
    engine = LLMEngine(EngineConfig(**OPTIONS), runtime=NullRuntime(token_id=300))
    transport = InlineTransport(engine)
    transport.on(lambda message: None)
    turn = transport._turn

    class Late:
        def acquire(self, blocking: bool = True) -> bool:
            assert turn.acquire(blocking=blocking)
            transport._service.handle_posted()
            return True

        def release(self) -> None:
            turn.release()

    monkeypatch.setattr(transport, "_turn", Late())
    order = Lend(engine.memory.limit_bytes, reclaim=False)
    sender = threading.Thread(target=transport.send, args=(order,), daemon=True)
    sender.start()
    sender.join(20)
    assert not sender.is_alive()
    assert engine.is_lent
    engine.close()
