"""``python -m tests.chaos.soak --minutes N``: a server under all kinds of load, and what grows.

Two models share a small pool that persists. Chats, completions, grammars and embeddings of random
shape, many with common prefixes, and beam searches go to ``vmserve serve``; a fifth of the streams
is abandoned. Memory is that of all its processes together, by their proportional set size (PSS):
``own`` is anonymous and shared memory, the KV cache with it, and what can leak; the rest are files,
of which a process has the larger part the fewer others on the machine have mapped them too. Growth
is the slope of a line through what was measured after the first third, the warm-up. Ends with
status 1 if requests failed, pages are held in the end, or /metrics counts not as the clients did.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.harness import Pss, Server, ask, pss, until

_WARM_UP = 1 / 3
_ABANDONED = 0.2
_MODELS = ("a", "b")
_OPTIONS = (
    *(part for name in _MODELS for part in ("--model", f"{name}=vmserve-embedded")),
    *("--kv-cache-memory", "24MiB", "--max-model-len", "1024", "--max-num-seqs", "16"),
)
_PREFIXES = 40
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kept = ("--kv-persist", str(Path(directory, "kv")), "--kv-persist-bytes", "256MiB")
        with Server(Path(directory) / "log", *_OPTIONS, *kept, engine_options=()) as server:
            result = soak(server, args.minutes * 60, args.clients, args.seed)
            result["tracebacks"] = server.said.count("Traceback")
    text = json.dumps(result, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")
    is_bad = any(result[name] for name in ("failed", "leaked_pages", "miscounted", "tracebacks"))
    return 1 if is_bad else 0


def soak(server: Server, seconds: float, num_clients: int, seed: int) -> dict[str, Any]:
    over = threading.Event()
    clients = [Client(server, seed + number, over) for number in range(num_clients)]
    began = time.monotonic()
    samples: list[tuple[float, Pss]] = []
    while (now := time.monotonic() - began) < seconds:
        samples.append((now, pss(server)))
        time.sleep(min(5.0, max(seconds / 60, 0.2)))
    over.set()
    for client in clients:
        client.thread.join()
    counts = sum((client.counts for client in clients), Counter[str]())
    until(lambda: not figures(server, "num_requests_running", "used_pages"), 60, "nothing runs")
    warm = [sample for sample in samples if sample[0] >= _WARM_UP * seconds]
    growth = {
        "growth_mib_per_hour": slope([(at, each.own) for at, each in warm]),
        "file_growth_mib_per_hour": slope([(at, each.files) for at, each in warm]),
    }
    return {
        "minutes": round(seconds / 60, 2),
        "finished": counts["finished"],
        "abandoned": counts["abandoned"],
        "failed": counts["failed"],
        "by_kind": {name: counts[name] for name in KINDS},
        "own_mib": round(samples[-1][1].own / 2**20, 1),
        "most_own_mib": round(max(each.own for _, each in samples) / 2**20, 1),
        "file_mib": round(samples[-1][1].files / 2**20, 1),
        **{name: round(value * 3600 / 2**20, 2) for name, value in growth.items()},
        "leaked_pages": int(figures(server, "used_pages")),
        "restored_blocks": int(figures(server, "persist_restored_blocks_total")),
        "preemptions": int(figures(server, "num_preemptions_total")),
        "miscounted": miscounted(server, counts),
        "file_descriptors": psutil.Process(server.popen.pid).num_fds(),
    }


def figures(server: Server, *names: str) -> float:
    """Sum of these of ``/metrics``, of all models."""
    wanted = {f"vmserve:{name}" for name in names}
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.name in wanted
    )


def miscounted(server: Server, counts: Counter[str]) -> list[str]:
    """What ``/metrics`` says otherwise than the clients, who may leave before a request begins."""
    found = []
    ended = figures(server, "request_success_total")
    if not counts["finished"] <= ended <= counts["finished"] + counts["abandoned"]:
        found.append(f"{ended:.0f} requests ended")
    tokens = figures(server, "generation_tokens_total")
    if tokens < counts["tokens"] or (not counts["abandoned"] and tokens != counts["tokens"]):
        found.append(f"{tokens:.0f} tokens; finished requests alone have {counts['tokens']}")
    return found


# -- clients ----------------------------------------------------------------------------


def _prompt(rng: random.Random) -> list[int]:
    """One of the common prefixes and an ending of its own."""
    common = random.Random(rng.randrange(_PREFIXES))
    prefix = [common.randrange(5, 900) for _ in range(common.randrange(64, 640))]
    return [*prefix, *(rng.randrange(5, 900) for _ in range(rng.randrange(1, 60)))]


def _completion(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "completions", {
        "prompt": _prompt(rng),
        "max_tokens": rng.randrange(1, 200),
        "ignore_eos": True,
        "n": rng.choice([1, 1, 1, 3]),
        "logprobs": rng.choice([None, None, 5]),
        "stop": rng.choice([None, ["\n"]]),
        "stream": True,
    }


def _chat(rng: random.Random) -> tuple[str, dict[str, Any]]:
    content = "tell me of the sea " * rng.randrange(1, 60)
    return "chat/completions", {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": rng.randrange(1, 120),
        "stream": True,
    }


def _grammar(rng: random.Random) -> tuple[str, dict[str, Any]]:
    # A few hundred different ones: they are compiled, cached and dropped again.
    properties = {**_SCHEMA["properties"], f"p{rng.randrange(300)}": {"type": "boolean"}}
    schema = {**_SCHEMA, "properties": properties}
    body = _chat(rng)[1]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return "chat/completions", {**body, "response_format": wanted}


def _beam(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "completions", {
        "prompt": _prompt(rng)[:200],
        "max_tokens": rng.randrange(1, 40),
        "use_beam_search": True,
        "n": rng.randrange(2, 5),
        "temperature": 0,
    }


def _embedding(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return "embeddings", {"input": "the sea and the hills " * rng.randrange(1, 80)}


KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "completion": _completion,
    "chat": _chat,
    "grammar": _grammar,
    "beam": _beam,
    "embedding": _embedding,
}


class Client:
    """Asks until it is told to stop, in a thread."""

    def __init__(self, server: Server, seed: int, over: threading.Event) -> None:
        self._server, self._rng, self._over = server, random.Random(seed), over
        self.counts: Counter[str] = Counter()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            kind = self._rng.choices(list(KINDS), [4, 4, 2, 1, 1])[0]
            path, body = KINDS[kind](self._rng)
            body["model"] = self._rng.choice(_MODELS)
            is_stream = bool(body.get("stream"))
            if is_stream:
                body["stream_options"] = {"include_usage": True}
            leaves = 10 if is_stream and self._rng.random() < _ABANDONED else None
            try:
                told = ask(self._server.http, f"/v1/{path}", body, leaves)
            except httpx.HTTPError:
                ended = "failed"
            else:
                ended = {"answered": "finished", "left": "abandoned"}.get(told.end, "failed")
            if ended == "finished":
                self.counts["tokens"] += told.last["usage"].get("completion_tokens", 0)
            self.counts.update([kind, ended])


def slope(samples: list[tuple[float, int]]) -> float:
    """Bytes per second, by least squares."""
    return statistics.linear_regression(*zip(*samples, strict=True)).slope if samples[1:] else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
