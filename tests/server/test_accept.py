"""Accepting connections: limits in all and by address, and a system that has no room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import run_python, until
from tests.server.conftest import Running, Start, error_of
from vmserve.errors import ConfigurationError
from vmserve.server.config import ServerConfig
from vmserve.server.net import accept
from vmserve.server.net.accept import Tally, counted_address
from vmserve.server.net.listen import ConnectionLimits, bind

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def connect() -> Iterator[Callable[[Running], socket.socket]]:
    with contextlib.ExitStack() as stack:

        def begin(server: Running) -> socket.socket:
            address = ("127.0.0.1", server.port)
            return stack.enter_context(socket.create_connection(address, 30))

        yield begin


def healthy(raw: socket.socket) -> bool:
    raw.sendall(HEALTH)
    return raw.recv(4096).startswith(b"HTTP/1.1 200")


def told(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [line for line in caplog.messages if what in line]


def test_beyond_the_limit_connections_wait_for_one_that_ends(
    start: Start, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(max_connections=3)
    first, second, third = (connect(server) for _ in range(3))
    assert all(healthy(raw) for raw in (first, second, third))
    late = [connect(server) for _ in range(20)]
    for raw in late:
        raw.sendall(HEALTH)
    until(lambda: told(caplog, "no further connections") != [])
    assert healthy(first)
    assert healthy(second)  # whoever is in goes on
    assert select.select(late, [], [], 0)[0] == []
    third.close()
    assert late[0].recv(4096).startswith(b"HTTP/1.1 200")
    for raw in (first, second, late[0], late[1]):
        raw.close()
    for raw in late[2:]:
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        raw.close()


def test_an_address_has_its_share(
    start: Start, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "counted_address", lambda peer: "192.0.2.1")
    server = start(max_connections=16, max_connections_per_address=2)
    first, second = connect(server), connect(server)
    assert healthy(first)
    assert healthy(second)
    answer = httpx.get(f"{server.url}/health")
    assert answer.status_code == 429
    assert "2 connections" in error_of(answer)["message"]
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    assert healthy(first)
    second.close()
    until(lambda: httpx.get(f"{server.url}/health").status_code == 200)


def test_loopback_is_no_ones_address(start: Start, connect: Any) -> None:
    server = start(max_connections=16, max_connections_per_address=1)
    assert all(healthy(raw) for raw in [connect(server) for _ in range(5)])


@pytest.mark.parametrize(
    ("peer", "counted"),
    [
        ("", ""),
        (("127.0.0.1", 1), ""),
        (("127.3.0.1", 1), ""),
        (("::1", 1, 0, 0), ""),
        (("::ffff:127.0.0.1", 1, 0, 0), ""),
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
    ],
)
def test_what_connections_are_counted_by(peer: object, counted: str) -> None:
    assert counted_address(peer) == counted


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Every call of this process that needs one fails with EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled: list[int] = []
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filled:
            os.close(descriptor)


def test_without_descriptors_accepting_pauses(
    start: Start, connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    inside = connect(server)
    assert healthy(inside)
    late = [socket.socket() for _ in range(40)]
    began = time.monotonic()
    with no_descriptors_left():
        for raw in late:
            raw.settimeout(30)
            raw.connect(("127.0.0.1", server.port))
            raw.sendall(HEALTH)
        until(lambda: told(caplog, "cannot accept") != [])
        assert all(healthy(inside) for _ in range(100))
        lines = told(caplog, "cannot accept")
        seconds = time.monotonic() - began
    # asyncio's own loop: 2,048 tries and lines for each wake-up.
    assert len(lines) <= 1 + seconds
    assert not any("times" in line for line in lines)  # one try a second
    assert "Too many open files" in lines[0]
    assert "ulimit -n" in lines[0]
    for raw in late:
        assert raw.recv(4096).startswith(b"HTTP/1.1 200")
        raw.close()


def test_a_tally_logs_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []

    class Loop(asyncio.AbstractEventLoop):
        def call_later(self, delay: float, callback: Any, *args: Any, **kwargs: Any) -> Any:
            timers.append((delay, callback))
            return object()

    tally = Tally(Loop(), "failed")
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            tally.add("no room")
    assert told(caplog, "failed") == ["failed: no room"]
    [(delay, callback)] = timers
    assert delay == 1.0
    callback()
    assert told(caplog, "failed")[1:] == ["failed (999 times): no room"]
    timers.pop()[1]()  # nothing new: silence, and no timer goes on
    assert len(told(caplog, "failed")) == 2
    assert len(timers) == 1


def test_limits_follow_from_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(files: int, **options: Any) -> ConnectionLimits:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
        return ConnectionLimits.of(ServerConfig(served_model_names=("m",), **options))

    assert limits(128) == ConnectionLimits(64, 16)
    assert limits(1024) == ConnectionLimits(768, 192)
    assert limits(2**20) == ConnectionLimits(16_384, 4096)
    asked = {"max_connections": 700, "max_connections_per_address": 7}
    assert limits(1024, **asked) == ConnectionLimits(700, 7)
    with pytest.raises(ConfigurationError, match=r"800 .* 1024 open files .* 768.*ulimit -n"):
        limits(1024, max_connections=800)
    for name in asked:
        with pytest.raises(ConfigurationError, match=f"{name}: 0 is below"):
            limits(1024, **{name: 0})


def test_the_soft_limit_of_files_is_raised() -> None:
    ran = run_python(
        "import resource; from vmserve.server.net.listen import raise_descriptor_limit as r;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512));"
        "print(r(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert ran.stdout.split() == ["512", "512", "512"]


def test_a_failed_handshake_gives_its_place_back(start: Start, connect: Any) -> None:
    files = Path(__file__).parents[1] / "assets" / "tls"
    certificate, key = str(files / "cert.pem"), str(files / "key.pem")
    server = start(max_connections=1, ssl_certfile=certificate, ssl_keyfile=key)
    for _ in range(3):
        raw = connect(server)
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while raw.recv(4096):  # at most an alert of TLS
            pass
    trust = ssl.create_default_context(cafile=certificate)
    assert httpx.get(f"{server.url}/health".replace("http:", "https:"), verify=trust).is_success


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_reply_does_not_wait_for_the_acknowledgement_of_its_headers(host: str) -> None:
    """Nagle's algorithm delays the second write of a kept connection by 40 ms."""
    with bind(ServerConfig(host=host, port=0, served_model_names=("m",))) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]):
            connection, _ = listener.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
