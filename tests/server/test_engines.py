"""A model with several engines: health, figures of each, and routes that change them."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.client.test_fleet import Engine, fleet_of
from tests.engine.interrupting import count_instructions
from tests.helpers import until
from tests.server.conftest import Running, error_of
from vmserve.cli.top import Screen
from vmserve.client.messages import ToEngine
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig

Start = Callable[..., Running]
ADMIN = {"authorization": "Bearer admin"}
BODY = {"prompt": "hi", "max_tokens": 20}


def test_health_is_good_while_one_engine_serves_and_says_which_are_down(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other))
    one.lose()
    reply = server.http.get("/health")
    assert (reply.status_code, reply.json()) == (
        200,
        {"engines": {"fake": {"0": "down", "1": "ready"}}},
    )
    assert server.ok("/v1/completions", BODY)["choices"][0]["text"] == "hello"
    other.lose()
    assert server.http.get("/health").status_code == 503


def test_figures_are_told_of_each_engine_and_of_the_router(start: Start) -> None:
    server = start(fleet_of(Engine(), Engine()))
    server.ok("/v1/completions", BODY)
    found = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    }
    assert found["vmserve:prompt_tokens_total", "0"] == 7
    assert found["vmserve:prompt_tokens_total", "1"] == 7
    assert found["vmserve:router_choices_total", ""] == 1
    assert found["vmserve:engine_up", "1"] == 1
    assert found["vmserve:e2e_request_latency_seconds_count", ""] == 1
    live = server.http.get("/v1/kv/live").json()
    assert [(row["id"], row["state"]) for row in live["engines"]] == [
        ("0", "ready"),
        ("1", "ready"),
    ]
    assert live["stats"]["prompt_tokens_total"] == 14
    screen = Screen()
    screen.take(live, 0.0)
    written = io.StringIO()
    Console(width=100, file=written).print(screen)
    assert "engine  state" in written.getvalue()


def test_engines_are_drained_resumed_and_removed_with_the_admin_key(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other), admin_api_key="admin", api_keys=("user",))

    def post(what: str, headers: dict[str, str] = ADMIN) -> tuple[int, list[str]]:
        reply = server.http.post(f"/v1/engines/{what}", headers=headers)
        rows = reply.json().get("engines", ())
        return reply.status_code, [row["state"] for row in rows]

    assert post("0/drain", {"authorization": "Bearer user"}) == (401, [])
    assert post("0/drain") == (200, ["draining", "ready"])
    for _ in range(3):
        reply = server.post("/v1/completions", BODY, headers={"authorization": "Bearer user"})
        assert reply.status_code == 200
    assert (len(one.requests), len(other.requests)) == (0, 3)
    refused = server.http.post("/v1/engines/1/drain", headers=ADMIN)
    assert refused.status_code == 400
    assert "no other engine takes requests" in error_of(refused)["message"]
    assert post("0/resume") == (200, ["ready", "ready"])
    assert post("7/drain")[0] == 404
    assert post("1/remove") == (200, ["ready"])
    assert other.stopped
    assert post("0/remove")[0] == 400
    assert not one.stopped


@pytest.mark.parametrize("what", ["drain", "resume", "remove"])
def test_a_model_of_one_engine_has_none_by_id(start: Start, what: str) -> None:
    server = start(admin_api_key="admin")
    assert server.http.post(f"/v1/engines/0/{what}", headers=ADMIN).status_code == 404
    assert server.http.get("/health").content == b""


def test_a_group_has_a_row_that_says_how_many_ranks_live(start: Start) -> None:
    class Group(Engine):
        def stats(self) -> dict[str, float | int]:
            return {**super().stats(), "tensor_parallel_size": 2}

    one, other = Group(), Group()
    pair, alone = start(fleet_of(one, other)), start(Group())
    one.lose()
    live = pair.http.get("/v1/kv/live").json()
    rows = [(row["state"], row["num_live_ranks"], row["num_ranks"]) for row in live["engines"]]
    assert rows == [("down", 0, 2), ("ready", 2, 2)]
    assert live["stats"]["tensor_parallel_size"] == 2
    written = io.StringIO()
    screen = Screen()
    screen.take(live, 0.0)
    Console(width=100, file=written).print(screen)
    assert "0 of 2" in written.getvalue()
    [row] = alone.http.get("/v1/kv/live").json()["engines"]
    assert (row["id"], row["state"], row["num_live_ranks"]) == ("0", "ready", 2)
    assert alone.http.get("/health").content == b""


def test_views_say_which_engine_is_suspected(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other))
    server.on_loop(one.suspect)
    assert server.http.get("/health").json() == {
        "engines": {"fake": {"0": "suspect", "1": "ready"}}
    }
    metrics = server.http.get("/metrics").text
    assert 'vmserve:engine_suspect{engine="0",model_name="fake"} 1.0' in metrics
    assert 'vmserve:engine_suspect{engine="1",model_name="fake"} 0.0' in metrics
    assert server.ok("/v1/completions", BODY)["choices"][0]["text"] == "hello"
    assert (len(one.requests), len(other.requests)) == (0, 1)
    server.on_loop(other.suspect)
    assert server.http.get("/health").status_code == 200
    live = server.http.get("/v1/kv/live").json()
    assert [row["state"] for row in live["engines"]] == ["suspect", "suspect"]
    screen = Screen()
    screen.take(live, 0.0)
    written = io.StringIO()
    Console(width=100, file=written).print(screen)
    assert written.getvalue().count("suspect") == 2


@contextlib.contextmanager
def on_this_thread(num_engines: int) -> Iterator[Callable[..., httpx.Response]]:
    """Sends requests to an application whose event loop is this thread's."""
    app = create_app(
        fleet_of(*(Engine() for _ in range(num_engines))), ServerConfig(served_model_names=("m",))
    )
    transport = httpx.ASGITransport(app)
    with asyncio.Runner() as runner:
        http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

        def ask(method: str, path: str, **what: Any) -> httpx.Response:
            return runner.run(http.request(method, path, **what))

        yield ask
        runner.run(http.aclose())
    app.state.context.close()


