"""``vmserve serve`` as users start it, and clients that behave badly."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from vmserve_bench.lab.measure import read_memory

__all__ = ["ENGINE_OPTIONS", "MAIN", "Disturbance", "Server", "Stream", "ask", "free_port", "until"]

MAIN = "from vmserve.cli.main import main; main()"
ENGINE_OPTIONS = ["--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--kv-regime", "virtual"]


def until(holds: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for what another process brings about; returns how many seconds it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Told(NamedTuple):
    """What a request was told, and how that ended.

    ``end``: "answered", "refused", "error in a stream", "left", or "broken" if neither an answer
    nor an error came. ``last``: the body, or a stream's last event.
    """

    end: str
    status: int
    texts: list[str]
    last: Any


def ask(http: httpx.Client, path: str, body: dict[str, Any], leaves: int | None = None) -> Told:
    """``leaves``: the client reads no more than so many events of a stream."""
    texts, last, num_events, is_done = [""] * body.get("n", 1), {}, 0, False
    with http.stream("POST", path, json=body) as reply:
        status = reply.status_code
        if status != 200 or not body.get("stream"):
            content = reply.read()
            if status != 200:
                is_told = content.startswith(b'{"error"')
                return Told("refused" if is_told else "broken", status, [], content)
            last = json.loads(content)
            given = last.get("choices", ())  # embeddings have none
            end = "answered" if all(each["finish_reason"] for each in given) else "broken"
            return Told(end, status, [each.get("text", "") for each in given], last)
        for line in reply.iter_lines():
            if leaves is not None and num_events >= leaves:
                return Told("left", status, texts, last)
            is_done |= line == "data: [DONE]"
            if line.startswith('data: {"'):
                last = json.loads(line.removeprefix("data: "))
                num_events += 1
                for choice in last.get("choices", ()):
                    texts[choice["index"]] += choice.get("text", "")
    end = "answered" if is_done else "error in a stream" if "error" in last else "broken"
    return Told(end, status, texts, last)


class Server:
    """Standard error goes to a file, so that it can never block.

    ``engine_options``: those that ``args`` come after. ``before``: code of the server's process.
    """

    def __init__(
        self,
        log: Path,
        *args: str,
        engine_options: Sequence[str] = ENGINE_OPTIONS,
        before: str = "",
    ) -> None:
        self._log = log
        command = [sys.executable, "-c", before + MAIN, "serve", "--port", "0"]
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [*command, *engine_options, *args], stderr=file, text=True
            )
        try:
            until(self._said_ready, 300, "the server is ready")
        except BaseException:
            self.popen.kill()
            raise
        found = re.search(r"ready: serving .* at http://([\d.]+):(\d+)", self.said)
        assert found is not None
        self.address = (found[1], int(found[2]))
        self.url = f"http://{found[1]}:{found[2]}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=limits)

    def _said_ready(self) -> bool:
        assert self.popen.poll() is None, self.said
        return "ready:" in self.said

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def engine(self) -> psutil.Process:
        """The engine's process, which is the only child there may be (it has some for grammars)."""
        [child] = psutil.Process(self.popen.pid).children()
        return child

    def kv(self) -> dict[str, float]:
        figures: dict[str, float] = self.http.get("/v1/kv").json()
        return figures

    def until_idle(self) -> None:
        """Nothing runs, and no page is held."""

        def idle() -> bool:
            kv = self.kv()
            return not (kv["num_requests_running"] or kv["used_pages"] or kv["num_seqs"])

        until(idle, 60, "all pages are back")
        load = self.http.get("/load").json()
        assert load == {"server_load": 0}
        assert self.http.get("/health").status_code == 200

    def raw(self, body: dict[str, Any], *, receive_bytes: int | None = None) -> socket.socket:
        """A completion request on a socket that the caller drops at will."""
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        raw = socket.socket()
        if receive_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        raw.settimeout(60)
        raw.connect(self.address)
        raw.sendall(head.encode() + content)
        return raw

    def close(self) -> None:
        self.http.close()
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(60)

    def end(self) -> None:
        """As an operator ends it."""
        self.popen.terminate()
        self.popen.wait(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pss(NamedTuple):
    """Bytes, of shared ones a process's part."""

    own: int
    files: int


def pss(server: Server) -> Pss:
    """Of the server's process and all that it started."""
    found = []
    for each in [process := psutil.Process(server.popen.pid), *process.children(recursive=True)]:
        with suppress(OSError):  # it has ended
            found.append(read_memory(each.pid))
    return Pss(sum(one["anon"] + one["shmem"] for one in found), sum(one["file"] for one in found))


@dataclass
class Stream:
    """A stream in a thread of its own, and how it went."""

    server: Server
    body: dict[str, Any]
    status: int = 0
    retry_after: str | None = None
    #: Seconds from the request to the first event with a choice, and to the end.
    first: float | None = None
    ended: float = 0.0
    events: list[str] = field(default_factory=list)
    failure: str | None = None

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for event in self._events():
                if self.first is None:
                    self.first = time.monotonic() - self.began
                self.events.append(event)
        except httpx.HTTPError as error:
            self.failure = type(error).__name__
        self.ended = time.monotonic() - self.began

    def _events(self) -> Iterator[str]:
        body = {**self.body, "stream": True}
        with self.server.http.stream("POST", "/v1/completions", json=body) as response:
            self.status = response.status_code
            self.retry_after = response.headers.get("retry-after")
            if response.status_code != 200:
                response.read()
                return
            for line in response.iter_lines():
                if line:
                    yield line.removeprefix("data: ")

    def join(self) -> None:
        self.thread.join(120)
        assert not self.thread.is_alive()

    @property
    def error(self) -> dict[str, Any] | None:
        """Of the error event that ended it."""
        if not self.events or self.events[-1] == "[DONE]":
            return None
        last: dict[str, Any] = json.loads(self.events[-1])
        return last.get("error")

    @property
    def reason(self) -> str | None:
        """The finish_reason of a stream that ended well."""
        if len(self.events) < 2 or self.events[-1] != "[DONE]":
            return None
        reason: str | None = json.loads(self.events[-2])["choices"][0]["finish_reason"]
        return reason


class Disturbance:
    """What is done to one server under load, and what came of it, by name."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self._random = random.Random(seed)
        self._over = threading.Event()

    @contextmanager
    def _meanwhile(
        self, works: Sequence[Callable[[], None]], seconds: float
    ) -> Iterator[list[threading.Thread]]:
        """Do ``works`` in threads, each until ``_over``; wait so long for the end of each."""
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield threads
        finally:
            self._over.set()
            for thread in threads:
                thread.join(seconds)
