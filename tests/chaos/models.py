"""Several models under load, of which one after the other comes, goes, sleeps, wakes or is killed.

    python -m tests.chaos.models --minutes 10

Every request must get an answer or an error. The pool's laws are read from the live figures all the
time. At the end nothing may be left of models that have gone: no memory lent, no process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.harness import Disturbance, Server, ask, until

OPTIONS = (
    *("--model", "a=vmserve-embedded", "--model", "b=vmserve-embedded", "--max-num-seqs", "8"),
    *("--kv-cache-memory", "24MiB", "--engine-restarts", "1000000", "--admin-api-key", "admin"),
    *("--idle-unload", "2"),
)
ADMIN = {"authorization": "Bearer admin"}
CLIENTS = 4


class Changes:
    """What an admin does to models. ``names``: those that there are, if all adding succeeds.

    ``pause``: seconds in which what a model serves may end.
    """

    def __init__(self, chance: random.Random, model: str, most: int, pause: float) -> None:
        self.names = ["a", "b"]
        self._chance, self._model, self._most, self._pause = chance, model, most, pause
        self._num_added = 0

    def next(self) -> tuple[str, dict[str, Any]]:
        """The last part of the route, and the body."""
        chance, what = self._chance, self._chance.choice(["add", "remove", "sleep", "wake"])
        if what == "add" and len(self.names) < self._most:
            self._num_added += 1
            self.names.append(f"m{self._num_added}")
            is_loaded = chance.random() < 0.5
            return what, {"model": self._model, "name": self.names[-1], "preload": is_loaded}
        name = chance.choice(self.names)
        if what == "remove" and len(self.names) > 2:
            self.names.remove(name)
            return what, {"model": name, "timeout": chance.choice([self._pause / 50, self._pause])}
        if what in ("sleep", "wake"):
            pause = {"timeout": self._pause / 10} if what == "sleep" else {}
            return what, {"model": name, **pause}
        return "change", {"model": name, "weight": chance.choice([0.5, 1, 4])}


class Chaos(Disturbance):
    """Models of one server that change."""

    def __init__(self, server: Server, seed: int) -> None:
        super().__init__(server, seed)
        self._changes = Changes(self._random, "vmserve-embedded", most=4, pause=5)

    def run(self, seconds: float) -> None:
        """Change models for so long, while clients ask and the laws are checked."""
        works = [*(lambda number=n: self._ask(number) for n in range(CLIENTS)), self._look]
        end = time.monotonic() + seconds
        with self._meanwhile(works, 120) as threads:
            while time.monotonic() < end:
                if self._random.random() < 1 / 6:
                    self._kill()
                else:
                    self._post(*self._changes.next())
                time.sleep(self._random.uniform(0, 0.5))
        if any(thread.is_alive() for thread in threads):
            self.violations.append("a client still waits for its answer")

    # -- clients ------------------------------------------------------------------------

    def _ask(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.server.url, timeout=100) as http:
            while not self._over.is_set():
                name = chance.choice([*self._changes.names, "none"])
                body = {
                    "model": name,
                    "prompt": "Once upon a time",
                    "max_tokens": chance.choice([1, 30, 300]),
                    "stream": chance.random() < 0.5,
                    "request_timeout": 60,
                }
                try:
                    told = ask(http, "/v1/completions", body)
                except httpx.HTTPError as error:
                    self.violations.append(f"no answer: {error!r}")
                    continue
                if told.end == "broken":
                    self.violations.append(f"{told.status} without a reason: {told.last!r:.200}")
                self.counts[str(told.status) if told.end == "refused" else told.end] += 1

    def _look(self) -> None:
        """The pool's laws: no more is lent than there is, and nobody has less than its floor."""
        with httpx.Client(base_url=self.server.url, timeout=100) as http:
            while not self._over.wait(0.05):
                live = http.get("/v1/kv/live").json()
                rows = [row["memory"] for row in live["models"] if row["memory"] is not None]
                lent = sum(row["granted_bytes"] for row in rows)
                if lent > live["kv_pool"]["size_bytes"]:
                    self.violations.append(f"{lent} bytes are lent of {live['kv_pool']}")
                for row in live["models"]:
                    memory = row["memory"]
                    is_below = memory and memory["granted_bytes"] < memory["floor_bytes"]
                    if is_below and row["state"] == "ready":
                        self.violations.append(f"below its floor: {row}")
                self.counts["looks"] += 1

    # -- what is done to models -----------------------------------------------------------

    def _post(self, what: str, body: dict[str, Any]) -> None:
        reply = self.server.http.post(f"/v1/models/{what}", json=body, headers=ADMIN)
        self.counts[f"{what} {reply.status_code}"] += 1
        if reply.status_code >= 500 and what != "wake":
            self.violations.append(f"{what} {body}: {reply.text[:300]}")

    def _kill(self) -> None:
        """An engine: what it serves gets errors, and it comes back."""
        engines = psutil.Process(self.server.popen.pid).children()
        if engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._random.choice(engines).kill()
            self.counts["killed"] += 1

    # -- the end --------------------------------------------------------------------------

    def check_what_is_left(self) -> None:
        """One model that sleeps: no memory is lent, and there is no engine."""
        for name in self._changes.names[1:]:
            self._post("remove", {"model": name, "timeout": 5})
        server = psutil.Process(self.server.popen.pid)
        until(lambda: self._pool_is_whole(), 60, "all memory is back")
        until(lambda: not server.children(), 60, "all engines have ended")

    def _pool_is_whole(self) -> bool:
        live = self.server.http.get("/v1/kv/live").json()
        pool = live["kv_pool"]
        return bool(pool["free_bytes"] == pool["size_bytes"])


def chaos(log: Path, seconds: float, seed: int) -> Chaos:
    """Run it on a fresh server, and return what came of it."""
    with Server(log, *OPTIONS) as server:
        done = Chaos(server, seed)
        done.run(seconds)
        done.check_what_is_left()
        server.end()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="file for what the server says")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        done = chaos(options.log or Path(directory) / "log", options.minutes * 60, options.seed)
    print(json.dumps({"violations": done.violations, **done.counts}, indent=1))
    raise SystemExit(bool(done.violations))


if __name__ == "__main__":
    main()
