"""Processor time of the server's process per streamed token: no model, no engine to disturb it.

    python benchmarks/server_overhead/per_token.py [--streams 64] [--tokens 200] [--repeats 10]

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
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from client import cpu_seconds, stream_all

from vmserve.client.process_llm import ProcessLLM
from vmserve.client.transports.process import EngineProcess
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import bind
from vmserve.server.run import serve

#: Tokens of the short answers, whose cost is taken from that of the long ones.
FEW = 20
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [300] * 32}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "chat with usage": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
}


class Cost(NamedTuple):
    """``seconds``: of the server's processor, for each stream."""

    seconds: float
    events_per_token: float


class ScriptedLLM(ProcessLLM):
    """A :class:`ProcessLLM` whose engine is scripted_engine.py."""

    def _spawn(self) -> EngineProcess:
        script = Path(__file__).with_name("scripted_engine.py")
        return EngineProcess(self._options, 30, "text", program=[str(script)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", default=["completions", "chat"], choices=BODIES)
    args = parser.parse_args()
    os.environ["VMSERVE_STEP_SECONDS"] = str(args.step_ms / 1000)
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "socket")
        server = multiprocessing.get_context("fork").Process(target=serve_at, args=(path,))
        server.start()
        try:
            report = measure(args, path, server)
        finally:
            server.terminate()
            server.join()
    print(json.dumps(report, indent=1))
    return 0


def serve_at(path: str) -> None:
    asyncio.run(run_server(path))


async def run_server(path: str) -> None:
    engine = ScriptedLLM()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(15, stop.set)
    config = ServerConfig(uds=path, served_model_names=("m",))
    await serve(create_app(engine, config), bind(config), stop)


def measure(args: argparse.Namespace, path: str, server: BaseProcess) -> dict[str, Any]:
    while not listens(path):
        if not server.is_alive():
            raise SystemExit(f"the server did not start: exit status {server.exitcode}")
        time.sleep(0.05)
    assert server.pid is not None
    found: dict[str, list[tuple[Cost, Cost]]] = {kind: [] for kind in args.kinds}
    for kind in args.kinds:
        cost(server.pid, path, kind, args.streams, 4)  # warm-up
    for _ in range(args.repeats):
        for kind in args.kinds:
            short, long = (
                cost(server.pid, path, kind, args.streams, tokens)
                for tokens in (FEW, FEW + args.tokens)
            )
            found[kind].append((short, long))
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
    short, long = (min(one.seconds for one in costs) for costs in zip(*pairs, strict=True))
    slopes = [(long.seconds - short.seconds) / num_tokens for short, long in pairs]
    return {
        "us_per_token": round(1e6 * (long - short) / num_tokens, 2),
        "us_per_token_median": round(1e6 * statistics.median(slopes), 2),
        "us_per_request": round(1e6 * (short - FEW * (long - short) / num_tokens), 1),
        "events_per_token": round(min(long.events_per_token for _, long in pairs), 3),
    }


def cost(pid: int, path: str, kind: str, num: int, num_tokens: int) -> Cost:
    cpu = cpu_seconds(pid)
    target, body = BODIES[kind]
    told = {**body, "max_tokens": num_tokens, "ignore_eos": True}
    num_events, _ = stream_all(path, [(target, told)] * num)
    spent = cpu_seconds(pid) - cpu
    return Cost(spent / num, num_events / (num * num_tokens))


if __name__ == "__main__":
    sys.exit(main())
