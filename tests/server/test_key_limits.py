"""What one tenant may have: sequences, requests, tokens a minute, by a clock that is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.client.test_fleet import Engine, fleet_of
from tests.helpers import until
from tests.server.conftest import Running
from tests.support.serving import COMPLETIONS, Start, bearer, later, load, pause, refused
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.server.access.key_limits import KeyLedger
from vmserve.server.auth import ApiKey, KeyLimits, read_key_file
from vmserve.server.errors import ApiError
from vmserve.testing import ScriptedTransport


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def ledger(clock: Clock | None = None, **limits: int) -> KeyLedger:
    return KeyLedger(KeyLimits(**limits), {}, clock or Clock())


# -- requests and tokens


def test_requests_of_one_tenant_are_bounded_and_others_go_on() -> None:
    keys = ledger(requests=3)
    uses = [keys.admit("a", 1, 1, 10), keys.admit("a", 2, 2, 10)]
    with pytest.raises(ApiError, match="3 requests of 'a' are under way, and at most 3") as refused:
        keys.admit("a", 1, 1, 10)
    assert refused.value.status == 429
    assert refused.value.headers == {
        "retry-after": "1",
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
    }
    assert keys.num_rejected == 1
    keys.admit("b", 3, 3, 10)
    uses[1].release()
    keys.admit("a", 2, 2, 10)


def test_tokens_of_prompts_and_answers_come_back_with_time() -> None:
    clock = Clock()
    keys = ledger(clock, tokens_per_minute=600)
    first = keys.admit("a", 1, 1, 100)
    first.charge(420)  # answered
    keys.admit("a", 1, 1, 80)
    told = r"0 tokens left of the 600 .* takes 25: try again in 3 s"
    with pytest.raises(ApiError, match=told) as caught:
        keys.admit("a", 1, 1, 25)
    assert caught.value.headers == {
        "retry-after": "3",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "60s",
    }
    clock.now = 2.4
    with pytest.raises(ApiError):
        keys.admit("a", 1, 1, 25)
    clock.now = 2.5  # 25 tokens at 10 a second
    keys.admit("a", 1, 1, 25)
    clock.now = 1e6  # and never more than a minute's
    keys.admit("a", 1, 1, 600).charge(1100)
    with pytest.raises(ApiError, match="try again in 111 s"):  # an answer may take more
        keys.admit("a", 1, 1, 10)
    clock.now += 111
    keys.admit("a", 1, 1, 10)


@pytest.mark.parametrize(
    ("limits", "asked", "told"),
    [
        ({"sequences": 16}, (1, 17, 5), "17 sequences, n for each prompt, are more .* 16: lower n"),
        ({"requests": 4}, (5, 5, 5), "5 prompts in one request are more .* 4: send fewer"),
        ({"tokens_per_minute": 99}, (1, 1, 100), "100 tokens of prompts .* 99: shorten"),
    ],
)
def test_what_never_fits_is_refused(
    limits: dict[str, int], asked: tuple[int, int, int], told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        ledger(**limits).admit("a", *asked)


def test_accounts_of_the_past_are_forgotten_and_no_others() -> None:
    clock = Clock()
    keys = ledger(clock, tokens_per_minute=60, requests=1)
    keys.admit("busy", 1, 1, 1)
    owing = keys.admit("owes", 1, 1, 1)
    owing.charge(10_000)
    owing.release()
    for index in range(3000):
        clock.now += 1
        keys.admit(f"user-{index}", 1, 1, 1).release()
    assert len(keys._accounts) < 1100
    with pytest.raises(ApiError, match="1 requests of 'busy'"):
        keys.admit("busy", 1, 1, 1)
    with pytest.raises(ApiError, match="try again in 6942 s"):
        keys.admit("owes", 1, 1, 1)


# -- sequences


async def waiting(use: Any) -> asyncio.Task[None]:
    task = asyncio.create_task(use.enter())
    await asyncio.sleep(0)
    return task


@on_a_loop
async def test_sequences_wait_for_others_of_their_tenant_in_order() -> None:
    keys = ledger(sequences=4)
    first, second = keys.admit("a", 1, 3, 1), keys.admit("a", 1, 2, 1)
    third, other = keys.admit("a", 1, 1, 1), keys.admit("b", 1, 4, 1)
    assert first.enters_now()
    assert other.enters_now()
    assert not second.enters_now()
    next_in = await waiting(second)
    assert not third.enters_now()  # there is room, but another is before it
    last = await waiting(third)
    first.leave(1)
    await next_in
    assert not last.done()
    first.release()
    await last
    assert keys._accounts["a"].num_running == 3
    for use in (second, third):
        use.release()
    assert keys._accounts["a"].num_running == keys._accounts["a"].num_requests == 0


@on_a_loop
async def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    keys = ledger(sequences=2)
    first, large, small = (keys.admit("a", 1, num, 1) for num in (1, 2, 1))
    assert first.enters_now()
    gone, next_in = await waiting(large), await waiting(small)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    large.release()
    await next_in
    assert keys._accounts["a"].num_running == 2


@on_a_loop
async def test_who_leaves_as_it_may_enter_gives_its_place_back() -> None:
    keys = ledger(sequences=1)
    first, second, third = (keys.admit("a", 1, 1, 1) for _ in range(3))
    assert first.enters_now()
    tasks = [await waiting(use) for use in (second, third)]
    first.release()
    tasks[0].cancel()  # it has its place and has not run since
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert tasks[0].cancelled()
    second.release()
    await tasks[1]
    assert keys._accounts["a"].num_running == 1


# -- the key file


def test_limits_in_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "alice sequences=16 requests=64 tokens-per-minute=100000: one\n"
        "alice:two\nbob smith requests=3:three\nteam=red:four\n"
    )
    alice = KeyLimits(16, 64, 100_000)
    assert read_key_file(file) == (
        ApiKey.of("alice", "one", alice),
        ApiKey.of("alice", "two", alice),
        ApiKey.of("bob smith", "three", KeyLimits(requests=3)),
        ApiKey.of("team=red", "four"),
    )


def test_limits_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text, told in (
        ("a sequence=1:k", "sequence= is no limit.*are sequences, requests, tokens-per-minute"),
        ("a requests=0:k", "requests=0 is not a number from 1 on"),
        ("a requests=x:k", "requests=x is not"),
        ("a requests=1 requests=2:k", "given twice"),
        ("a requests=1:k\na requests=2:l", "different limits"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=told):
            read_key_file(file)


# -- over HTTP


def keyed(**limits: Any) -> dict[str, Any]:
    return {"named_keys": (ApiKey.of("alice", "a", KeyLimits(**limits)), ApiKey.of("bob", "b"))}


def post(server: Running, key: str, **body: Any) -> Any:
    return server.post(COMPLETIONS, {"prompt": "Hi", **body}, headers=bearer(key))


@pytest.mark.parametrize("stream", [False, True])
def test_a_key_that_has_used_its_minute_gets_429_alone(start: Start, stream: bool) -> None:
    server = start(**keyed(tokens_per_minute=20))
    # 3 of the prompt and 6 of the answer; then 19.
    assert post(server, "a", max_tokens=6, stream=stream).status_code == 200
    assert post(server, "a", prompt="Hi" * 9).status_code == 429
    reply = post(server, "a", prompt="Hi" * 9)
    assert refused(reply, 429)["type"] == "RateLimitError"
    assert reply.headers["x-ratelimit-limit-tokens"] == "20"
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert post(server, "b").status_code == 200
    metrics = server.http.get("/metrics", headers=bearer("b")).text
    assert 'admission_rejections_total{engine="0",model_name="fake"} 2.0' in metrics


def test_one_request_above_the_sequences_of_its_key(start: Start) -> None:
    server = start(**keyed(sequences=4), max_key_sequences=3)
    error = refused(post(server, "a", n=5))
    assert error["param"] == "n"
    assert "5 sequences" in error["message"]
    assert "'alice' may run at once, 4: lower n" in error["message"]
    # What a key says comes before the options.
    assert post(server, "a", n=4).status_code == 200
    assert "more than 'bob' may run at once, 3" in refused(post(server, "b", n=4))["message"]
    assert post(start(**keyed(sequences=4)), "b", n=5).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [[2], [1, 1]], ids=["one engine", "two engines"])
def test_sequences_above_the_limit_wait(start: Start, stream: bool, running: list[int]) -> None:
    """``running``: the sequences of the user's requests that may run, one for each engine."""
    engines = [Engine() for _ in running]
    server = start(fleet_of(*engines) if len(engines) > 1 else engines[0], max_key_sequences=2)
    go_on = pause(server, *engines)
    asked: list[Future[Any]] = []

    def ask(user: str, num_sequences: int = 1) -> None:
        body = {"prompt": "x", "user": user, "n": num_sequences, "stream": stream}
        asked.append(later(server.post, COMPLETIONS, body))
        until(lambda: load(server) == len(asked))

    def tenants() -> list[str]:
        return sorted(extra["tenant"] for each in engines for _, _, extra in each.requests)

    for number in running:
        ask("u", number)
    until(lambda: len(tenants()) == len(running))
    # The next one of the user is not an engine's yet, the other user's is.
    ask("u")
    ask("v")
    until(lambda: len(tenants()) == len(running) + 1)
    assert tenants() == ["u"] * len(running) + ["v"]
    go_on()
    assert {each.result(20).status_code for each in asked} == {200}
    assert tenants() == ["u"] * (len(running) + 1) + ["v"]


def test_who_waits_for_a_place_waits_its_time_or_the_servers(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, max_key_sequences=1, shutdown_timeout=0.1)
    go_on = pause(server, engine)
    first = later(server.complete)
    until(lambda: len(engine.running) == 1)
    late = server.error(COMPLETIONS, {"prompt": "x", "request_timeout": 0.05}, 504)
    assert "waited its 0.05 seconds for other sequences" in late["message"]
    go_on()
    for reply in (first.result(20), server.complete()):
        assert reply["choices"][0]["text"] == "hello"
    assert len(engine.requests) == 2
    pause(server, engine)
    later(server.complete)
    until(lambda: len(engine.running) == 1)
    waits = later(server.post, COMPLETIONS, {"prompt": "x"})
    until(lambda: load(server) == 2)
    server.begin_stop()
    assert waits.result(20).status_code == 503
    server.join()
    assert len(engine.requests) == 3
