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

from tests.chaos.harness import (
    ENGINE_OPTIONS,
    MAIN,
    Disturbance,
    Server,
    Told,
    ask,
    free_port,
    until,
)

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
PATH = "/v1/completions"

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
        self._expected = [ask(server.http, PATH, body).texts for body in REQUESTS]
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

    def _health(self) -> httpx.Response:
        return self.server.http.get("/health")

    def _serves(self) -> bool:
        return self._health().status_code == 200

    def _is_whole(self) -> bool:
        reply = self._health()
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

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.server.url, timeout=_HANG_SECONDS) as http:
            while not self._over.is_set():
                which, is_stream = chance.randrange(len(REQUESTS)), chance.random() < 0.5
                try:
                    told = ask(http, PATH, {**REQUESTS[which], "stream": is_stream})
                except httpx.TimeoutException:
                    self.counts["hung"] += 1
                except httpx.HTTPError as error:
                    self.violations.append(f"neither an answer nor an error: {error!r}")
                else:
                    self._check(which, told)
                    self.counts[told.end] += 1
                    if told.end == "refused":
                        time.sleep(0.3)  # no engine may be there for a while

    def _check(self, which: int, told: Told) -> None:
        expected = self._expected[which]
        if told.end == "broken" or told.status not in (200, 503):
            self.violations.append(f"{told.status}: {told.last!r:.200}")
        elif told.end == "error in a stream":
            expected = [each[: len(t)] for each, t in zip(expected, told.texts, strict=True)]
        if told.status == 200 and told.texts != expected:
            self.violations.append(f"request {which}: {told.texts}, not {expected}")

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
        self.server.end()

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
        found = [psutil.Process(each.pid) for each in self._engines.running.values()]
        self._seen.update(found)
        return found

    def _health(self) -> httpx.Response:
        self._engines.start_ended()
        return super()._health()


class Engines:
    """``vmserve engine``, so many times."""

    def __init__(self, size: int, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text("a key of all engines here")
        self.key.chmod(0o600)
        self._log = folder / "engines"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
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


@contextlib.contextmanager
def _local(folder: Path, seed: int, *options: str) -> Iterator[Kills]:
    with Server(folder / "log", *options, *_RESTARTS, before=_AT_ONCE) as server:
        yield Kills(server, seed)


@contextlib.contextmanager
def _remote(folder: Path, seed: int) -> Iterator[Kills]:
    engines = Engines(2, folder)
    places = [word for each in engines.addresses for word in ("--engine", each)]
    try:
        listening = folder / "engines"
        until(lambda: listening.read_text().count("listening on") == 2, 300, "engines listen")
        key = ("--engine-key-file", str(engines.key))
        with Server(folder / "log", *places, *key, engine_options=()) as server:
            yield RemoteKills(server, seed, engines)
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
