"""Several models behind one server: which one a request gets, and how models sleep and wake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running
from tests.support.serving import ADMIN, CHAT, COMPLETIONS, Said, Start, later, pause, refused
from vmserve.cli.top import top_command
from vmserve.client.client import Client
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.server.config import ServerConfig
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.routes.admin import MODEL_PATHS
from vmserve.testing import ScriptedTransport

HI: Body = {"messages": [{"role": "user", "content": "Hi"}]}
KEY = {"admin_api_key": "admin"}
Serve = Callable[..., Running]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Loading:
    """Loads a scripted engine when ``go`` is set, or raises ``fail``."""

    def __init__(
        self, engine: ScriptedTransport, fail: Exception | None = None, *, goes: bool = True
    ) -> None:
        self.client = Client(engine)
        self.go = threading.Event()
        self.fail = fail
        self.num = 0
        if goes:
            self.go.set()

    async def __call__(self) -> Client:
        self.num += 1
        await asyncio.to_thread(self.go.wait)
        if self.fail is not None:
            raise self.fail
        return self.client


def served(
    name: str, engine: ScriptedTransport | str | None, load: Any = None, **options: Any
) -> ServedModel:
    """``engine``: also the answer of one."""
    engine = ScriptedTransport(engine) if isinstance(engine, str) else engine
    client = None if engine is None else Client(engine)
    return ServedModel(ServerConfig(served_model_names=(name,), **options), client, load)


@pytest.fixture
def serve(start: Start) -> Serve:
    """Starts a server with models."""

    def make(name: str, table: Mapping[str, Any]) -> ServedModel:
        """What the admin route adds: ``model`` is the answer, or "bad"."""
        if table["model"] == "bad":
            raise ConfigurationError(f"model {name}: there is no such model")
        fail = ConfigurationError("it is broken") if table["model"] == "broken" else None
        return served(name, None, Loading(ScriptedTransport(table["model"]), fail))

    return lambda *models, **options: start(Models(models, make), **options)


@pytest.fixture
def two(serve: Serve) -> Running:
    return serve(
        served("a", ScriptedTransport("alpha", max_model_len=256)),
        served("b", ScriptedTransport("beta", max_model_len=32), chat_template="B"),
    )


def said(reply: Body) -> str:
    """The text of a reply of any route that generates."""
    if "choices" in reply:
        choice = reply["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    item = reply["output"][0] if "output" in reply else reply
    return str(item["content"][0]["text"])


def states(server: Running) -> dict[str, str]:
    cards = server.http.get("/v1/models").json()["data"]
    return {card["id"]: card["state"] for card in cards}


def fails(server: Running, status: int = 503, **body: Any) -> str:
    """What a completion is told."""
    return str(server.error(COMPLETIONS, {"prompt": "x", **body}, status)["message"])


def change(server: Running, what: str, **body: Any) -> Body:
    response = server.post(f"/v1/models/{what}", body, headers=ADMIN)
    assert response.status_code == 200, response.text
    reply: Body = response.json()
    return reply


def not_changed(server: Running, what: str, status: int = 400, **body: Any) -> str:
    """Why it is refused."""
    return str(refused(server.post(f"/v1/models/{what}", body, headers=ADMIN), status)["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "Hi"}),
        (CHAT, HI),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**HI, "max_tokens": 9}),
        ("/invocations", {"prompt": "Hi"}),
        ("/invocations", HI),
    ],
)
def test_a_request_gets_the_model_that_it_names(two: Running, path: str, body: Body) -> None:
    for name, text in ((None, "alpha"), ("a", "alpha"), ("b", "beta")):
        reply = two.ok(path, body if name is None else {**body, "model": name})
        assert (said(reply), reply["model"]) == (text, name or "a")
    error = two.error(path, {**body, "model": "c"}, 404)
    assert "The model `c` does not exist." in error["message"]


def test_tokens_templates_and_limits_are_the_models_own(two: Running) -> None:
    tokens, ours = (two.ok("/tokenize", {**HI, "model": name}) for name in ("a", "b"))
    assert (tokens["max_model_len"], ours["max_model_len"]) == (256, 32)
    text = two.ok("/detokenize", {"tokens": ours["tokens"], "model": "b"})["prompt"]
    assert text == "B" + two.ok("/detokenize", {"tokens": tokens["tokens"]})["prompt"]
    count, counted = {**HI, "max_tokens": 1}, "/v1/messages/count_tokens"
    counts = [two.ok(counted, {**count, "model": name})["input_tokens"] for name in ("a", "b")]
    assert counts == [tokens["count"], ours["count"]]
    for path in ("/tokenize", "/detokenize", counted, "/v1/embeddings"):
        body = {"tokens": [5], "input": "x", "prompt": "x", **(count if path == counted else {})}
        two.error(path, {**body, "model": "c"}, 404)
    two.complete(prompt="x" * 40, model="a")
    assert "32" in fails(two, 400, prompt="x" * 40, model="b")
    assert two.ok("/v1/embeddings", {"input": "xxx", "model": "b"})["model"] == "b"


def test_what_the_server_tells_of_models(two: Running, start: Start) -> None:
    cards = two.http.get("/v1/models").json()["data"]
    told = [(card["id"], card["max_model_len"], card["state"]) for card in cards]
    assert told == [("a", 256, "ready"), ("b", 32, "ready")]
    assert two.http.get("/v1/models/b").json() == cards[1]
    assert two.http.get("/v1/models/c").status_code == 404
    two.complete(model="b")
    text = two.http.get("/metrics").text
    for name, count in (("a", 0.0), ("b", 1.0)):
        labels = f'engine="0",finished_reason="stop",model_name="{name}"'
        assert f"vmserve:request_success_total{{{labels}}} {count}" in text
    assert text.count("# TYPE vmserve:request_success_total counter") == 1
    assert two.http.get("/v1/kv?model=b").status_code == 200
    assert two.http.get("/v1/kv?model=c").status_code == 404
    assert two.http.get("/v1/kv/live?model=b").json()["model"] == "b"
    names = two.http.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]
    assert names["properties"]["model"]["anyOf"][0]["enum"] == ["a", "b"]
    # One model is told of as ever.
    assert "state" not in start().http.get("/v1/models").json()["data"][0]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two models have the name 'a'"):
        Models([served("a", "alpha"), served("a", "beta")])


def test_queues_are_the_models_own(serve: Serve) -> None:
    full = ScriptedTransport("alpha")
    server = serve(served("a", full, max_queued_requests=1), served("b", "beta"))
    go_on = pause(server, full)
    one = later(server.complete, model="a")
    until(lambda: len(full.running) == 1)
    full.num_waiting = 1
    assert "overloaded" in fails(server, 429, model="a")
    assert said(server.complete(model="b")) == "beta"
    text = server.http.get("/metrics").text
    for name, count in (("a", 1.0), ("b", 0.0)):
        labels = f'{{engine="0",model_name="{name}"}}'
        assert f"vmserve:admission_rejections_total{labels} {count}" in text
    go_on()
    assert said(one.result()) == "alpha"


def test_one_of_several_that_dies_leaves_the_others(serve: Serve) -> None:
    dead = ScriptedTransport("alpha")
    server = serve(served("a", dead), served("b", "beta"), engine_death_linger=0.1)
    dead.facts.is_dead = True
    dead.died.set_result(None)
    until(lambda: states(server)["a"] == "failed")
    assert "stopped" in fails(server, model="a")
    assert said(server.complete(model="b")) == "beta"
    assert server.http.get("/health").status_code == 200
    server.close()
    assert server.death is None


def test_requests_wait_for_one_start_and_may_leave(serve: Serve) -> None:
    loading = Loading(ScriptedTransport("beta"), goes=False)
    model = served("b", None, loading)
    server = serve(served("a", "alpha"), model)
    assert server.http.get("/v1/models/b").json()["max_model_len"] is None
    assert 'model_name="b"' in server.http.get("/metrics").text
    waiting = [later(server.complete, model="b") for _ in range(3)]
    until(lambda: model.num_waiting == 3)
    waits = 'vmserve:model_requests_waiting{engine="0",model_name="b"} 3.0'
    assert waits in server.http.get("/metrics").text
    assert "model to load" in fails(server, 504, model="b", request_timeout=0.05)
    with pytest.raises(httpx.TimeoutException):
        server.post(COMPLETIONS, {"prompt": "x", "model": "b"}, timeout=0.05)
    until(lambda: model.num_waiting == 3)
    assert states(server) == {"a": "ready", "b": "waking"}
    assert said(server.complete()) == "alpha"
    loading.go.set()
    assert [said(each.result()) for each in waiting] == ["beta"] * 3
    assert loading.num == 1
    assert states(server) == {"a": "ready", "b": "ready"}
    assert model.waited_seconds > 0


def test_a_model_that_does_not_start_is_tried_again_after_a_pause(serve: Serve) -> None:
    fail = ConfigurationError("cannot read /models/b/config.json: it has gone (~/b)")
    clock, loading = Clock(), Loading(ScriptedTransport("beta"), fail)
    model = ServedModel(ServerConfig(served_model_names=("b",)), None, loading, clock=clock)
    server = serve(served("a", "alpha"), model)
    for now, num in ((100.0, 1), (100.5, 1), (101.5, 2), (102.5, 2)):
        clock.now = now
        response = server.post(COMPLETIONS, {"prompt": "x", "model": "b"})
        told = refused(response, 503)["message"]
        assert told == "The model b did not start: cannot read config.json: it has gone (b)"
        assert response.headers["retry-after"] in ("1", "2")
        assert loading.num == num
    assert states(server) == {"a": "ready", "b": "failed"}
    assert said(server.complete()) == "alpha"
    loading.fail, clock.now = KeyError("of a library"), 150.0
    assert "of a library" in fails(server, model="b")
    loading.fail, clock.now = None, 200.0
    assert said(server.complete(model="b")) == "beta"


def test_an_idle_model_sleeps_and_its_next_request_wakes_it(serve: Serve) -> None:
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine, idle_unload=0.05))
    until(lambda: engine.stopped)
    assert server.http.get("/v1/models/a").json()["state"] == "asleep"
    # What needs no engine does not wake it.
    server.ok("/tokenize", {"prompt": "x"})
    fails(server, 400, max_tokens=999)
    assert engine.stopped
    go_on = pause(server, engine)
    one = later(server.complete)
    until(lambda: len(engine.running) == 1)
    with pytest.raises(AssertionError):  # a request that runs keeps it awake
        until(lambda: engine.stopped, 0.3)
    go_on()
    assert said(one.result()) == "alpha"
    until(lambda: engine.stopped)
    engine.fail_to_wake = ConfigurationError("gone")
    assert "gone" in fails(server)
    assert engine.num_wakes == 1
    assert server.http.get("/health").status_code == 200


def asleep(serve: Serve, **shape: Any) -> tuple[Running, ServedModel, ScriptedTransport]:
    """A server whose second model sleeps, and is not woken until its ``waking`` is set."""
    engine = ScriptedTransport("beta", **shape)
    model = served("b", engine)
    server = serve(served("a", "alpha"), model, **KEY)
    server.on_loop_async(model.sleep)
    server.on_loop(engine.waking.clear)
    return server, model, engine


def test_the_wait_for_waking_is_taken_off_the_requests_time(serve: Serve) -> None:
    server, model, engine = asleep(serve, request_timeout=20.0)
    assert "its model to wake" in fails(server, 504, model="b", request_timeout=0.05)
    one = later(server.complete, model="b")
    until(lambda: model.num_waiting == 1)
    server.on_loop(engine.waking.set)
    assert said(one.result()) == "beta"
    assert 0 < engine.requests[-1][2]["timeout"] < 20


def test_only_the_admin_changes_models(serve: Serve) -> None:
    server = serve(served("a", "alpha"), **KEY)
    for path in MODEL_PATHS:
        assert server.post(path, {"model": "a", "name": "b"}).status_code == 401
        assert server.http.get(path).status_code == 404  # no model of this name
    assert states(server) == {"a": "ready"}


def test_models_come_and_go(serve: Serve) -> None:
    server = serve(served("a", "alpha"), **KEY)
    assert change(server, "add", model="beta", name="b")["state"] == "ready"
    assert said(server.complete(model="b")) == "beta"
    assert change(server, "add", model="gamma", preload=False)["state"] == "asleep"
    assert said(server.complete(model="gamma")) == "gamma"
    for body, told in (
        ({"model": "bad"}, "there is no such model"),
        ({"model": "broken"}, "it is broken"),
        ({"model": "beta", "name": "b"}, "two models have the name 'b'"),
        ({"model": "x", "weight": 0}, "weight"),
    ):
        assert told in not_changed(server, "add", **body)
    assert states(server) == {"a": "ready", "b": "ready", "gamma": "ready"}
    document = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert document["ModelRequest"]["properties"]["model"]["enum"] == ["a", "b", "gamma"]
    assert change(server, "remove", model="a")["state"] == "leaving"
    fails(server, 404, model="a")
    assert said(server.complete()) == "beta"  # the first that is left
    not_changed(server, "remove", 404, model="a")
    change(server, "remove", model="b")
    assert "only model" in not_changed(server, "remove", model="gamma")
    not_changed(server, "change", model="gamma", weight=2)


def test_a_removed_model_finishes_what_it_has(serve: Serve) -> None:
    engine = ScriptedTransport("beta")
    server = serve(served("a", "alpha"), served("b", engine), **KEY)
    go_on = pause(server, engine)
    one = later(server.complete, model="b")
    until(lambda: len(engine.running) == 1)
    removing = later(change, server, "remove", model="b", timeout=60)
    until(lambda: states(server).get("b") == "leaving")
    assert "still being removed" in not_changed(server, "add", name="b", model="beta")
    fails(server, 404, model="b")
    assert not engine.stopped
    go_on()
    assert said(one.result()) == "beta"
    removing.result()
    assert engine.stopped
    assert states(server) == {"a": "ready"}


def test_a_model_that_is_removed_while_requests_wait_for_it(serve: Serve) -> None:
    server, model, _ = asleep(serve)
    one = later(fails, server, model="b")
    until(lambda: model.num_waiting == 1)
    change(server, "remove", model="b", timeout=0.01)
    assert one.result() == "The model b is being removed."


def test_sleep_and_wake_by_the_admin(serve: Serve) -> None:
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine), **KEY)
    assert change(server, "sleep", model="a")["state"] == "asleep"
    assert engine.stopped
    live = server.http.get("/v1/kv/live").json()
    assert (live["pool"]["num_pages"], live["models"][0]["state"]) == (0, "asleep")
    assert change(server, "wake", model="a")["num_wakes"] == 1
    assert said(server.complete()) == "alpha"
    text = server.http.get("/metrics").text
    assert 'vmserve:model_state{engine="0",model_name="a",state="ready"} 1.0' in text
    assert 'vmserve:model_wake_seconds_count{engine="0",model_name="a"} 1.0' in text


def test_a_model_whose_engine_is_dead_does_not_wake_until_it_is_back(serve: Serve) -> None:
    """As in the pause before its restart: the model is ready, its engine is not."""
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine), **KEY)
    engine.facts.is_dead, engine.facts.retry_seconds = True, 3.5
    for path, body in (("/v1/models/wake", {"model": "a"}), (COMPLETIONS, {"prompt": "x"})):
        response = server.post(path, body, headers=ADMIN if "wake" in path else {})
        assert "stopped" in refused(response, 503)["message"]
        assert response.headers["retry-after"] == "4"
    engine.facts.retry_seconds = None
    assert "retry-after" not in server.post(COMPLETIONS, {"prompt": "x"}).headers
    engine.facts.is_dead = False
    assert change(server, "wake", model="a")["state"] == "ready"


def test_a_model_that_failed_or_whose_engine_died_can_be_put_to_sleep(serve: Serve) -> None:
    engine = ScriptedTransport("alpha")
    loading = Loading(ScriptedTransport("beta"), ConfigurationError("it is broken"))
    server = serve(served("a", engine), served("b", None, loading), **KEY)
    engine.facts.is_dead = True
    change(server, "sleep", model="a")
    assert engine.stopped  # which makes it forget that it died
    assert "it is broken" in not_changed(server, "wake", 503, model="b")
    row = change(server, "sleep", model="b")
    assert (row["state"], row["failure"]) == ("asleep", "")
    loading.fail = None
    assert said(server.complete(model="b")) == "beta"  # at once, not after the pause


def test_top_shows_models(two: Running, capsys: Said) -> None:
    top_command(two.url, model="b", once=True)
    text = capsys.readouterr().out
    assert text.startswith("b, vmserve ")
    words = [line.split()[:2] for line in text.splitlines()]
    assert [each for each in words if "ready" in each] == [["a", "ready"], ["b", "ready"]]
    with pytest.raises(VmserveError, match="`c` does not exist"):
        top_command(two.url, model="c", once=True)
