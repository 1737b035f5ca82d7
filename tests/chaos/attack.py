"""One key does all that it may, for minutes, while another chats: who notices?

    python -m tests.chaos.attack --minutes 10 --json attack.json     all kinds at once
    python -m tests.chaos.attack --each 8 --json each.json           one kind after the other

What the key sends, from an address of its own: the requests of :mod:`tests.chaos.fields`, which
make as much work as each field may, and idle connections. The attacker yields its processor to all
others (nice 19), as if it were another machine. With ``--each`` the other key asks for chats of one
token, and the report says how long they took under each kind: at most five times as long as without
any, and 250 ms where that is more.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.fields import Attack, Shape, attacks_of
from tests.chaos.harness import Server, pss, until
from vmserve.models import resolve_model
from vmserve.text.tokenizer import load_tokenizer

ATTACKER_KEY, VICTIM_KEY = "attacker-key", "victim-key"
#: Otherwise the server is as users start it.
OPTIONS = ("--api-key", ATTACKER_KEY, "--api-key", VICTIM_KEY)
#: Loopback, but not the victim's: addresses have limits of their own.
ATTACKER_ADDRESS = "127.0.0.2"
CHAT = "/v1/chat/completions"
#: Of a chat under attack: so many times a chat without, or so many seconds if that is more.
MOST_TIMES, MOST_SECONDS = 5.0, 0.25


def send(address: tuple[str, int], attack: Attack, content: bytes) -> str:
    """What came of it: a status, or how the connection ended."""
    seconds = 120.0 if attack.leaves is None else attack.leaves
    client = http.client.HTTPConnection(
        *address, timeout=seconds, source_address=(ATTACKER_ADDRESS, 0)
    )
    headers = {"content-type": "application/json", "authorization": f"Bearer {ATTACKER_KEY}"}
    with contextlib.closing(client):
        try:
            client.request("POST", attack.path, content, headers)
            with client.getresponse() as response:
                response.read()
                return str(response.status)
        except TimeoutError:
            return "left"
        except OSError as error:
            return type(error).__name__


def run_attacks(
    address: tuple[str, int], seconds: float, num_threads: int, kinds: dict[str, Attack]
) -> dict[str, dict[str, int]]:
    """These kinds by many clients at once, each once or more; how often each ended how."""
    bodies = {name: json.dumps(attack.body).encode() for name, attack in kinds.items()}
    found: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    deadline = time.monotonic() + seconds
    lock = threading.Lock()
    names = _orders(list(kinds))

    def client() -> None:
        while True:
            with lock:
                name, is_first = next(names)
            if not is_first and time.monotonic() > deadline:
                return
            ended = send(address, kinds[name], bodies[name])
            with lock:
                found[name][ended] += 1

    threads = [threading.Thread(target=client) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    idle: list[socket.socket] = []
    for _ in range(400 if len(kinds) > 1 else 0):  # and they stay
        with contextlib.suppress(OSError):
            idle.append(socket.create_connection(address, 5, (ATTACKER_ADDRESS, 0)))
    for thread in threads:
        thread.join()
    for each in idle:
        each.close()
    return {name: dict(counts) for name, counts in found.items()}


def _orders(names: list[str]) -> Iterator[tuple[str, bool]]:
    """Each name once, then all again and again in random orders."""
    yield from ((name, True) for name in names)
    rng = random.Random(0)
    while True:
        rng.shuffle(names)
        yield from ((name, False) for name in list(names))


class Victim:
    """Chats, and asks for the server's health, until it is told to stop."""

    def __init__(self, url: str, num_tokens: int = 8, pause: float = 0.2) -> None:
        headers = {"authorization": f"Bearer {VICTIM_KEY}"}
        self._http = httpx.Client(base_url=url, timeout=120, headers=headers)
        self._num_tokens = num_tokens
        self._over = threading.Event()
        self.firsts: list[float] = []
        self.healths: list[float] = []
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=[self._chat, pause]),
            threading.Thread(target=self._repeat, args=[self._health, 0.1]),
        ]
        for thread in self._threads:
            thread.start()

    def _repeat(self, once: Callable[[], None], pause: float) -> None:
        while not self._over.wait(pause):
            try:
                once()
            except httpx.HTTPError as error:
                self.failures.append(repr(error))

    def _chat(self) -> None:
        began = time.monotonic()
        body = {
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "stream": True,
            "max_tokens": self._num_tokens,
        }
        with self._http.stream("POST", CHAT, json=body) as response:
            if response.status_code != 200:
                self.failures.append(f"{response.status_code} {response.read()[:200]!r}")
                return
            first = None
            for line in response.iter_lines():
                if first is None and '"content":"' in line and '"content":""' not in line:
                    first = time.monotonic() - began
        if first is None:
            self.failures.append("a chat without a token")
        else:
            self.firsts.append(first)

    def _health(self) -> None:
        began = time.monotonic()
        if self._http.get("/health").status_code == 200:
            self.healths.append(time.monotonic() - began)
        else:
            self.failures.append("health")

    def stop(self) -> dict[str, Any]:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._http.close()
        return {
            "chats": len(self.firsts),
            "ttft_ms": _spread(self.firsts),
            "health_ms": _spread(self.healths),
            "failures": self.failures[:10],
        }


