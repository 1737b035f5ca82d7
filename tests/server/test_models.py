"""Several models behind one server: which one a request gets, and how models sleep and wake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running, error_of
from vmserve.cli.top import top_command
from vmserve.client.client import Client
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.server.config import ServerConfig
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.routes.admin import MODEL_PATHS
from vmserve.testing import ScriptedTransport

CHAT: Body = {"messages": [{"role": "user", "content": "Hi"}]}


def served(
    name: str, engine: ScriptedTransport | None, load: Any = None, **options: Any
) -> ServedModel:
    client = None if engine is None else Client(engine)
    return ServedModel(ServerConfig(served_model_names=(name,), **options), client, load)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """Starts a server with models."""
    started: list[Running] = []

    def make(name: str, table: Mapping[str, Any]) -> ServedModel:
        """What the admin route adds: ``model`` is the answer, or "bad"."""
        if table["model"] == "bad":
            raise ConfigurationError(f"model {name}: there is no such model")
        loading = Loading(ScriptedTransport(table["model"]))
        loading.go.set()
        if table["model"] == "broken":
            loading.fail = ConfigurationError("it is broken")
        return served(name, None, loading)

    def begin(*models: ServedModel, **options: Any) -> Running:
        running = Running(Models(models, make), **options)
        started.append(running)
        return running

    yield begin
    for running in started:
        running.close()


@pytest.fixture
def two(serve: Callable[..., Running]) -> Running:
    return serve(
        served("a", ScriptedTransport("alpha", max_model_len=256)),
        served("b", ScriptedTransport("beta", max_model_len=32), chat_template="B"),
    )


def said(reply: Body) -> str:
    """The text of a reply of any route that generates."""
    found: str
    if "output" in reply:
        found = reply["output"][0]["content"][0]["text"]
    elif "content" in reply:
        found = reply["content"][0]["text"]
    else:
        choice = reply["choices"][0]
        found = choice["text"] if "text" in choice else choice["message"]["content"]
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/invocations", {"prompt": "Hi"}),
        ("/invocations", CHAT),
    ],
)
def test_a_request_gets_the_model_that_it_names(two: Running, path: str, body: Body) -> None:
    for name, text in ((None, "alpha"), ("a", "alpha"), ("b", "beta")):
        reply = two.ok(path, body if name is None else {**body, "model": name})
        assert said(reply) == text
        assert reply["model"] == (name or "a")
    error = two.error(path, {**body, "model": "c"}, 404)
    assert "The model `c` does not exist." in error["message"]


def test_tokens_and_templates_are_the_models_own(two: Running) -> None:
    tokens = two.ok("/tokenize", {**CHAT, "model": "a"})
    ours = two.ok("/tokenize", {**CHAT, "model": "b"})
    assert (tokens["max_model_len"], ours["max_model_len"]) == (256, 32)
    text = two.ok("/detokenize", {"tokens": ours["tokens"], "model": "b"})["prompt"]
    assert text == "B" + two.ok("/detokenize", {"tokens": tokens["tokens"]})["prompt"]
    count = {**CHAT, "max_tokens": 1}
    counts = [
        two.ok("/v1/messages/count_tokens", {**count, "model": name})["input_tokens"]
        for name in ("a", "b")
    ]
    assert counts == [tokens["count"], ours["count"]]
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/embeddings"):
        body = {"tokens": [5], "input": "x", "prompt": "x", **(count if "count" in path else {})}
        two.error(path, {**body, "model": "c"}, 404)


def test_limits_are_the_models_own(two: Running) -> None:
    long = "x" * 40
    two.complete(prompt=long, model="a")
    assert "32" in two.error("/v1/completions", {"prompt": long, "model": "b"})["message"]
    sizes = [two.ok("/v1/embeddings", {"input": "x" * n, "model": "b"}) for n in (3, 4)]
    assert [each["model"] for each in sizes] == ["b", "b"]


def test_what_the_server_tells_of_models(two: Running) -> None:
    cards = two.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"], card["state"]) for card in cards] == [
        ("a", 256, "ready"),
        ("b", 32, "ready"),
    ]
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


def test_one_model_is_told_of_as_ever(start: Callable[..., Running]) -> None:
    assert "state" not in start().http.get("/v1/models").json()["data"][0]


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two models have the name 'a'"):
        Models([served("a", ScriptedTransport()), served("a", ScriptedTransport())])


def test_queues_are_the_models_own(serve: Callable[..., Running]) -> None:
    full, free = ScriptedTransport("alpha"), ScriptedTransport("beta")
    server = serve(served("a", full, max_queued_requests=1), served("b", free))
    full.pause = server.on_loop(asyncio.Event)
    one = threading.Thread(target=lambda: server.complete(model="a"))
    one.start()
    until(lambda: len(full.running) == 1)
    full.num_waiting = 1
    response = server.post("/v1/completions", {"prompt": "Hi", "model": "a"})
    assert response.status_code == 429
    assert "overloaded" in error_of(response)["message"]
    assert said(server.complete(model="b")) == "beta"
    text = server.http.get("/metrics").text
    assert 'vmserve:admission_rejections_total{engine="0",model_name="a"} 1.0' in text
    assert 'vmserve:admission_rejections_total{engine="0",model_name="b"} 0.0' in text
    server.on_loop(full.pause.set)
    one.join()


def test_one_of_several_that_dies_leaves_the_others(serve: Callable[..., Running]) -> None:
    dead, alive = ScriptedTransport("alpha"), ScriptedTransport("beta")
    server = serve(served("a", dead), served("b", alive), engine_death_linger=0.1)
    dead.facts.is_dead = True
    dead.died.set_result(None)
    until(lambda: server.http.get("/v1/models/a").json()["state"] == "failed")
    assert (
        "stopped" in server.error("/v1/completions", {"prompt": "x", "model": "a"}, 503)["message"]
    )
    assert said(server.complete(model="b")) == "beta"
    assert server.http.get("/health").status_code == 200
    server.close()
    assert server.death is None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Loading:
    """Loads a scripted engine when ``go`` is set, or raises ``fail``."""

    def __init__(self, engine: ScriptedTransport) -> None:
        self.client = Client(engine)
        self.go = threading.Event()
        self.fail: Exception | None = None
        self.num = 0

    async def __call__(self) -> Client:
        self.num += 1
        await asyncio.to_thread(self.go.wait)
        if self.fail is not None:
            raise self.fail
        return self.client


def test_requests_wait_for_one_start_and_may_leave(serve: Callable[..., Running]) -> None:
    loading = Loading(ScriptedTransport("beta"))
    model = served("b", None, loading)
    server = serve(served("a", ScriptedTransport("alpha")), model)
    assert server.http.get("/v1/models/b").json()["max_model_len"] is None
    assert 'model_name="b"' in server.http.get("/metrics").text
    replies: list[str] = []
    waiting = [
        threading.Thread(target=lambda: replies.append(said(server.complete(model="b"))))
        for _ in range(3)
    ]
    for each in waiting:
        each.start()
    until(lambda: model.num_waiting == 3)
    body = {"prompt": "x", "model": "b", "request_timeout": 0.05}
    assert "model to load" in server.error("/v1/completions", body, 504)["message"]
    with pytest.raises(httpx.TimeoutException):
        server.post("/v1/completions", {"prompt": "x", "model": "b"}, timeout=0.05)
    until(lambda: model.num_waiting == 3)
    assert server.http.get("/v1/models/b").json()["state"] == "waking"
    assert said(server.complete()) == "alpha"
    loading.go.set()
    for each in waiting:
        each.join()
    assert (replies, loading.num) == (["beta"] * 3, 1)
    assert server.http.get("/v1/models/b").json()["state"] == "ready"
    assert model.waited_seconds > 0


def test_a_model_that_does_not_start_is_tried_again_after_a_pause(
    serve: Callable[..., Running],
) -> None:
    clock, loading = Clock(), Loading(ScriptedTransport("beta"))
    loading.go.set()
    loading.fail = ConfigurationError("cannot read /models/b/config.json: it has gone (~/b)")
    model = ServedModel(ServerConfig(served_model_names=("b",)), None, loading, clock=clock)
    server = serve(served("a", ScriptedTransport("alpha")), model)
    for now, num in ((100.0, 1), (100.5, 1), (101.5, 2), (102.5, 2)):
        clock.now = now
        response = server.post("/v1/completions", {"prompt": "x", "model": "b"})
        assert response.status_code == 503
        told = error_of(response)["message"]
        assert told == "The model b did not start: cannot read config.json: it has gone (b)"
        assert response.headers["retry-after"] in ("1", "2")
        assert loading.num == num
    assert server.http.get("/v1/models/b").json()["state"] == "failed"
    assert said(server.complete()) == "alpha"
    loading.fail, clock.now = KeyError("of a library"), 150.0
    assert "of a library" in server.error("/v1/completions", {"model": "b"}, 503)["message"]
    loading.fail, clock.now = None, 200.0
    assert said(server.complete(model="b")) == "beta"


def test_an_idle_model_sleeps_and_its_next_request_wakes_it(serve: Callable[..., Running]) -> None:
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine, idle_unload=0.05))
    until(lambda: engine.stopped)
    assert server.http.get("/v1/models/a").json()["state"] == "asleep"
    # What needs no engine does not wake it.
    server.ok("/tokenize", {"prompt": "x"})
    server.error("/v1/completions", {"prompt": "x", "max_tokens": 999})
    assert engine.stopped
    engine.pause = server.on_loop(asyncio.Event)
    one = threading.Thread(target=lambda: server.complete())
    one.start()
    until(lambda: len(engine.running) == 1)
    with pytest.raises(AssertionError):  # a request that runs keeps it awake
        until(lambda: engine.stopped, 0.3)
    server.on_loop(engine.pause.set)
    one.join()
    until(lambda: engine.stopped)
    engine.fail_to_wake = ConfigurationError("gone")
    assert "gone" in server.error("/v1/completions", {"prompt": "x"}, 503)["message"]
    assert engine.num_wakes == 1
    assert server.http.get("/health").status_code == 200


def test_the_wait_for_waking_is_taken_off_the_requests_time(
    serve: Callable[..., Running],
) -> None:
    engine = ScriptedTransport("alpha", request_timeout=20.0)
    model = served("a", engine)
    server = serve(model)
    server.on_loop_async(model.sleep)
    server.on_loop(engine.waking.clear)
    body = {"prompt": "x", "request_timeout": 0.05}
    assert "its model to wake" in server.error("/v1/completions", body, 504)["message"]
    one = threading.Thread(target=lambda: server.complete())
    one.start()
    until(lambda: model.num_waiting == 1)
    server.on_loop(engine.waking.set)
    one.join()
    assert 0 < engine.requests[-1][2]["timeout"] < 20


KEY = {"admin_api_key": "admin"}
ADMIN = {"authorization": "Bearer admin"}


def change(server: Running, what: str, status: int = 200, **body: Any) -> Body:
    response = server.post(f"/v1/models/{what}", body, headers=ADMIN)
    assert response.status_code == status, response.text
    reply: Body = response.json()
    return reply


def states(server: Running) -> dict[str, str]:
    cards = server.http.get("/v1/models").json()["data"]
    return {card["id"]: card["state"] for card in cards}


def test_only_the_admin_changes_models(serve: Callable[..., Running]) -> None:
    server = serve(served("a", ScriptedTransport("alpha")), admin_api_key="admin")
    for path in MODEL_PATHS:
        body = {"model": "a", "name": "b"}
        assert server.post(path, body).status_code == 401
        assert server.http.get(path).status_code == 404  # no model of this name
    assert states(server) == {"a": "ready"}


def test_models_come_and_go(serve: Callable[..., Running]) -> None:
    server = serve(served("a", ScriptedTransport("alpha")), admin_api_key="admin")
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
        assert told in change(server, "add", 400, **body)["error"]["message"]
    assert states(server) == {"a": "ready", "b": "ready", "gamma": "ready"}
    document = server.http.get("/openapi.json").json()["components"]["schemas"]
    assert document["ModelRequest"]["properties"]["model"]["enum"] == ["a", "b", "gamma"]
    assert change(server, "remove", model="a")["state"] == "leaving"
    server.error("/v1/completions", {"prompt": "x", "model": "a"}, 404)
    assert said(server.complete()) == "beta"  # the first that is left
    change(server, "remove", 404, model="a")
    change(server, "remove", model="b")
    assert "only model" in change(server, "remove", 400, model="gamma")["error"]["message"]
    change(server, "change", 400, model="gamma", weight=2)


def test_a_removed_model_finishes_what_it_has(serve: Callable[..., Running]) -> None:
    engine = ScriptedTransport("beta")
    server = serve(
        served("a", ScriptedTransport("alpha")), served("b", engine), admin_api_key="admin"
    )
    engine.pause = server.on_loop(asyncio.Event)
    replies: list[Body] = []
    one = threading.Thread(target=lambda: replies.append(server.complete(model="b")))
    one.start()
    until(lambda: len(engine.running) == 1)
    removing = threading.Thread(target=lambda: change(server, "remove", model="b", timeout=60))
    removing.start()
    until(lambda: states(server).get("b") == "leaving")
    told = change(server, "add", 400, name="b", model="beta")["error"]["message"]
    assert "still being removed" in told
    server.error("/v1/completions", {"prompt": "x", "model": "b"}, 404)
    assert not engine.stopped
    server.on_loop(engine.pause.set)
    for thread in (one, removing):
        thread.join()
    assert said(replies[0]) == "beta"
    assert engine.stopped
    assert states(server) == {"a": "ready"}


def test_a_model_that_is_removed_while_requests_wait_for_it(serve: Callable[..., Running]) -> None:
    engine = ScriptedTransport("beta")
    model = served("b", engine)
    server = serve(served("a", ScriptedTransport("alpha")), model, admin_api_key="admin")
    server.on_loop_async(model.sleep)
    server.on_loop(engine.waking.clear)
    told: list[str] = []

    def ask() -> None:
        error = server.error("/v1/completions", {"prompt": "x", "model": "b"}, 503)
        told.append(error["message"])

    one = threading.Thread(target=ask)
    one.start()
    until(lambda: model.num_waiting == 1)
    change(server, "remove", model="b", timeout=0.01)
    one.join()
    assert told == ["The model b is being removed."]


def test_sleep_and_wake_by_the_admin(serve: Callable[..., Running]) -> None:
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine), admin_api_key="admin")
    assert change(server, "sleep", model="a")["state"] == "asleep"
    assert engine.stopped
    live = server.http.get("/v1/kv/live").json()
    assert (live["pool"]["num_pages"], live["models"][0]["state"]) == (0, "asleep")
    assert change(server, "wake", model="a")["num_wakes"] == 1
    assert said(server.complete()) == "alpha"
    text = server.http.get("/metrics").text
    assert 'vmserve:model_state{engine="0",model_name="a",state="ready"} 1.0' in text
    assert 'vmserve:model_wake_seconds_count{engine="0",model_name="a"} 1.0' in text


def test_a_model_whose_engine_is_dead_does_not_wake_until_it_is_back(
    serve: Callable[..., Running],
) -> None:
    """As in the pause before its restart: the model is ready, its engine is not."""
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine), admin_api_key="admin")
    engine.facts.is_dead, engine.facts.retry_seconds = True, 3.5
    for path, body in (("/v1/models/wake", {"model": "a"}), ("/v1/completions", {"prompt": "x"})):
        response = server.post(path, body, headers=ADMIN if "wake" in path else {})
        assert response.status_code == 503
        assert "stopped" in error_of(response)["message"]
        assert response.headers["retry-after"] == "4"
    engine.facts.retry_seconds = None
    assert "retry-after" not in server.post("/v1/completions", {"prompt": "x"}).headers
    engine.facts.is_dead = False
    assert change(server, "wake", model="a")["state"] == "ready"


def test_a_model_whose_engine_died_for_good_can_be_put_to_sleep(
    serve: Callable[..., Running],
) -> None:
    engine = ScriptedTransport("alpha")
    server = serve(served("a", engine), admin_api_key="admin")
    engine.facts.is_dead = True
    change(server, "sleep", model="a")
    assert engine.stopped  # which makes it forget that it died


def test_a_model_that_failed_can_be_put_to_sleep(serve: Callable[..., Running]) -> None:
    loading = Loading(ScriptedTransport("beta"))
    loading.go.set()
    loading.fail = ConfigurationError("it is broken")
    server = serve(served("a", ScriptedTransport("alpha")), served("b", None, loading), **KEY)
    assert "it is broken" in change(server, "wake", 503, model="b")["error"]["message"]
    row = change(server, "sleep", model="b")
    assert (row["state"], row["failure"]) == ("asleep", "")
    loading.fail = None
    assert said(server.complete(model="b")) == "beta"  # at once, not after the pause


def test_top_shows_models(two: Running, capsys: pytest.CaptureFixture[str]) -> None:
    top_command(two.url, model="b", once=True)
    text = capsys.readouterr().out
    assert text.startswith("b, vmserve ")
    words = [line.split()[:2] for line in text.splitlines()]
    assert [each for each in words if "ready" in each] == [["a", "ready"], ["b", "ready"]]
    with pytest.raises(VmserveError, match="`c` does not exist"):
        top_command(two.url, model="c", once=True)
