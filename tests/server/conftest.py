"""A real server on a loopback port, over the fake engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.routing import Route

from vmserve.client.client import Client
from vmserve.client.transports.base import Transport
from vmserve.errors import EngineDeadError
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.context import ServerContext
from vmserve.server.errors import CODES
from vmserve.server.models.registry import Models
from vmserve.server.net.listen import bind, url_of
from vmserve.server.run import serve
from vmserve.testing import ScriptedTransport, scripted

Body = dict[str, Any]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
HI: Any = [{"role": "user", "content": "Hi"}]
#: A body that each route takes.
VALID: dict[str, Body] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
    EMBEDDINGS: {"input": "Hi"},
}


class Running:
    """A server in a thread of its own, and ways to talk to it."""

    def __init__(self, engine: Transport | Client | Models, **options: Any) -> None:
        options.setdefault("served_model_names", ("fake",))
        self.config = ServerConfig(port=0, **options)
        self.engine = engine
        #: What the server ended with, if its engine had died.
        self.death: EngineDeadError | None = None
        self._clients: list[openai.OpenAI] = []
        self._listener = bind(self.config)
        self.url = url_of(self._listener)
        self.port = self._listener.getsockname()[1] if self.config.uds is None else 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        while not self._ready.wait(0.05):
            assert self._thread.is_alive(), "the server ended before it was ready"
        transport = httpx.HTTPTransport(uds=self.config.uds) if self.config.uds else None
        base = "http://unix" if self.config.uds else self.url
        self.http = httpx.Client(base_url=base, transport=transport, timeout=30)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop_event = asyncio.Event()
        try:
            served = self.engine
            app = create_app(
                served if isinstance(served, Client | Models) else Client(served), self.config
            )
            self.app_context: ServerContext = app.state.context
            self.paths = {route.path for route in app.routes if isinstance(route, Route)}
            await serve(app, self._listener, self.stop_event, self._ready.set)
        except EngineDeadError as error:
            self.death = error

    def begin_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.stop_event.set)

    def join(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        for client in [self.http, *self._clients]:
            client.close()
        if self._thread.is_alive():
            self.begin_stop()
        self.join()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the server's event loop and return what it returns."""

        async def run() -> Any:
            return work()

        return self.on_loop_async(run)

    def on_loop_async(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The same for what is awaited there."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(30)

    def post(self, path: str, body: Body, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def ok(self, path: str, body: Body) -> Body:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        reply: Body = response.json()
        return reply

    def complete(self, **body: Any) -> Body:
        return self.ok("/v1/completions", {"prompt": "Hi", **body})

    def chat(self, **body: Any) -> Body:
        body.setdefault("messages", [{"role": "user", "content": "Hi"}])
        return self.ok("/v1/chat/completions", body)

    def error(self, path: str, body: Body, status: int = 400, **kwargs: Any) -> Body:
        """The error of a request that must fail with ``status``, in the shape of ``path``."""
        response = self.post(path, body, **kwargs)
        assert response.status_code == status, response.text
        return error_of(response, path)

    def raw(self, request: bytes) -> tuple[bytes, bytes]:
        """What stands before and after the blank line of all that comes until the connection's
        end."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as raw:
            raw.sendall(request)
            received = b"".join(iter(lambda: raw.recv(65536), b""))
        head, _, content = received.partition(b"\r\n\r\n")
        return head, content

    @property
    def last(self) -> tuple[list[int], Any, Body]:
        """The ids, parameters and terms that the scripted engine was given last."""
        engine: Any = self.engine
        ids, params, terms = engine.requests[-1]
        return ids, params, terms

    @property
    def params(self) -> Any:
        return self.last[1]

    @property
    def constraint(self) -> Any:
        """What the answer that was asked for last has to match."""
        structured = self.params.structured_outputs
        return structured and structured.constraint

    @property
    def prompt(self) -> str:
        """The text of the prompt that the scripted engine was given last."""
        return str(self.last[2]["prompt"])

    def stream(self, path: str, body: Body) -> list[Body]:
        """The chunks of a stream that must end with [DONE]."""
        events = list(self.events(path, body))
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def events(self, path: str, body: Body) -> Iterator[str]:
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    yield line.removeprefix("data: ")

    def openai(self, **options: Any) -> openai.OpenAI:
        options.setdefault("api_key", "none")
        client = openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, **options)
        self._clients.append(client)
        return client


Start = Callable[..., Running]

#: Routes whose errors have Anthropic's shape: its clients read no other.
ANTHROPIC_PATHS = {"/v1/messages", "/v1/messages/count_tokens"}


def error_of(response: httpx.Response, path: str = "") -> Body:
    """The error of ``response``, which must have exactly the shape that ``path`` answers in."""
    assert response.headers["content-type"].startswith("application/json")
    assert len(response.content) <= 2048
    body: Body = response.json()
    error: Body = body["error"]
    if path in ANTHROPIC_PATHS:
        assert body == {"type": "error", "error": error}
        assert set(error) == {"type", "message"}
        return error
    assert set(body) == {"error"}
    assert set(error) == {"message", "type", "param", "code", "status"}
    assert error["code"] in (None, *CODES)
    assert error["status"] == response.status_code
    return error


def is_part(wanted: Any, found: Any) -> bool:
    """Whether all of ``wanted`` is in ``found``: of objects the fields that are named."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(name in found and is_part(of, found[name]) for name, of in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(is_part, wanted, found))
    return bool(wanted == found)


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers that are stopped at the end of the test."""
    started: list[Running] = []

    def begin(engine: Transport | Client | Models | str | None = None, **options: Any) -> Running:
        """``engine``: also the answer of one with a context of 1,024 tokens."""
        if isinstance(engine, str):
            engine = ScriptedTransport(engine, max_model_len=1024)
        running = Running(engine or ScriptedTransport(), **options)
        started.append(running)
        return running

    yield begin
    for running in started:
        running.close()


@pytest.fixture(scope="session")
def serving() -> Iterator[Start]:
    """Servers with a context of 1,024 tokens by their options, which are kept: only the model's
    text, which is given first, changes."""
    kept: dict[str, Running] = {}

    def serve(text: str = "hello", **options: Any) -> Running:
        key = repr(options)
        if key not in kept:
            kept[key] = Running(ScriptedTransport(max_model_len=1024), **options)
        engine: Any = kept[key].engine
        engine.reply = scripted(text)
        return kept[key]

    yield serve
    for running in kept.values():
        running.close()


@pytest.fixture(scope="session")
def shared() -> Iterator[Running]:
    """One server for all tests that change nothing of it: it answers "hello"."""
    running = Running(ScriptedTransport())
    yield running
    running.close()
