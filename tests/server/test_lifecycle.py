"""Clients that leave, and servers that stop."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running, error_of
from tests.support.serving import CHAT, COMPLETIONS, Patch, Start, later, load, pause, raw_request
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import bind
from vmserve.testing import ScriptedTransport

BODIES: dict[str, Body] = {
    COMPLETIONS: {"prompt": ["x", "y"]},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
JSON = b"Content-Type: application/json"


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 20)


def head(num_bytes: int, kind: bytes = JSON) -> bytes:
    """That of a completion with so many bytes."""
    first = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    return first + b"%b\r\nContent-Length: %d\r\n\r\n" % (kind, num_bytes)


def everything(raw: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    answer = b""
    while piece := raw.recv(4096):
        answer += piece
    return answer


def error_sent(raw: socket.socket) -> bytes:
    """An error's whole response."""
    answer = b""
    while not answer.endswith(b"}}"):
        answer += raw.recv(4096)
    return answer


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(start: Start, path: str, stream: bool) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    go_on = pause(server, engine)
    num_requests = 2 if path == COMPLETIONS else 1
    raw = raw_request(server, path, {**BODIES[path], "stream": stream})
    until(lambda: len(engine.running) == num_requests)
    assert load(server) == 1
    raw.close()
    until(lambda: not engine.running)
    assert len(engine.aborted) == num_requests
    assert engine.finished == []
    until(lambda: load(server) == 0)
    # Nothing of it stays counted against those who come next.
    assert server.on_loop(lambda: engine.stats()["num_requests_running"]) == 0
    go_on()
    server.ok(path, BODIES[path])


