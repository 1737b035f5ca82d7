"""What one tenant may have: sequences, requests, tokens a minute, by a clock that is set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Running, error_of
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.server.access.key_limits import KeyLedger
from vmserve.server.auth import ApiKey, KeyLimits, read_key_file
from vmserve.server.errors import ApiError
from vmserve.testing import ScriptedTransport

Start = Callable[..., Running]


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

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
    with pytest.raises(
        ApiError, match=r"0 tokens left of the 600 .* takes 25: try again in 3 s"
    ) as e:
        keys.admit("a", 1, 1, 25)
    assert e.value.headers == {
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
    keys.admit("a", 1, 1, 600)
    with pytest.raises(ApiError):
        keys.admit("a", 1, 1, 1)


def test_an_answer_that_takes_more_is_paid_for_by_waiting() -> None:
    clock = Clock()
    keys = ledger(clock, tokens_per_minute=60)
    keys.admit("a", 1, 1, 10).charge(170)
    with pytest.raises(ApiError, match="try again in 121 s"):
        keys.admit("a", 1, 1, 1)
    clock.now = 121
    keys.admit("a", 1, 1, 1)


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


@on_a_loop
async def test_sequences_wait_for_others_of_their_tenant_in_order() -> None:
    keys = ledger(sequences=4)
    first, second = keys.admit("a", 1, 3, 1), keys.admit("a", 1, 2, 1)
    third, other = keys.admit("a", 1, 1, 1), keys.admit("b", 1, 4, 1)
    assert first.enters_now()
    assert other.enters_now()
    assert not second.enters_now()
    waiting = asyncio.create_task(second.enter())
    await asyncio.sleep(0)
    assert not third.enters_now()  # there is room, but another is before it
    last = asyncio.create_task(third.enter())
    await asyncio.sleep(0)
    first.leave(1)
    await waiting
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
    gone = asyncio.create_task(large.enter())
    await asyncio.sleep(0)
    waiting = asyncio.create_task(small.enter())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    large.release()
    await waiting
    assert keys._accounts["a"].num_running == 2


@on_a_loop
async def test_who_leaves_as_it_may_enter_gives_its_place_back() -> None:
    keys = ledger(sequences=1)
    first, second, third = (keys.admit("a", 1, 1, 1) for _ in range(3))
    assert first.enters_now()
    tasks = [asyncio.create_task(use.enter()) for use in (second, third)]
    await asyncio.sleep(0)
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "a sequence=1:k",
            "sequence= is no limit.*there are sequences, requests, tokens-per-minute",
        ),
        ("a requests=0:k", "requests=0 is not a number from 1 on"),
        ("a requests=x:k", "requests=x is not"),
        ("a requests=1 requests=2:k", "given twice"),
        ("a requests=1:k\na requests=2:l", "different limits"),
    ],
)
def test_limits_that_are_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        read_key_file(file)


# -- over HTTP


def keyed(**limits: Any) -> dict[str, Any]:
    return {"named_keys": (ApiKey.of("alice", "a", KeyLimits(**limits)), ApiKey.of("bob", "b"))}


def post(server: Running, key: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return server.post("/v1/completions", {"prompt": "Hi", **body}, headers=headers)


def test_a_key_that_has_used_its_minute_gets_429_and_others_go_on(start: Start) -> None:
    server = start(**keyed(tokens_per_minute=20))
    # 3 of the prompt and 6 of the answer; then 19.
    assert post(server, "a", max_tokens=6).status_code == 200
    assert post(server, "a", prompt="Hi" * 9).status_code == 429
    refused = post(server, "a", prompt="Hi" * 9)
    assert error_of(refused)["type"] == "RateLimitError"
    assert refused.headers["x-ratelimit-limit-tokens"] == "20"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert post(server, "b").status_code == 200
    metrics = server.http.get("/metrics", headers={"authorization": "Bearer b"}).text
    assert 'admission_rejections_total{engine="0",model_name="fake"} 2.0' in metrics


def test_a_stream_is_charged_as_it_goes(start: Start) -> None:
    server = start(ScriptedTransport("x" * 30), **keyed(tokens_per_minute=25))
    headers = {"authorization": "Bearer a"}
    body = {"prompt": "Hi", "stream": True, "max_tokens": 30}
    with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        response.read()
    assert post(server, "a").status_code == 429


def test_one_request_above_the_sequences_of_its_key(start: Start) -> None:
    server = start(**keyed(sequences=4))
    refused = post(server, "a", n=5)
    assert refused.status_code == 400
    error = error_of(refused)
    assert error["param"] == "n"
    assert "5 sequences" in error["message"]
    assert "'alice' may run at once, 4: lower n" in error["message"]
    assert post(server, "a", n=4).status_code == 200
    assert post(server, "b", n=5).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_sequences_above_the_limit_wait_in_the_server(start: Start, stream: bool) -> None:
    engine = ScriptedTransport()
    server = start(engine, max_key_sequences=2)
    engine.pause = server.on_loop(asyncio.Event)
    body = {"prompt": "x", "n": 2, "user": "u"}
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
        assert first.status_code == 200
        # The second one of the user is not the engine's yet, the other user's is.
        waiting = asyncio.run_coroutine_threadsafe(
            _post(server, {**body, "n": 1, "stream": stream}), server.loop
        )
        until(lambda: server.http.get("/load").json() == {"server_load": 2})
        with server.http.stream(
            "POST", "/v1/completions", json={**body, "user": "v", "stream": True}
        ):
            until(lambda: len(engine.requests) == 2)
            assert [extra["tenant"] for _, _, extra in engine.requests] == ["u", "v"]
            assert not waiting.done()
        server.on_loop(engine.pause.set)
        first.read()
    assert waiting.result(20) == 200
    assert [extra["tenant"] for _, _, extra in engine.requests] == ["u", "v", "u"]


async def _post(server: Running, body: dict[str, Any]) -> int:
    async with httpx.AsyncClient(base_url=server.url) as client:
        return (await client.post("/v1/completions", json=body)).status_code


def test_time_spent_waiting_for_a_place_counts(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, max_key_sequences=1)
    engine.pause = server.on_loop(asyncio.Event)
    body = {"prompt": "x", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as first:
        late = server.post("/v1/completions", {"prompt": "x", "request_timeout": 0.05})
        assert late.status_code == 504
        assert "waited its 0.05 seconds for other sequences" in error_of(late)["message"]
        server.on_loop(engine.pause.set)
        first.read()
    assert len(engine.requests) == 1
    assert server.complete(prompt="x")["choices"][0]["text"] == "hello"


def test_what_a_key_says_comes_before_the_options(start: Start) -> None:
    server = start(**keyed(sequences=3), max_key_sequences=2)
    assert post(server, "a", n=3).status_code == 200
    assert "more than 'bob' may run at once, 2" in error_of(post(server, "b", n=3))["message"]


def test_who_waits_for_a_place_is_told_when_the_server_ends(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, max_key_sequences=1, shutdown_timeout=0.1)
    engine.pause = server.on_loop(asyncio.Event)
    with ThreadPoolExecutor(1) as threads:
        body = {"prompt": "x", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as first:
            waiting = threads.submit(server.post, "/v1/completions", {"prompt": "x"})
            until(lambda: server.http.get("/load").json() == {"server_load": 2})
            server.begin_stop()
            first.read()
            assert waiting.result(20).status_code == 503
    server.join()
    assert len(engine.requests) == 1
