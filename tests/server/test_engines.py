"""A model with several engines: health, figures of each, and routes that change them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.client.test_fleet import Engine, fleet_of
from tests.engine.interrupting import count_instructions
from tests.helpers import until
from tests.server.conftest import Running
from tests.support.serving import ADMIN, Start, bearer, drawn, later, pause, refused
from vmserve.client.messages import ToEngine
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig

BODY = {"prompt": "hi", "max_tokens": 20}
Pair = tuple[Running, Engine, Engine]
Pairs = Callable[..., Pair]


@pytest.fixture
def pair(start: Start) -> Callable[..., Pair]:
    """Starts a server with two engines, and returns all three."""

    def begin(kind: type[Engine] = Engine, **options: Any) -> Pair:
        one, other = kind(), kind()
        return start(fleet_of(one, other), **options), one, other

    return begin


def live(server: Running) -> Any:
    return server.http.get("/v1/kv/live").json()


def says_hello(server: Running) -> bool:
    return bool(server.complete(**BODY)["choices"][0]["text"] == "hello")


def test_health_is_good_while_one_engine_serves_and_says_which_are_down(pair: Pairs) -> None:
    server, one, other = pair()
    one.lose()
    reply = server.http.get("/health")
    assert reply.status_code == 200
    assert reply.json() == {"engines": {"fake": {"0": "down", "1": "ready"}}}
    assert says_hello(server)
    other.lose()
    assert server.http.get("/health").status_code == 503


def test_figures_are_told_of_each_engine_and_of_the_router(pair: Pairs) -> None:
    server, _, _ = pair()
    assert says_hello(server)
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
    data = live(server)
    assert [(row["id"], row["state"]) for row in data["engines"]] == [
        ("0", "ready"),
        ("1", "ready"),
    ]
    assert data["stats"]["prompt_tokens_total"] == 14
    assert "engine  state" in "\n".join(drawn(data))


def test_engines_are_drained_resumed_and_removed_by_the_admin(pair: Pairs) -> None:
    server, one, other = pair(admin_api_key="admin", api_keys=("user",))

    def post(what: str, headers: dict[str, str] = ADMIN) -> tuple[int, list[str]]:
        reply = server.http.post(f"/v1/engines/{what}", headers=headers)
        return reply.status_code, [row["state"] for row in reply.json().get("engines", ())]

    assert post("0/drain", bearer("user")) == (401, [])
    assert post("0/drain") == (200, ["draining", "ready"])
    for _ in range(3):
        assert server.post("/v1/completions", BODY, headers=bearer("user")).status_code == 200
    assert (len(one.requests), len(other.requests)) == (0, 3)
    reply = server.http.post("/v1/engines/1/drain", headers=ADMIN)
    assert "no other engine takes requests" in refused(reply)["message"]
    assert post("0/resume") == (200, ["ready", "ready"])
    assert post("7/drain")[0] == 404
    assert post("1/remove") == (200, ["ready"])
    assert other.stopped
    assert post("0/remove")[0] == 400
    assert not one.stopped


def test_a_model_of_one_engine_has_none_by_id(start: Start) -> None:
    server = start(admin_api_key="admin")
    for what in ("drain", "resume", "remove"):
        assert server.http.post(f"/v1/engines/0/{what}", headers=ADMIN).status_code == 404
    assert server.http.get("/health").content == b""


def test_a_group_has_a_row_that_says_how_many_ranks_live(start: Start, pair: Pairs) -> None:
    class Group(Engine):
        def stats(self) -> dict[str, float | int]:
            return {**super().stats(), "tensor_parallel_size": 2}

    server, one, _ = pair(Group)
    one.lose()
    data = live(server)
    rows = [(row["state"], row["num_live_ranks"], row["num_ranks"]) for row in data["engines"]]
    assert rows == [("down", 0, 2), ("ready", 2, 2)]
    assert data["stats"]["tensor_parallel_size"] == 2
    assert "0 of 2" in "\n".join(drawn(data))
    alone = start(Group())
    [row] = live(alone)["engines"]
    assert (row["id"], row["state"], row["num_live_ranks"]) == ("0", "ready", 2)
    assert alone.http.get("/health").content == b""


def test_views_say_which_engine_is_suspected(pair: Pairs) -> None:
    server, one, other = pair()
    server.on_loop(one.suspect)
    states = {"engines": {"fake": {"0": "suspect", "1": "ready"}}}
    assert server.http.get("/health").json() == states
    metrics = server.http.get("/metrics").text
    for engine, value in ((0, 1.0), (1, 0.0)):
        assert f'engine_suspect{{engine="{engine}",model_name="fake"}} {value}' in metrics
    assert says_hello(server)
    assert (len(one.requests), len(other.requests)) == (0, 1)
    server.on_loop(other.suspect)
    assert server.http.get("/health").status_code == 200
    data = live(server)
    assert [row["state"] for row in data["engines"]] == ["suspect", "suspect"]
    assert "\n".join(drawn(data)).count("suspect") == 2


@contextlib.contextmanager
def on_this_thread(num_engines: int) -> Iterator[Callable[..., httpx.Response]]:
    """Sends requests to an application whose event loop is this thread's."""
    engines = (Engine() for _ in range(num_engines))
    app = create_app(fleet_of(*engines), ServerConfig(served_model_names=("m",)))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
    with asyncio.Runner() as runner:
        yield lambda method, path, **what: runner.run(http.request(method, path, **what))
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
    headers = {"accept": accept}
    one, many = (instructions(num, "GET", "/metrics", headers=headers) for num in (1, 256))
    assert many < one + 256 * 60


