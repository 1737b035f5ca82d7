"""One key does all that it may, for minutes, while another chats: who notices?

    python -m tests.chaos.attack --minutes 10 --json attack.json

What the key sends, from an address of its own: bodies of 4 MiB that are slow to read, render and
encode, tools by the thousand, as many log-probabilities as one request may ask for and more,
idle connections, grammars whose client leaves, responses with all the metadata there may be. The
attacker yields its processor to all others (nice 19), as if it were another machine.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.chaos.harness import Server, until

ATTACKER_KEY, VICTIM_KEY = "attacker-key", "victim-key"
OPTIONS = ("--api-key", ATTACKER_KEY, "--api-key", VICTIM_KEY, "--fair-sharing")
#: Loopback, but not the victim's: addresses have limits of their own.
ATTACKER_ADDRESS = "127.0.0.2"
CHAT = "/v1/chat/completions"
_BOMB = "start: " + " | ".join(f'"{"ab" * 9}{i}" x{i % 40}' for i in range(480)) + "\n"
_BOMB += "\n".join(f"x{i}: (/[a-z]{{1,{40 + i}}}/ | x{(i + 1) % 40})+" for i in range(40))


class Attack(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]
    #: Seconds after which the client leaves; None reads the answer.
    leaves: float | None = None


def _chat(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 1, **more}


def attacks(context: int) -> list[Attack]:
    user = {"role": "user", "content": "Hi"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tools = [{**tool, "function": {**tool["function"], "name": f"f{i}"}} for i in range(1000)]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({"x": "y<|im_end|>" * 250_000})},
    }
    nested: Any = "x"
    for _ in range(40):
        nested = [nested]
    ids = [100] * (context - 2)
    words = "the quick brown fox " * 190_000
    return [
        Attack("S1 roles", CHAT, _chat([{"role": "<|im_end|>" * 25}] * 14_000)),
        Attack("S1 empty messages", CHAT, _chat([{"role": "user", "content": ""}] * 60_000)),
        Attack("S1 lists", CHAT, _chat([user], x=[[]] * 1_000_000)),
        Attack(
            "S1 arguments",
            CHAT,
            _chat([user, {"role": "assistant", "content": "", "tool_calls": [call]}]),
        ),
        Attack("S1 tools", CHAT, _chat([user], tools=tools)),
        Attack("S1 variables", CHAT, _chat([user], chat_template_kwargs={"x": words})),
        Attack("S1 tokenize", "/tokenize", {"prompt": words}),
        Attack("S1 text", "/v1/completions", {"prompt": words, "max_tokens": 1}),
        Attack(
            "S2 too many",
            "/v1/completions",
            {"prompt": [ids] * 64, "max_tokens": 1, "prompt_logprobs": 20},
        ),
        Attack(
            "S2 prompts",
            "/v1/completions",
            {"prompt": [ids] * 22, "max_tokens": 1, "prompt_logprobs": 20},
        ),
        Attack("S2 answers", CHAT, _chat([user], n=16, logprobs=True, top_logprobs=20)),
        Attack("S4 grammar", CHAT, _chat([user], structured_outputs={"grammar": _BOMB}), 0.05),
        Attack(
            "S5 metadata", "/v1/responses", {"input": "Hi", "metadata": {"x": [nested] * 10_000}}
        ),
        Attack(
            "S5 stored",
            "/v1/responses",
            {"input": "Hi " * 200, "max_output_tokens": 1, "instructions": "x" * 100},
        ),
    ]


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
    address: tuple[str, int], seconds: float, num_threads: int, context: int
) -> dict[str, dict[str, int]]:
    """All kinds by many clients at once; how often each ended how."""
    kinds = [(attack, json.dumps(attack.body).encode()) for attack in attacks(context)]
    found: dict[str, Counter[str]] = {attack.name: Counter() for attack, _ in kinds}
    deadline = time.monotonic() + seconds
    lock = threading.Lock()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        order = kinds[seed % len(kinds) :] + kinds[: seed % len(kinds)]
        while True:
            for attack, content in order:
                if time.monotonic() > deadline:
                    return
                ended = send(address, attack, content)
                with lock:
                    found[attack.name][ended] += 1
            rng.shuffle(order)

    threads = [threading.Thread(target=client, args=[seed]) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    idle: list[socket.socket] = []
    for _ in range(400):  # S3: and they stay
        with contextlib.suppress(OSError):
            idle.append(socket.create_connection(address, 5, (ATTACKER_ADDRESS, 0)))
    for thread in threads:
        thread.join()
    for each in idle:
        each.close()
    return {name: dict(counts) for name, counts in found.items()}


class Victim:
    """Chats, and asks for the server's health, until it is told to stop."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {VICTIM_KEY}"}
        self._http = httpx.Client(base_url=url, timeout=120, headers=headers)
        self._over = threading.Event()
        self.firsts: list[float] = []
        self.healths: list[float] = []
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=[self._chat, 0.2]),
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
        body = _chat([{"role": "user", "content": "Tell me of the sea."}], stream=True)
        with self._http.stream("POST", CHAT, json={**body, "max_tokens": 8}) as response:
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


def measure(
    server: Server, minutes: float, idle_seconds: float, num_threads: int
) -> dict[str, Any]:
    process = psutil.Process(server.popen.pid)

    def memory() -> float:
        return round(process.memory_info().rss / 2**20, 1)

    report: dict[str, Any] = {"rss_mib_before": memory()}
    victim = Victim(server.url)
    time.sleep(idle_seconds)
    report["idle"] = victim.stop()
    arguments = [*server.address, 60 * minutes, num_threads, 1024]
    command = [sys.executable, "-m", "tests.chaos.attack", "--attacker", *map(str, arguments)]
    victim = Victim(server.url)
    peak = memory()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19) and None
    ) as attacker:
        assert attacker.stdout is not None
        while attacker.poll() is None:
            time.sleep(0.2)
            peak = max(peak, memory())
        report["attacks"] = json.loads(attacker.stdout.read())
    report["attacked"] = victim.stop()
    report["rss_mib_peak"] = peak
    # Those for large requests end when there have been none for a while; the engine stays.
    until(lambda: len(process.children()) == 1, 60, "only the engine is left")
    report["rss_mib_after"] = memory()
    return report


def main() -> None:
    if sys.argv[1:2] == ["--attacker"]:
        host, port, seconds, num_threads, context = sys.argv[2:]
        address = (host, int(port))
        ended = run_attacks(address, float(seconds), int(num_threads), int(context))
        print(json.dumps(ended))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--idle-seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16, help="of the attacker (default: 16)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "log", *OPTIONS)
        try:
            report = measure(server, given.minutes, given.idle_seconds, given.clients)
        finally:
            server.close()
    text = json.dumps(report, indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
