"""Kill runs of a batch at random places: ``python -m tests.batch.killed KILLS [SEED]``."""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vmserve.batch.lines import Index, read_lines
from vmserve.batch.output import Output
from vmserve.batch.run import Batch, Figures
from vmserve.client.client import Client
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.testing import ScriptedTransport

NUM_LINES = 60


def run_batch(
    source: Path, target: Path, engine: ScriptedTransport | None = None, **how: Any
) -> Figures:
    """What the command does, over the fake engine."""
    client = Client(engine or ScriptedTransport())

    async def answer() -> Figures:
        app = create_app(client, ServerConfig(served_model_names=("fake",)))
        output = Output(target, overwrite=how.pop("overwrite", False))
        try:
            with source.open("rb") as file:
                index = Index(read_lines(file))
                failed = output.resume(index, retry_failed=how.pop("retry_failed", False))
                figures = Figures(index.num_lines, index.num_lines - index.num_left, failed)
                file.seek(0)
                lines = how.pop("lines", read_lines)(file)
                stop, grace = how.pop("stop", asyncio.Event()), how.pop("grace", 5.0)
                how.setdefault("concurrency", 8)
                batch = Batch(app, client, lines, index, output, figures, **how)
                await batch.run(stop, grace)
            return figures
        finally:
            output.close()
            app.state.context.close()

    return asyncio.run(answer())


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "Hi", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text(
        "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    )
    return path


def replies(path: Path) -> dict[str, dict[str, Any]]:
    """By custom_id, or by the line's number. No two are of one line."""
    found: dict[str, dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        reply = json.loads(text)
        key = str(reply["error"]["line"]) if reply["error"] else reply["custom_id"]
        assert key not in found
        found[key] = reply
    return found


def kill_runs(folder: Path, num_kills: int, seed: int) -> int:
    """Kill so many runs, on as many files as it takes; returns how many lines had been torn."""
    chance = random.Random(seed)
    num_torn = num_files = 0
    while num_kills:
        num_files += 1
        source, target = folder / f"in{num_files}", folder / f"out{num_files}"
        lines: list[Any] = [
            line(f"id{i}", echo=bool(i % 3), **({"model": "other"} if i % 7 == 0 else {}))
            for i in range(NUM_LINES)
        ]
        lines[chance.randrange(NUM_LINES)] = "{}\n"
        write(source, lines)
        while num_kills:
            before = (
                set(target.read_bytes().splitlines(keepends=True)) if target.exists() else set()
            )
            retry = chance.random() < 0.3
            most = chance.randrange(30_000)
            pid = os.fork()
            if not pid:
                try:
                    run_batch(
                        source, target, concurrency=chance.choice([1, 3, 20]), retry_failed=retry
                    )
                    os._exit(0)
                except BaseException as error:  # noqa: BLE001 - the parent tells
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(1)
            status = _kill_at(pid, target, most)
            after = set(target.read_bytes().splitlines(keepends=True)) if target.exists() else set()
            kept = {
                each for each in before if each.endswith(b"\n") and (not retry or _succeeded(each))
            }
            assert kept <= after, f"{len(kept - after)} finished lines are lost"
            if status == 0:
                break
            assert status == -signal.SIGKILL, status
            num_kills -= 1
            if chance.random() < 0.3 and target.exists():  # as a system without power may
                size = target.stat().st_size
                last = target.read_bytes()[:-1].rfind(b"\n") + 1
                os.truncate(target, chance.randint(last, size) if last < size else size)
                num_torn += 1
        run_batch(source, target)
        assert len(replies(target)) == NUM_LINES
    return num_torn


def _succeeded(text: bytes) -> bool:
    reply = json.loads(text)
    return reply["error"] is None and reply["response"]["status_code"] == 200


def _kill_at(pid: int, target: Path, num_bytes: int) -> int:
    """Kill the process when ``target`` has so many bytes; return how it ended."""
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if target.exists() and target.stat().st_size >= num_bytes:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.0005)
    return os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(2**32)
    with tempfile.TemporaryDirectory() as folder:
        torn = kill_runs(Path(folder), int(sys.argv[1]), seed)
    print(f"seed {seed}: {sys.argv[1]} kills, {torn} lines torn: every line once")
