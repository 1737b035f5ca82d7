"""What goes wrong in production, against ``vmserve serve`` as a process.

After each: no page is held, nothing is left running. `pytest tests/chaos --chaos-scale 20` is the
whole of it (1,000 disconnects); the suite runs a short slice.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.harness import Server, Stream, until

pytestmark = pytest.mark.timeout(1800)

LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "The sea", "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For all tests that leave it alive; the last one ends it."""
    log = tmp_path_factory.mktemp("chaos") / "log"
    options = ["--max-num-seqs", "8", "--max-queued-requests", "8"]
    with Server(log, *options, "--write-timeout", "1", "--shutdown-timeout", "1") as running:
        yield running


def test_clients_that_leave_at_random_moments(server: Server, scale: int) -> None:
    rng = random.Random(1)
    open_now: list[Any] = []
    for _ in range(50 * scale):
        body = {
            "prompt": "x" * rng.randrange(1, 200),
            "max_tokens": rng.randrange(1, 900),
            "ignore_eos": True,
            "n": rng.choice([1, 1, 1, 4]),
            "stream": rng.random() < 0.7,
            "stop": rng.choice([None, ["zq"]]),
        }
        open_now.append(server.raw(body))
        time.sleep(rng.random() * 0.05)
        while len(open_now) > rng.randrange(1, 8):
            open_now.pop(rng.randrange(len(open_now))).close()
    for raw in open_now:
        raw.close()
    server.until_idle()
    reply = server.http.post("/v1/completions", json=SHORT)
    assert reply.json()["usage"]["completion_tokens"] == 16


def test_clients_that_never_read(server: Server, scale: int) -> None:
    # Kilobytes for each token, so that the buffers on the way fill. How far the engine is by the
    # time that they are cut off depends on its speed: it may have computed all tokens.
    wide = {**LONG, "n": 2, "logprobs": 20, "stream": True}
    raws = [server.raw(wide, receive_bytes=4096) for _ in range(4)]
    other = Stream(server, SHORT)
    other.join()
    assert other.reason == "length"
    until(
        lambda: server.http.get("/load").json() == {"server_load": 0},
        300,
        "those who do not read are cut off",
    )
    for raw in raws:
        assert b"data: [DONE]" not in _rest(raw)
        raw.close()
    server.until_idle()


def _rest(raw: socket.socket) -> bytes:
    """What is on the way to a client, until the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(1 << 16):
            data += part
    return data


def test_ten_times_the_load(server: Server, scale: int, request: pytest.FixtureRequest) -> None:
    """Who is not taken is told when to come again; who is, is served to the end."""
    alone = _load(server, num_clients=8, seconds=2.0 * scale)
    beyond = _load(server, num_clients=160, seconds=3.0 * scale)
    taken = [stream for stream in beyond if stream.status == 200]
    refused = [stream for stream in beyond if stream.status == 429]
    assert taken
    assert refused
    assert [(each.status, each.failure) for each in beyond if each.status not in (200, 429)] == []
    assert all(stream.retry_after == "1" for stream in refused)
    assert all(stream.reason == "length" for stream in taken)
    server.until_idle()
    figures = {"alone": _figures(alone, 2.0 * scale), "tenfold": _figures(taken, 3.0 * scale)}
    figures["tenfold"]["refused"] = len(refused)
    print("overload:", json.dumps(figures))
    report = request.config.getoption("--chaos-report", None)
    if report is not None:
        Path(report).write_text(json.dumps(figures, indent=1) + "\n")


def _load(server: Server, num_clients: int, seconds: float) -> list[Stream]:
    """Clients that ask again as soon as they have an answer, and wait where they are told to."""
    done: list[Stream] = []
    over = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < over:
            stream = Stream(server, SHORT)
            stream.join()
            done.append(stream)
            if stream.status == 429:
                time.sleep(1)

    clients = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return done


def _figures(streams: list[Stream], seconds: float) -> dict[str, float]:
    firsts = sorted(stream.first for stream in streams if stream.first is not None)
    tail = firsts[min(len(firsts) - 1, int(0.99 * len(firsts)))]
    return {
        "requests": len(streams),
        "goodput_requests_per_s": round(len(streams) / seconds, 2),
        "ttft_median_s": round(statistics.median(firsts), 4),
        "ttft_p99_s": round(tail, 4),
    }


def test_a_drain_under_load(server: Server) -> None:
    engine = server.engine
    streams = [Stream(server, {**LONG, "n": 2}) for _ in range(4)]
    until(lambda: all(stream.events for stream in streams), 120, "all streams run")
    server.popen.send_signal(signal.SIGTERM)
    until(lambda: _refuses(server), 60, "new requests are refused")
    for stream in streams:
        stream.join()
        assert stream.reason in ("length", "abort") or stream.error is not None
    assert server.popen.wait(120) == 0
    assert not engine.is_running()
    assert "Traceback" not in server.said


def _refuses(server: Server) -> bool:
    try:
        return httpx.post(f"{server.url}/v1/completions", json=SHORT).status_code == 503
    except httpx.HTTPError:
        return True


def test_an_engine_that_is_killed_and_one_that_hangs(tmp_path: Path) -> None:
    """Killed, it is started again; when it hangs then, the server ends."""
    options = ["--engine-restarts", "1", "--engine-hang-timeout", "10"]
    with Server(tmp_path / "log", *options, "--engine-death-linger", "4") as server:
        first = server.engine
        streams = [Stream(server, LONG) for _ in range(3)]
        until(lambda: all(stream.events for stream in streams), 120, "all streams run")
        first.kill()
        for stream in streams:
            stream.join()
            assert stream.error is not None
            assert stream.error["status"] == 503
        assert "the engine hangs" not in server.said  # the streams ended with the process
        for path in ("/health", "/ready"):
            assert server.http.get(path).status_code == 503
        refused = server.http.post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert set(refused.json()["error"]) == {"message", "type", "param", "code", "status"}
        until(lambda: server.http.get("/ready").status_code == 200, 300, "it is back")
        second = server.engine
        assert second.pid != first.pid
        assert server.http.post("/v1/completions", json=SHORT).status_code == 200
        stream = Stream(server, LONG)
        until(lambda: bool(stream.events), 120, "a stream runs")
        second.suspend()
        stream.join()
        assert stream.error is not None
        assert server.http.get("/health").status_code == 503
        assert "the engine hangs" in server.said
        assert server.popen.wait(60) == 1
        assert not any(process.is_running() for process in (first, second))
        assert psutil.pid_exists(server.popen.pid) is False