def test_many_that_leave_at_once_and_one_during_its_own_upload(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    go_on = pause(server, engine)
    with connected(server) as raw:
        raw.sendall(head(100) + b'{"prompt"')
        until(lambda: load(server) == 1)
    until(lambda: load(server) == 0)
    assert engine.requests == []
    raws = [raw_request(server, CHAT, {**BODIES[CHAT], "stream": True}) for _ in range(200)]
    until(lambda: len(engine.running) == 200)
    for raw in raws:
        raw.close()
    until(lambda: not engine.running)
    go_on()
    assert server.chat()["choices"][0]["message"]["content"] == "hello"


def test_a_body_that_does_not_arrive(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr("vmserve.server.routes.body.BODY_TIMEOUT_SECONDS", 0.05)
    with connected(start()) as raw:
        raw.sendall(head(10))
        answer = everything(raw)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize(
    ("kind", "status"), [(JSON, b"413"), (b"Content-Type: text/plain", b"415")]
)
def test_a_body_that_goes_on_after_its_answer(
    start: Start, monkeypatch: Patch, kind: bytes, status: bytes
) -> None:
    """It is read for some time, so that the client sees the answer, and then cut off."""
    monkeypatch.setattr("vmserve.server.net.connection.BODY_TIMEOUT_SECONDS", 0.5)
    server = start()
    with connected(server) as raw:
        raw.sendall(head(9999999, kind))
        assert error_sent(raw).startswith(b"HTTP/1.1 " + status)
        sent = 0
        with pytest.raises(OSError, match=r"Connection reset|Broken pipe"):  # noqa: PT012
            for _ in range(400):
                raw.sendall(b"x" * 100)
                sent += 100
                time.sleep(0.05)
        assert sent > 100
    # A body that does end leaves its connection as good as new.
    with connected(server) as raw:
        raw.sendall(head(5_000_000, kind))
        assert error_sent(raw).startswith(b"HTTP/1.1 " + status)
        raw.sendall(b"x" * 5_000_000)
        for pause_seconds in (0.7, 0):  # and nothing cuts it off later
            raw.sendall(HEALTH)
            assert raw.recv(4096).startswith(b"HTTP/1.1 200")
            time.sleep(pause_seconds)


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 413), ("/nope", 404)])
def test_a_client_that_sends_all_before_it_reads(start: Start, path: str, status: int) -> None:
    """Also one that wants the connection closed, as urllib does: it is not reset."""
    server = start()
    sent = urllib.request.Request(
        server.url + path, data=b"x" * 40_000_000, headers={"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(sent, timeout=60)
    with caught.value as answer:
        assert answer.status == status
        assert json.loads(answer.read())["error"]["status"] == status


def test_a_client_that_never_reads_is_cut(start: Start) -> None:
    engine = ScriptedTransport("x" * 200, max_model_len=2**20)
    server = start(engine, write_timeout=0.05)
    # Far more than what the sockets and the server buffer.
    body = {"prompt": "x", "n": 100, "max_tokens": 2**19, "logprobs": 20, "stream": True}
    with raw_request(server, COMPLETIONS, {**body, "ignore_eos": True}):
        until(lambda: len(engine.running) > 0)
        until(lambda: not engine.running, 60)
        until(lambda: load(server) == 0)
        assert len(engine.aborted) == 1


# -- draining -------------------------------------------------------------------------------

Held = tuple[Running, ScriptedTransport, Callable[[], None], Future[Body], Future[list[str]]]


@pytest.fixture
def held(start: Start) -> Callable[..., Held]:
    """A whole and a streamed request that the engine holds after their first token."""

    def begin(**options: Any) -> Held:
        engine = ScriptedTransport()
        server = start(engine, **options)
        go_on = pause(server, engine)
        events: list[str] = []

        def stream() -> list[str]:
            events.extend(server.events(COMPLETIONS, {"prompt": "x"}))
            return events

        whole, streamed = later(server.complete), later(stream)
        until(lambda: len(engine.running) == 2 and events != [])
        return server, engine, go_on, whole, streamed

    return begin


def test_admitted_requests_finish(held: Any) -> None:
    server, engine, go_on, whole, streamed = held(shutdown_timeout=60)
    server.begin_stop()
    until(lambda: server.http.get("/health").status_code == 503)
    for path in (COMPLETIONS, CHAT, "/tokenize", "/v1/models", "/ready", "/nope"):
        response = server.post(path, {"prompt": "x"})
        assert response.status_code == 503
        assert "shutting down" in error_of(response)["message"]
        assert response.headers["retry-after"] == "5"
    for path in ("/live", "/metrics", "/load", "/v1/kv"):
        assert server.http.get(path).status_code == 200
    assert load(server) == 2
    go_on()
    assert whole.result(30)["choices"][0]["text"] == "hello"
    assert streamed.result(30)[-1] == "[DONE]"
    server.join()
    assert engine.stopped
    assert engine.aborted == []


def test_after_the_timeout_the_rest_is_aborted(held: Any) -> None:
    server, engine, _, whole, streamed = held(shutdown_timeout=0)
    server.begin_stop()
    [choice] = whole.result(30)["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("abort", "h")
    *_, last, done = streamed.result(30)
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
    server.join()
    assert len(engine.finished) == 2


def test_an_idle_server_stops_at_once_with_open_connections(start: Start) -> None:
    server = start(shutdown_timeout=60)
    assert server.http.get("/health").status_code == 200  # leaves a connection open
    server.begin_stop()
    server.join()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


# -- starting -------------------------------------------------------------------------------


def test_where_nobody_can_listen(shared: Running) -> None:
    hosts = ("256.1.1.1", "no such host", "203.0.113.1")
    for host, port, told in (
        ("127.0.0.1", shared.port, rf"127.0.0.1:{shared.port} is in use"),
        *((host, 0, f"cannot listen on {host}") for host in hosts),
    ):
        with pytest.raises(VmserveError, match=told):
            bind(ServerConfig(served_model_names=("m",), host=host, port=port))


def test_sockets_left_behind(start: Start, tmp_path: Any) -> None:
    path, file = tmp_path / "s", tmp_path / "f"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    file.write_text("precious")
    server = start(uds=str(path))
    assert server.http.get("/health").status_code == 200
    for uds, error, told in (
        (path, VmserveError, "in use"),
        (file, ConfigurationError, "is there and no socket"),
        (tmp_path / ("s" * 200), ConfigurationError, "AF_UNIX path too long"),
    ):
        with pytest.raises(error, match=told):
            bind(ServerConfig(served_model_names=("m",), uds=str(uds)))
    assert file.read_text() == "precious"


HALF = HEALTH[:-2] + b"X-Slow: "


@pytest.mark.parametrize(
    ("used", "sent"), [(b"", b""), (b"", HALF), (HEALTH, HALF)], ids=["nothing", "half", "next"]
)
def test_a_head_that_does_not_come(
    start: Start, monkeypatch: Patch, used: bytes, sent: bytes
) -> None:
    monkeypatch.setattr("vmserve.server.net.connection.HEAD_TIMEOUT_SECONDS", 0.2)
    with connected(start()) as raw:
        raw.sendall(used)
        assert not used or raw.recv(4096).startswith(b"HTTP/1.1 200")
        raw.sendall(sent)
        answer = everything(raw)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"status":408' in answer


def test_a_line_per_request_with_its_id(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start()
    with caplog.at_level("INFO", logger="vmserve.server.routes.middleware"):
        server.post(COMPLETIONS, {"prompt": "x"}, headers={"x-request-id": "mine"})
        server.http.get("/nope%0Afaked")
        server.http.get("/metrics")
    first, second = caplog.messages
    assert first.startswith(f"POST '{COMPLETIONS}': 200 after ")
    assert second.startswith("GET '/nope\\nfaked': 404 after ")
