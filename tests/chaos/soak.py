"""``python -m tests.chaos.soak --minutes N``: a server under steady load, and what grows in it.

Requests of random shape, a fifth of them abandoned, go to ``vmserve serve``. Memory is that of
server and engine together, by its proportional set size (PSS): ``own`` is anonymous and shared
memory, the KV cache with it, and what can leak; the rest are files, of which a process has the
larger part the fewer others on the machine have mapped them too. Growth is the slope of a line
through what was measured after the first third, the warm-up. Ends with status 1 if pages are held
in the end.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests.chaos.harness import Server
from vmserve.bench.lab.measure import read_memory

_WARM_UP = 1 / 3
_ABANDONED = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory) / "log")
        try:
            result = soak(server, args.minutes * 60, args.clients, args.seed)
        finally:
            server.close()
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")
    return 1 if result["leaked_pages"] else 0


def soak(server: Server, seconds: float, num_clients: int, seed: int) -> dict[str, Any]:
    over = threading.Event()
    counts = {"finished": 0, "abandoned": 0, "failed": 0}
    clients = [
        threading.Thread(target=_client, args=(server, random.Random(seed + i), over, counts))
        for i in range(num_clients)
    ]
    for client in clients:
        client.start()
    began = time.monotonic()
    samples: list[tuple[float, Pss]] = []
    while (now := time.monotonic() - began) < seconds:
        samples.append((now, pss(server)))
        time.sleep(min(5.0, max(seconds / 60, 0.2)))
    over.set()
    for client in clients:
        client.join()
    server.until_idle()
    warm = [sample for sample in samples if sample[0] >= _WARM_UP * seconds]
    growth = {
        "growth_mib_per_hour": slope([(at, each.own) for at, each in warm]),
        "file_growth_mib_per_hour": slope([(at, each.files) for at, each in warm]),
    }
    kv = server.kv()
    return {
        "minutes": round(seconds / 60, 2),
        **counts,
        "own_mib": round(samples[-1][1].own / 2**20, 1),
        "file_mib": round(samples[-1][1].files / 2**20, 1),
        **{name: round(value * 3600 / 2**20, 2) for name, value in growth.items()},
        "leaked_pages": int(kv["used_pages"]),
        "open_sequences": int(kv["num_seqs"]),
        "file_descriptors": psutil.Process(server.popen.pid).num_fds(),
    }


def _client(
    server: Server, rng: random.Random, over: threading.Event, counts: dict[str, int]
) -> None:
    while not over.is_set():
        body = {
            "prompt": "x " * rng.randrange(1, 200),
            "max_tokens": rng.randrange(1, 200),
            "ignore_eos": True,
            "n": rng.choice([1, 1, 1, 3]),
            "logprobs": rng.choice([None, None, 5]),
            "stop": rng.choice([None, ["\n"]]),
            "stream": True,
        }
        leaves = rng.random() < _ABANDONED
        try:
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if leaves and number > 10:
                        break
            counts["abandoned" if leaves else "finished"] += 1
        except httpx.HTTPError:
            counts["failed"] += 1


class Pss(NamedTuple):
    """Bytes."""

    own: int
    files: int


def pss(server: Server) -> Pss:
    """Of the server's process and the engine's."""
    both = [read_memory(pid) for pid in (server.popen.pid, server.engine.pid)]
    return Pss(sum(one["anon"] + one["shmem"] for one in both), sum(one["file"] for one in both))


def slope(samples: list[tuple[float, int]]) -> float:
    """Bytes per second, by least squares."""
    num = len(samples)
    if num < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / num
    mean_y = sum(y for _, y in samples) / num
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread


if __name__ == "__main__":
    raise SystemExit(main())