def instructions(num_engines: int, method: str, path: str, **what: Any) -> int:
    """Of the interpreter, in the package and on the event loop, for one request of several."""
    with on_this_thread(num_engines) as ask:

        def once() -> None:
            assert ask(method, path, **what).status_code == 200

        for _ in range(3):
            once()
        return count_instructions(once)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_costs_as_much_with_many_engines_as_with_one(stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "Hi " * 20}], "stream": stream}
    one, many = (instructions(num, "POST", "/v1/chat/completions", json=body) for num in (1, 256))
    assert many < one + 50


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
def test_figures_of_many_engines_are_written_beside_the_event_loop(accept: str) -> None:
    """On it they are only collected."""
    one, many = (
        instructions(num, "GET", "/metrics", headers={"accept": accept}) for num in (1, 256)
    )
    assert many < one + 256 * 60


def test_engines_are_asked_for_their_figures_a_few_at_a_time() -> None:
    asked, most = 0, 0

    class Asked(Engine):
        """It answers in the next turn of the event loop."""

        def send(self, message: ToEngine) -> None:
            nonlocal asked, most
            asked += 1
            most = max(most, asked)
            asyncio.get_running_loop().call_soon(self.answer, message)

        def answer(self, message: ToEngine) -> None:
            nonlocal asked
            asked -= 1
            super().send(message)

    stats = asyncio.run(fleet_of(*(Asked() for _ in range(100))).fetch_stats())
    assert stats["prompt_tokens_total"] == 700
    assert most == 16


# -- what a key may have is counted over all engines ------------------------------------------


def paused(server: Running, *engines: Engine) -> Callable[[], None]:
    """Hold all requests until what is returned is called."""
    for engine in engines:
        engine.pause, engine.pause_after = server.on_loop(asyncio.Event), 0
    return lambda: [server.on_loop(engine.pause.set) for engine in engines if engine.pause] and None


def ask(server: Running, user: str) -> int:
    return server.post("/v1/completions", {**BODY, "user": user}).status_code


def num_sent(*engines: Engine) -> int:
    return sum(len(engine.requests) for engine in engines)


def test_sequences_of_a_key_are_those_in_all_engines(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other), max_key_sequences=2)
    go_on = paused(server, one, other)
    with ThreadPoolExecutor(5) as threads:
        asked = [threads.submit(ask, server, "u") for _ in range(4)]
        until(lambda: server.http.get("/load").json() == {"server_load": 4})
        asked.append(threads.submit(ask, server, "v"))
        until(lambda: num_sent(one, other) == 3)
        tenants = [extra["tenant"] for each in (one, other) for _, _, extra in each.requests]
        assert sorted(tenants) == ["u", "u", "v"]
        go_on()
        assert [each.result(20) for each in asked] == [200] * 5


def test_requests_of_a_key_are_those_in_all_engines_also_after_a_death(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other), max_key_requests=2)
    go_on = paused(server, one, other)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, server, "u") for _ in range(2)]
        until(lambda: num_sent(one, other) == 2)
        assert (len(one.requests), len(other.requests)) == (1, 1)
        assert ask(server, "u") == 429
        server.on_loop(one.lose)
        until(lambda: len(other.requests) == 2)
        assert ask(server, "u") == 429
        go_on()
        assert [each.result(20) for each in asked] == [200, 200]
    assert ask(server, "u") == 200


def test_tokens_of_a_key_are_charged_once_whatever_engine_answers(start: Start) -> None:
    """3 of a prompt and 6 of an answer; an engine that dies under a request charges nothing."""
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other), key_tokens_per_minute=24)
    go_on = paused(server, one)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, server, "u")
        until(lambda: len(one.requests) == 1)
        server.on_loop(one.lose)
        assert first.result(20) == 200
    server.on_loop(one.revive)
    go_on()
    assert [ask(server, "u") for _ in range(3)] == [200, 200, 429]
    assert num_sent(one, other) == 4
    assert min(len(one.requests), len(other.requests)) > 1
    assert ask(server, "v") == 200


def test_the_queue_is_that_of_all_engines(start: Start) -> None:
    class Narrow(Engine):
        def _count(self) -> None:
            self.facts.num_running = min(1, len(self.running))

    one, other = Narrow(), Narrow()
    server = start(fleet_of(one, other), max_queued_requests=2)
    go_on = paused(server, one, other)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server, "u")]
        for number in range(1, 4):
            until(lambda number=number: num_sent(one, other) == number)
            asked.append(threads.submit(ask, server, "u"))
        until(lambda: num_sent(one, other) == 4)
        assert ask(server, "u") == 429
        go_on()
        assert [each.result(20) for each in asked] == [200] * 4