def test_engines_are_asked_for_their_figures_a_few_at_a_time() -> None:
    asked: list[int] = [0]

    class Asked(Engine):
        """It answers in the next turn of the event loop."""

        def send(self, message: ToEngine) -> None:
            asked.append(asked[-1] + 1)
            asyncio.get_running_loop().call_soon(self.answer, message)

        def answer(self, message: ToEngine) -> None:
            asked.append(asked[-1] - 1)
            super().send(message)

    stats = asyncio.run(fleet_of(*(Asked() for _ in range(100))).fetch_stats())
    assert stats["prompt_tokens_total"] == 700
    assert max(asked) == 16


# -- what a key may have is counted over all engines ------------------------------------------


def ask(server: Running, user: str = "u") -> int:
    return server.post("/v1/completions", {**BODY, "user": user}).status_code


def num_sent(*engines: Engine) -> int:
    return sum(len(engine.requests) for engine in engines)


def statuses(asked: list[Future[int]]) -> list[int]:
    return [each.result(20) for each in asked]


def test_requests_of_a_key_are_those_in_all_engines_also_after_a_death(pair: Pairs) -> None:
    server, one, other = pair(max_key_requests=2)
    go_on = pause(server, one, other, after=0)
    asked = [later(ask, server) for _ in range(2)]
    until(lambda: num_sent(one, other) == 2)
    assert (len(one.requests), len(other.requests)) == (1, 1)
    assert ask(server) == 429
    server.on_loop(one.lose)
    until(lambda: len(other.requests) == 2)
    assert ask(server) == 429
    go_on()
    assert statuses(asked) == [200, 200]
    assert ask(server) == 200


def test_tokens_of_a_key_are_charged_once_whatever_engine_answers(pair: Pairs) -> None:
    """3 of a prompt and 6 of an answer; an engine that dies under a request charges nothing."""
    server, one, other = pair(key_tokens_per_minute=24)
    go_on = pause(server, one, after=0)
    first = later(ask, server)
    until(lambda: len(one.requests) == 1)
    server.on_loop(one.lose)
    assert first.result(20) == 200
    server.on_loop(one.revive)
    go_on()
    assert [ask(server) for _ in range(3)] == [200, 200, 429]
    assert num_sent(one, other) == 4
    assert min(len(one.requests), len(other.requests)) > 1
    assert ask(server, "v") == 200


def test_the_queue_is_that_of_all_engines(pair: Pairs) -> None:
    class Narrow(Engine):
        def _count(self) -> None:
            self.facts.num_running = min(1, len(self.running))

    server, one, other = pair(Narrow, max_queued_requests=2)
    go_on = pause(server, one, other, after=0)
    asked = []
    for number in range(1, 5):
        asked.append(later(ask, server))
        until(lambda number=number: num_sent(one, other) == number)
    assert ask(server) == 429
    go_on()
    assert statuses(asked) == [200] * 4
