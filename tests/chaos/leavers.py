"""``python -m tests.chaos.leavers``: clients over shared prefixes, of whom a third leave early.

They ask an engine with ``--kv-persist`` whose pool is short, and then one over the directory that
the first has left. Every answer must be that of an engine without it, and no engine may end. Prints
JSON; ends with status 1 if something else came of it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.harness import Server, ask

__all__ = ["Round", "bodies", "serve_round"]

ENGINE = ["--kv-cache-memory", "24MiB", "--max-model-len", "2048", "--engine-restarts", "5"]
_LEAVERS = 1 / 3
#: What tells that steps failed, in the server's log.
_BAD = ("Traceback", "a step failed", "the engine has died", "engine was started again")


class Round:
    """What came of one round, by name, and answers by request."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.texts: dict[int, str] = {}


def bodies(num_requests: int, num_prefixes: int, seed: int) -> list[dict[str, Any]]:
    """Requests that begin with one of the prefixes, of 300 to 1,500 tokens."""
    rng = random.Random(seed)
    prefixes = [
        [rng.randrange(5, 900) for _ in range(rng.randrange(300, 1500))]
        for _ in range(num_prefixes)
    ]
    return [
        {
            "prompt": [*rng.choice(prefixes), *(rng.randrange(5, 900) for _ in range(20))],
            "max_tokens": rng.randrange(8, 48),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(num_requests)
    ]


def serve_round(
    server: Server, asked: Sequence[dict[str, Any]], num_clients: int, seed: int, leavers: float
) -> Round:
    """All requests once, ``num_clients`` at a time."""
    done, numbers, lock = Round(), iter(range(len(asked))), threading.Lock()
    engine = server.engine.pid

    def work(rng: random.Random) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            leaves = rng.randrange(0, 6) if rng.random() < leavers else None
            try:
                told = ask(server.http, "/v1/completions", asked[number], leaves)
            except httpx.HTTPError as error:
                done.violations.append(f"request {number}: {error!r}")
                continue
            done.counts[told.end] += 1
            if told.end == "answered":
                [done.texts[number]] = told.texts
            elif told.end != "left":
                done.violations.append(f"request {number}: {told.status} {told.last}")

    began = time.monotonic()
    threads = [
        threading.Thread(target=work, args=(random.Random(seed + place),))
        for place in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.counts["seconds"] = round(time.monotonic() - began)
    try:
        server.until_idle()
        if server.engine.pid != engine:
            done.violations.append("the engine was started again")
    except (AssertionError, ValueError, httpx.HTTPError) as error:
        done.violations.append(f"no engine serves in the end: {error!r}")
        return done
    done.violations += [f"the log has {text!r}" for text in _BAD if text in server.said]
    kv = server.kv()
    for name in ("persist_restored_blocks_total", "num_preemptions_total", "evicted_blocks_total"):
        done.counts[name] = int(kv[name])
    return done


def run(
    folder: Path, num_requests: int, num_clients: int, seed: int, rounds: int
) -> dict[str, Any]:
    """Rounds with persistence over one directory, and before them one without."""
    asked = bodies(num_requests, 40, seed)
    with Server(folder / "plain", engine_options=ENGINE) as server:
        expected = serve_round(server, asked, num_clients, seed, leavers=0.0)
    result: dict[str, Any] = {"without": {**expected.counts, "violations": expected.violations}}
    for number in range(rounds):
        options = [*ENGINE, "--kv-persist", str(folder / "kv")]
        with Server(folder / f"log{number}", engine_options=options) as server:
            found = serve_round(server, asked, num_clients, seed + 100 * number, _LEAVERS)
            server.end()  # it writes what it keeps
        for name, text in found.texts.items():
            if text != expected.texts[name]:
                found.violations.append(f"request {name} has another answer")
        result[f"round {number + 1}"] = {**found.counts, "violations": found.violations}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=800, help="of each round")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = run(Path(directory), args.requests, args.clients, args.seed, args.rounds)
    print(json.dumps(result, indent=1))
    return int(any(each["violations"] for each in result.values()))


if __name__ == "__main__":
    raise SystemExit(main())
