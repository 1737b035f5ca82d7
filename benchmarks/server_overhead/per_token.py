"""Processor time of the server's process per streamed token: no model, no engine to disturb it.

    python benchmarks/server_overhead/per_token.py [--streams 64] [--tokens 150] [--repeats 10]

The real server, over a Unix socket, gets its tokens from an engine that says them at fixed
intervals (scripted_engine.py). The least of many short repeats is what it costs where nothing
else wants the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from client import cpu_seconds, stream_all

from vmserve.client.client import Client
from vmserve.client.transports.base import Facts
from vmserve.client.transports.process import EngineProcess, ProcessSource
from vmserve.client.transports.supervised import Supervised, Supervision
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import bind
from vmserve.server.run import serve
from vmserve_bench.lab import script

#: Tokens of the short answers, whose cost is taken from that of the long ones.
FEW = 20
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [300] * 32}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with usage": ("/v1/chat/completions", CHAT | USAGE),
}
#: Seconds of the server's processor for each stream, and events for each token.
Cost = tuple[float, float]


class ScriptedSource(ProcessSource):
    """The engine is scripted_engine.py."""

    def open(self, facts: Facts | None = None) -> EngineProcess:
        program = str(Path(__file__).with_name("scripted_engine.py"))
        return EngineProcess({}, 30, "text", program=[program])


def main() -> None:
    parser = script.parser(__doc__, streams=64, tokens=150, step_ms=20.0, repeats=10)
    parser.add_argument("--kinds", nargs="*", default=["completions", "chat"], choices=BODIES)
    args = parser.parse_args()
    os.environ["VMSERVE_STEP_SECONDS"] = str(args.step_ms / 1000)
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/socket"
        server = multiprocessing.get_context("fork").Process(target=serve_at, args=(path,))
        server.start()
        try:
            print(json.dumps(measure(args, path, server), indent=1))
        finally:
            server.terminate()
            server.join()


def serve_at(path: str) -> None:
    async def run() -> None:
        engine = Client(Supervised(ScriptedSource({}, Supervision())))
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(15, stop.set)
        config = ServerConfig(uds=path, served_model_names=("m",))
        await serve(create_app(engine, config), bind(config), stop)

    asyncio.run(run())


def measure(args: argparse.Namespace, path: str, server: BaseProcess) -> dict[str, Any]:
    while not listens(path):
        if not server.is_alive():
            raise SystemExit(f"the server did not start: exit status {server.exitcode}")
        time.sleep(0.05)

    def cost(kind: str, num_tokens: int) -> Cost:
        assert server.pid is not None
        cpu = cpu_seconds(server.pid)
        target, body = BODIES[kind]
        told = {**body, "max_tokens": num_tokens, "ignore_eos": True}
        num_events, _ = stream_all(path, target, [told] * args.streams)
        spent = cpu_seconds(server.pid) - cpu
        return spent / args.streams, num_events / (args.streams * num_tokens)

    for kind in args.kinds:
        cost(kind, 4)  # warm-up
    found: dict[str, list[tuple[Cost, Cost]]] = {kind: [] for kind in args.kinds}
    for kind in args.kinds * args.repeats:
        found[kind].append((cost(kind, FEW), cost(kind, FEW + args.tokens)))
    return {kind: summary(pairs, args.tokens) for kind, pairs in found.items()}


def listens(path: str) -> bool:
    with (
        contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
        socket.socket(socket.AF_UNIX) as probe,
    ):
        probe.connect(path)
        return True
    return False


def summary(pairs: list[tuple[Cost, Cost]], num_tokens: int) -> dict[str, float]:
    """Microseconds per token are what the longer answers cost more; least, and median.

    ``events_per_token``: fewer than 1 where the server was too slow for the interval, of the
    longer answers; the least.
    """
    short = min(seconds for (seconds, _), _ in pairs)
    long = min(seconds for _, (seconds, _) in pairs)
    slopes = [(many - few) / num_tokens for (few, _), (many, _) in pairs]
    return {
        "us_per_token": round(1e6 * (long - short) / num_tokens, 2),
        "us_per_token_median": round(1e6 * statistics.median(slopes), 2),
        "us_per_request": round(1e6 * (short - FEW * (long - short) / num_tokens), 1),
        "events_per_token": round(min(events for _, (_, events) in pairs), 3),
    }


if __name__ == "__main__":
    main()
