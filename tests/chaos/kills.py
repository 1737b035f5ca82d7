"""Engines and ranks that are killed, or stopped for a while, under load.

    python -m tests.chaos.kills --kills 300 --seed 1

Three servers in turn: two engines over socket pairs, two over TCP, two ranks of one engine. Of
each request the undisturbed answer is known: it must get that, or its beginning and an error.
At the end nothing may be left: no memory that is held, no process, no descriptor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.harness import ENGINE_OPTIONS, MAIN, Disturbance, Server, until

__all__ = ["WAYS", "Kills", "kill"]

#: The pause before a restart grows to half a minute, which would be most of the time here.
_AT_ONCE = (
    "from vmserve.client.transports import restarts; assert restarts._LONGEST_RESTART_SECONDS; "
    "restarts._LONGEST_RESTART_SECONDS = 0.1; "
)
_RESTARTS = ("--engine-restarts", "1000000", "--engine-hang-timeout", "10")
_ENGINE = [sys.executable, "-c", MAIN, "engine"]
_LONGEST_STOP = 2.5
#: No answer for so long is a hang. All that is promised takes 20 s, on a quiet machine.
_HANG_SECONDS = 180.0
CLIENTS = 6

REQUESTS: list[dict[str, Any]] = [
    {"prompt": [5] * 40, "max_tokens": 200, "temperature": 0, "ignore_eos": True},
    {"prompt": [5] * 40 + [9] * 60, "max_tokens": 60, "temperature": 0, "ignore_eos": True},
    {"prompt": [7] * 300, "max_tokens": 20, "temperature": 0, "ignore_eos": True},
    {"prompt": [8] * 20, "max_tokens": 80, "temperature": 0.9, "seed": 3, "n": 2},
    {"prompt": [9] * 70, "max_tokens": 1, "temperature": 0},
    {"prompt": [6] * 90, "max_tokens": 400, "temperature": 0.7, "seed": 4, "ignore_eos": True},
]


class Kills(Disturbance):
    """Engines and ranks of one server that are killed."""

    def __init__(self, server: Server, seed: int) -> None:
        super().__init__(server, seed)
        self._expected = [self._undisturbed(body) for body in REQUESTS]
        self._began_with = psutil.Process(server.popen.pid).num_fds()
        #: All that were ever seen.
        self._seen: set[psutil.Process] = set()

    def targets(self) -> list[psutil.Process]:
        """Engines and ranks, also those that are loading."""
        children = psutil.Process(self.server.popen.pid).children(recursive=True)
        programs = ("vmserve.client.engine_main", "vmserve.parallel.rank_main")
        with contextlib.suppress(psutil.NoSuchProcess):
            found = [each for each in children if set(programs) & set(each.cmdline())]
            self._seen.update(found)
            return found
        return []

    def run(self, num_kills: int) -> None:
        """Kill so many times while clients ask, each time at a random moment of a server that
        serves."""
        works = [partial(self._ask, number) for number in range(CLIENTS)]
        with self._meanwhile(works, _HANG_SECONDS) as clients:
            while self.counts["kills"] < num_kills:
                until(self._serves, _HANG_SECONDS, "an engine serves")
                time.sleep(self._random.uniform(0, 1.5))
                self._kill()
        self.counts["hung"] = sum(client.is_alive() for client in clients)

    def _serves(self) -> bool:
        return self.server.http.get("/health").status_code == 200

    def _is_whole(self) -> bool:
        reply = self.server.http.get("/health")
        states = json.loads(reply.content or b"{}").get("engines", {"": {}})
        [engines] = states.values()
        return reply.status_code == 200 and set(engines.values()) <= {"ready"}

    def _is_idle(self) -> bool:
        """Asked again and again: that the last one was killed may not be known yet."""
        reply = self.server.http.get("/v1/kv")
        if reply.status_code != 200 or not self._is_whole():
            return False
        kv = reply.json()
        used = kv["num_requests_running"] or kv["used_pages"] or kv["num_seqs"]
        return not used and self.server.http.get("/load").json() == {"server_load": 0}

    def _kill(self) -> None:
        chosen = self.targets()
        if not chosen:
            return
        victim = self._random.choice(chosen)
        how = self._random.choice(["kill", "kill", "stop", "stop and kill"])
        with contextlib.suppress(psutil.NoSuchProcess):
            if how != "kill":
                victim.send_signal(signal.SIGSTOP)
                time.sleep(self._random.uniform(0, _LONGEST_STOP))
            victim.send_signal(signal.SIGCONT if how == "stop" else signal.SIGKILL)
            self.counts["kills"] += 1
            self.counts[f"kills: {how}"] += 1

    # -- clients --------------------------------------------------------------------------

    def _undisturbed(self, body: dict[str, Any]) -> list[str]:
        reply = self.server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return [choice["text"] for choice in reply.json()["choices"]]

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.server.url, timeout=_HANG_SECONDS) as http:
            while not self._over.is_set():
                which = chance.randrange(len(REQUESTS))
                is_stream = chance.random() < 0.5
                try:
                    if is_stream:
                        end = self._stream(http, which)
                    else:
                        end = self._complete(http, which)
                except httpx.TimeoutException:
                    end = "hung"
                except httpx.HTTPError as error:
                    self.violations.append(f"neither an answer nor an error: {error!r}")
                    end = "broken"
                self.counts[end] += 1
                if end == "error":
                    time.sleep(0.3)  # no engine may be there for a while

    def _complete(self, http: httpx.Client, which: int) -> str:
        reply = http.post("/v1/completions", json=REQUESTS[which])
        if reply.status_code != 200:
            return self._failed(reply.status_code, reply.text)
        texts = [choice["text"] for choice in reply.json()["choices"]]
        return self._compared(which, texts, is_whole=True)

    def _stream(self, http: httpx.Client, which: int) -> str:
        texts = [""] * len(self._expected[which])
        body = {**REQUESTS[which], "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != 200:
                return self._failed(reply.status_code, reply.read().decode())
            last = ""
            for line in reply.iter_lines():
                last = line.removeprefix("data: ") or last
                if line.startswith('data: {"'):
                    for choice in json.loads(last).get("choices", ()):
                        texts[choice["index"]] += choice["text"]
        if last == "[DONE]":
            return self._compared(which, texts, is_whole=True)
        if '"error"' not in last:
            self.violations.append(f"a stream ended with {last[:200]!r}")
            return "broken"
        return self._compared(which, texts, is_whole=False)

    def _failed(self, status: int, text: str) -> str:
        if status != 503 or not text.startswith('{"error"'):
            self.violations.append(f"{status}: {text[:200]}")
        return "error"

    def _compared(self, which: int, texts: list[str], *, is_whole: bool) -> str:
        expected = self._expected[which]
        begun = [each[: len(text)] for each, text in zip(expected, texts, strict=True)]
        if texts != (expected if is_whole else begun):
            self.violations.append(f"request {which}: {texts}, not {expected}")
            return "wrong"
        return "answered" if is_whole else "error in a stream"

    # -- the end --------------------------------------------------------------------------

    def check_what_is_left(self) -> None:
        """End the server; no process is left, and while it served nothing grew."""
        until(self._is_idle, _HANG_SECONDS, "all engines serve, and nothing runs or holds memory")
        self.targets()
        process = psutil.Process(self.server.popen.pid)
        # Connections of clients that have gone take a moment.
        with contextlib.suppress(AssertionError):
            until(lambda: process.num_fds() <= self._began_with, 20, "descriptors are closed")
        self.counts["descriptors left"] = max(0, process.num_fds() - self._began_with)
        self.server.popen.terminate()
        self.server.popen.wait(60)

    def count_left(self) -> None:
        """Count what outlived all."""
        _, alive = psutil.wait_procs(self._seen, timeout=20)
        self.counts["processes left"] = len(alive)


class RemoteKills(Kills):
    """Engines that listen on TCP, started again here."""

    def __init__(self, server: Server, seed: int, engines: Engines) -> None:
        super().__init__(server, seed)
        self._engines = engines

    def targets(self) -> list[psutil.Process]:
        self._engines.start_ended()
        found = [psutil.Process(each.pid) for each in self._engines.running.values()]
        self._seen.update(found)
        return found

    def _serves(self) -> bool:
        self._engines.start_ended()
        return super()._serves()

    def _is_whole(self) -> bool:
        self._engines.start_ended()
        return super()._is_whole()


class Engines:
    """``vmserve engine``, so many times."""

    def __init__(self, size: int, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text("a key of all engines here")
        self.key.chmod(0o600)
        self._log = folder / "engines"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = [f"127.0.0.1:{_free_port()}" for _ in range(size)]
        self.start_ended()

    def start_ended(self) -> None:
        for address in self.addresses:
            if address not in self.running or self.running[address].poll() is not None:
                with self._log.open("a") as log:
                    options = ["--listen", address, "--key-file", str(self.key), *ENGINE_OPTIONS]
                    self.running[address] = subprocess.Popen([*_ENGINE, *options], stderr=log)

    def close(self) -> None:
        for each in self.running.values():
            each.kill()
            each.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _local(folder: Path, seed: int, *options: str) -> Iterator[Kills]:
    server = Server(folder / "log", *options, *_RESTARTS, before=_AT_ONCE)
    try:
        yield Kills(server, seed)
    finally:
        server.close()


@contextlib.contextmanager
def _remote(folder: Path, seed: int) -> Iterator[Kills]:
    engines = Engines(2, folder)
    places = [word for each in engines.addresses for word in ("--engine", each)]
    try:
        listening = folder / "engines"
        until(lambda: listening.read_text().count("listening on") == 2, 300, "engines listen")
        key = ("--engine-key-file", str(engines.key))
        server = Server(folder / "log", *places, *key, engine_options=())
        try:
            yield RemoteKills(server, seed, engines)
        finally:
            server.close()
    finally:
        engines.close()


WAYS = {
    "engines over socket pairs": lambda folder, seed: _local(
        folder, seed, "--data-parallel-size", "2"
    ),
    "engines over TCP": _remote,
    "ranks of one engine": lambda folder, seed: _local(folder, seed, "--tensor-parallel-size", "2"),
}


def kill(way: str, num_kills: int, seed: int, folder: Path) -> Kills:
    """Run one way on a fresh server, and return what came of it."""
    names = set(Path("/dev/shm").iterdir())
    began = time.monotonic()
    with WAYS[way](folder, seed) as done:
        done.run(num_kills)
        done.check_what_is_left()
    done.count_left()
    done.counts["names in /dev/shm left"] = len(set(Path("/dev/shm").iterdir()) - names)
    done.counts["seconds"] = round(time.monotonic() - began)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="in all")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="directory for what servers say")
    options = parser.parse_args()
    is_bad = False
    ways = options.way or list(WAYS)
    for way in ways:
        with tempfile.TemporaryDirectory() as made:
            folder = (options.logs or Path(made)) / way.replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            done = kill(way, options.kills // len(ways), options.seed, folder)
        print(
            json.dumps({way: {"violations": done.violations, **done.counts}}, indent=1), flush=True
        )
        is_bad |= bool(done.violations or done.counts["hung"] or done.counts["processes left"])
    raise SystemExit(is_bad)


if __name__ == "__main__":
    main()
