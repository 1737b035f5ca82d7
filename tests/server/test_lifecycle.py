"""Clients that leave, and servers that stop."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running, error_of
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import bind
from vmserve.testing import ScriptedTransport

Start = Callable[..., Running]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES: dict[str, Body] = {
    COMPLETIONS: {"prompt": ["x", "y"]},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}


def raw_request(server: Running, path: str, body: Body) -> socket.socket:
    """A request on a socket that the test can drop at will."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = socket.create_connection(("127.0.0.1", server.port), 20)
    raw.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return raw


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


def load(server: Running) -> int:
    count: int = server.http.get("/load").json()["server_load"]
    return count


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(start: Start, path: str, stream: bool) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    engine.pause = server.on_loop(asyncio.Event)
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
    server.on_loop(engine.pause.set)
    server.ok(path, BODIES[path])


def test_a_client_that_leaves_during_its_own_upload(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    raw = socket.create_connection(("127.0.0.1", server.port), 20)
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\n"
        b'Content-Length: 100\r\n\r\n{"prompt"'
    )
    until(lambda: load(server) == 1)
    raw.close()
    until(lambda: load(server) == 0)
    assert engine.requests == []


def test_a_body_that_does_not_arrive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmserve.server.routes.body.BODY_TIMEOUT_SECONDS", 0.05)
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n"
        )
        answer = everything(raw)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize(
    ("head", "status"),
    [(b"Content-Type: application/json", b"413"), (b"Content-Type: text/plain", b"415")],
)
def test_a_body_that_goes_on_after_its_answer(
    start: Start, monkeypatch: pytest.MonkeyPatch, head: bytes, status: bytes
) -> None:
    """It is read for some time, so that the client sees the answer, and then cut off."""
    monkeypatch.setattr("vmserve.server.net.connection.BODY_TIMEOUT_SECONDS", 0.5)
    server = start()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%b\r\nContent-Length: 9999999\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
        raw.sendall(request % head)
        assert error_sent(raw).startswith(b"HTTP/1.1 " + status)
        sent = 0
        with pytest.raises(OSError, match=r"Connection reset|Broken pipe"):  # noqa: PT012
            for _ in range(400):
                raw.sendall(b"x" * 100)
                sent += 100
                time.sleep(0.05)
        assert sent > 100
    # A body that does end leaves its connection as good as new.
    with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
        raw.sendall(request.replace(b"9999999", b"5000000") % head)
        assert error_sent(raw).startswith(b"HTTP/1.1 " + status)
        raw.sendall(b"x" * 5_000_000)
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.7)  # and nothing cuts it off later
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("path", "status"), [(COMPLETIONS, 413), ("/nope", 404)])
def test_a_client_that_sends_all_before_it_reads(start: Start, path: str, status: int) -> None:
    """Also one that wants the connection closed, as urllib does: it is not reset."""
    server = start()
    sent = urllib.request.Request(
        server.url + path, data=b"x" * 40_000_000, headers={"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(sent, timeout=60)
    with refused.value as answer:
        assert answer.status == status
        assert json.loads(answer.read())["error"]["status"] == status


def test_a_client_that_never_reads_is_cut(start: Start) -> None:
    engine = ScriptedTransport("x" * 200, max_model_len=2**20)
    server = start(engine, write_timeout=0.05)
    # Far more than what the sockets and the server buffer.
    body = {"prompt": "x", "n": 100, "max_tokens": 2**19, "logprobs": 20, "stream": True}
    body["ignore_eos"] = True
    raw = raw_request(server, COMPLETIONS, body)
    try:
        until(lambda: len(engine.running) > 0)
        until(lambda: not engine.running, 60)
        until(lambda: load(server) == 0)
        assert len(engine.aborted) == 1
    finally:
        raw.close()


def test_many_that_leave_at_once(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    engine.pause = server.on_loop(asyncio.Event)
    raws = [raw_request(server, CHAT, {**BODIES[CHAT], "stream": True}) for _ in range(200)]
    until(lambda: len(engine.running) == 200)
    for raw in raws:
        raw.close()
    until(lambda: not engine.running)
    server.on_loop(engine.pause.set)
    assert server.chat()["choices"][0]["message"]["content"] == "hello"


# -- draining -------------------------------------------------------------------------------


class Held:
    """A streamed and a whole request that the engine holds after their first token."""

    def __init__(self, server: Running, engine: ScriptedTransport) -> None:
        engine.pause = server.on_loop(asyncio.Event)
        self.events: list[str] = []
        self.response: httpx.Response | None = None
        self._server = server
        self._threads = [
            threading.Thread(target=self._stream),
            threading.Thread(target=self._whole),
        ]
        for thread in self._threads:
            thread.start()
        until(lambda: len(engine.running) == 2 and self.events != [])

    def _stream(self) -> None:
        for event in self._server.events(COMPLETIONS, {"prompt": "x"}):
            self.events.append(event)

    def _whole(self) -> None:
        self.response = self._server.post(COMPLETIONS, {"prompt": "x"})

    def join(self) -> tuple[Body, list[str]]:
        for thread in self._threads:
            thread.join(30)
        assert self.response is not None
        assert self.response.status_code == 200
        body: Body = self.response.json()
        return body, self.events


@pytest.fixture
def held(start: Start) -> Callable[..., tuple[Running, ScriptedTransport, Held]]:
    def begin(**options: Any) -> tuple[Running, ScriptedTransport, Held]:
        engine = ScriptedTransport()
        server = start(engine, **options)
        return server, engine, Held(server, engine)

    return begin


def test_admitted_requests_finish(held: Any) -> None:
    server, engine, requests = held(shutdown_timeout=60)
    server.begin_stop()
    until(lambda: server.http.get("/health").status_code == 503)
    for path in (COMPLETIONS, CHAT, "/tokenize", "/v1/models", "/ready", "/nope"):
        response = server.http.post(path, json={"prompt": "x"})
        assert response.status_code == 503
        assert "shutting down" in error_of(response)["message"]
        assert response.headers["retry-after"] == "5"
    for path in ("/live", "/metrics", "/load", "/v1/kv"):
        assert server.http.get(path).status_code == 200
    assert load(server) == 2
    server.on_loop(engine.pause.set)
    body, events = requests.join()
    server.join()
    assert body["choices"][0]["text"] == "hello"
    assert events[-1] == "[DONE]"
    assert engine.stopped
    assert engine.aborted == []


def test_after_the_timeout_the_rest_is_aborted(held: Any) -> None:
    server, engine, requests = held(shutdown_timeout=0)
    server.begin_stop()
    body, events = requests.join()
    server.join()
    assert body["choices"][0]["finish_reason"] == "abort"
    assert body["choices"][0]["text"] == "h"
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
    assert len(engine.finished) == 2


def test_an_idle_server_stops_at_once_with_open_connections(start: Start) -> None:
    server = start(shutdown_timeout=60)
    assert server.http.get("/health").status_code == 200  # leaves a connection open
    server.begin_stop()
    server.join()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


# -- starting -------------------------------------------------------------------------------


def test_a_port_in_use(shared: Running) -> None:
    config = ServerConfig(served_model_names=("m",), port=shared.port)
    with pytest.raises(VmserveError, match=rf"127.0.0.1:{shared.port} is in use"):
        bind(config)


@pytest.mark.parametrize("host", ["256.1.1.1", "no such host", "203.0.113.1"])
def test_an_address_that_is_not_here(host: str) -> None:
    with pytest.raises(VmserveError, match=f"cannot listen on {host}"):
        bind(ServerConfig(served_model_names=("m",), host=host, port=0))


def test_sockets_left_behind(start: Start, tmp_path: Any) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = start(uds=str(path))
    assert server.http.get("/health").status_code == 200
    with pytest.raises(VmserveError, match="in use"):
        bind(server.config)
    file = tmp_path / "f"
    file.write_text("precious")
    with pytest.raises(ConfigurationError, match="is there and no socket"):
        bind(ServerConfig(served_model_names=("m",), uds=str(file)))
    assert file.read_text() == "precious"
    with pytest.raises(ConfigurationError, match="AF_UNIX path too long"):
        bind(ServerConfig(served_model_names=("m",), uds=str(tmp_path / ("s" * 200))))


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_head_that_does_not_arrive(
    start: Start, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr("vmserve.server.net.connection.HEAD_TIMEOUT_SECONDS", 0.2)
    server = start()
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for first in (b"", whole):  # on a fresh connection, and on one that was used
        with socket.create_connection(("127.0.0.1", server.port), 20) as raw:
            if first:
                raw.sendall(first)
                assert raw.recv(4096).startswith(b"HTTP/1.1 200")
                if not sent:
                    continue  # that is an idle connection
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
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert said[0].startswith(f"POST '{COMPLETIONS}': 200 after ")
    assert said[1].startswith("GET '/nope\\nfaked': 404 after ")