def _spread(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    at = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(seconds)}
    return {name: round(1e3 * value, 1) for name, value in at.items()}


def shape_of(server: Server) -> Shape:
    """Of the embedded model, as it is served."""
    headers = {"authorization": f"Bearer {VICTIM_KEY}"}
    model = server.http.get("/v1/models", headers=headers).json()["data"][0]
    vocabulary = load_tokenizer(resolve_model(None)).vocab_size
    return Shape(model["max_model_len"], vocabulary)


class Attacker:
    """A process that attacks, all kinds or those named."""

    def __init__(
        self, server: Server, seconds: float, num_clients: int, shape: Shape, names: Sequence[str]
    ) -> None:
        given = json.dumps([server.address, seconds, num_clients, shape, list(names)])
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.attack", "--attacker", given],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.nice(19) and None,
        )

    def wait(self, meanwhile: Callable[[], None]) -> dict[str, dict[str, int]]:
        with self._popen as popen:
            while popen.poll() is None:
                time.sleep(0.2)
                meanwhile()
            assert popen.stdout is not None
            ended: dict[str, dict[str, int]] = json.loads(popen.stdout.read())
        return ended

    @staticmethod
    def run(given: str) -> None:
        """What the process does."""
        (host, port), seconds, num_clients, shape, names = json.loads(given)
        every = attacks_of(Shape(*shape))
        kinds = {name: every[name] for name in names or every}
        print(json.dumps(run_attacks((host, port), seconds, num_clients, kinds)))


class Memory:
    """Of the server's processes together, in MiB: proportional shares of what they hold."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.before = self.peak = self.now()

    def now(self) -> float:
        return round(sum(pss(self._server)) / 2**20, 1)

    def note(self) -> None:
        self.peak = max(self.peak, self.now())

    def report(self) -> dict[str, float]:
        """Once only the engine is left beside the server: the processes for large requests end
        when there have been none for a while."""
        process = psutil.Process(self._server.popen.pid)
        until(lambda: len(process.children()) == 1, 60, "only the engine is left")
        return {"before": self.before, "peak": self.peak, "after": self.now()}


def measure(
    server: Server,
    idle_seconds: float,
    shape: Shape,
    seconds: float,
    num_clients: int,
    groups: Mapping[str, Sequence[str]],
    num_tokens: int = 8,
    pause: float = 0.2,
) -> dict[str, Any]:
    """The kinds of each group at once, one group after the other."""
    memory = Memory(server)
    victim = Victim(server.url, num_tokens, pause)
    time.sleep(idle_seconds)
    idle = victim.stop()
    most = round(max(1e3 * MOST_SECONDS, MOST_TIMES * idle["ttft_ms"].get("p50", 0)))
    found: dict[str, Any] = {}
    for name, kinds in groups.items():
        victim = Victim(server.url, num_tokens, pause)
        ended = Attacker(server, seconds, num_clients, shape, kinds).wait(memory.note)
        told = found[name] = {**victim.stop(), "ended": ended}
        slowest = told["ttft_ms"].get("max", float("inf"))
        told["is_within"] = slowest <= most and not told["failures"]
        print(
            f"{name:36s} {'' if told['is_within'] else 'ABOVE':6s}"
            f"{told['chats']:5d} chats, p50 {told['ttft_ms'].get('p50', 0):7.1f}, "
            f"most {slowest:7.1f} ms; health {told['health_ms'].get('max', 0):7.1f} ms; "
            f"{memory.now():6.0f} MiB; {ended} {told['failures'][:1] or ''}",
            flush=True,
        )
    num_above = sum(not each["is_within"] for each in found.values())
    limits = {"idle": idle, "most_ms": most, "num_above": num_above}
    return {**limits, "groups": found, "memory_mib": memory.report()}


def main() -> None:
    if sys.argv[1:2] == ["--attacker"]:
        Attacker.run(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10, help="of all kinds at once")
    parser.add_argument("--each", type=float, metavar="SECONDS", help="of one kind after the other")
    parser.add_argument("--only", nargs="*", default=[], help="names of kinds, for --each")
    parser.add_argument("--idle-seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, help="of the attacker (default: 16; of each kind 8)")
    parser.add_argument("--options", default="", help="more options of the server, in one text")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options = (*OPTIONS, *given.options.split())
        with Server(Path(directory) / "log", *options, engine_options=()) as server:
            shape = shape_of(server)
            common = server, given.idle_seconds, shape
            if given.each is not None:
                kinds = {name: [name] for name in given.only or attacks_of(shape)}
                report = measure(*common, given.each, given.clients or 8, kinds, 1, 0.05)
            else:
                everything = {"all kinds": list(attacks_of(shape))}
                report = measure(*common, 60 * given.minutes, given.clients or 16, everything)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    del report["groups"]
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
