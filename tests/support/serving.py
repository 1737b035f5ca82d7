"""What tests do around a server: who calls it, what runs while they look, fixtures' types."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import httpx
import pytest
from rich.console import Console

from tests.server.conftest import Body, Running, error_of
from vmserve.cli.top import Screen
from vmserve.testing import ScriptedTransport

Start = Callable[..., Running]
Patch = pytest.MonkeyPatch
Logs = pytest.LogCaptureFixture
Said = pytest.CaptureFixture[str]
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
#: Starts work in a thread of its own: a call and its arguments become a future.
later: Final = ThreadPoolExecutor(256, "later").submit


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ADMIN = bearer("admin")


def refused(response: httpx.Response, status: int = 400, path: str = "") -> Body:
    """The error of a response that must have this status."""
    assert response.status_code == status, response.text
    return error_of(response, path)


def pause(server: Running, *engines: ScriptedTransport, after: int = 1) -> Callable[[], None]:
    """Hold the engines' requests after so many tokens until what is returned is called."""
    event = server.on_loop(asyncio.Event)
    for engine in engines:
        engine.pause, engine.pause_after = event, after
    return lambda: server.on_loop(event.set)


def load(server: Running) -> int:
    """How many requests the server has."""
    count: int = server.http.get("/load").json()["server_load"]
    return count


def raw_request(server: Running, path: str, body: Body) -> socket.socket:
    """A request on a socket that the test can drop at will."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw = socket.create_connection(("127.0.0.1", server.port), 20)
    raw.sendall(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return raw


@contextmanager
def http_server(answer: Callable[[str, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server whose replies are ``answer(path, body)``: a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answer(self.path, sent)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def drawn(what: Body | Screen, width: int = 100) -> list[str]:
    """The lines of ``vmserve top``: of a screen, or of one for what a server says."""
    screen = what
    if not isinstance(screen, Screen):
        screen = Screen()
        screen.take(what, now=10.0)
    output = io.StringIO()
    Console(file=output, width=width).print(screen)
    return [line.rstrip() for line in output.getvalue().splitlines()]
