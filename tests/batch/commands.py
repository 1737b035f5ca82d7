"""``vmserve batch`` as a process that is killed on its way."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.batch.killed import line, replies, write
from tests.chaos.harness import until
from vmserve import LLM, SamplingParams

__all__ = ["check_killed_runs"]

NUM_LINES = 40
OPTIONS: dict[str, Any] = {"kv_cache_memory": "64MiB", "max_model_len": 512, "max_num_seqs": 2}
_COMMAND = [sys.executable, "-c", "from vmserve.cli.main import main; main()", "batch"]


def check_killed_runs(
    folder: Path, *options: str, during: Callable[[psutil.Process], None] = lambda command: None
) -> None:
    """Kill two runs after some lines, call ``during`` in a third, and look at all replies."""
    prompts = [[5 + index % 9] * (20 + index) for index in range(NUM_LINES)]
    body = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    lines = [line(f"{index}", **{**body, "prompt": each}) for index, each in enumerate(prompts)]
    source, target = write(folder / "in", lines), folder / "out"
    given = [
        word
        for name, value in OPTIONS.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]

    def finished() -> list[str]:
        return target.read_text().splitlines() if target.exists() else []

    def run(most: int, then: Callable[[psutil.Process], None]) -> int:
        """Begin, call ``then`` after ``most`` lines, and wait for the end."""
        with (folder / "log").open("w") as log:
            command = psutil.Popen([*_COMMAND, source, target, *given, *options], stderr=log)
        try:
            until(lambda: len(finished()) >= most or not command.is_running(), 200, "some lines")
            assert command.poll() is None, (folder / "log").read_text()
            before = finished()[:most]
            then(command)
            status = int(command.wait(200))
        finally:
            if command.poll() is None:
                command.kill()
        assert finished()[: len(before)] == before
        return status

    for most in (6, 14):
        assert run(most, lambda command: command.kill()) == -signal.SIGKILL
    assert run(20, during) == 0, (folder / "log").read_text()
    told = replies(target)
    assert len(told) == NUM_LINES
    with LLM(**OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = [each.outputs[0].text for each in llm.generate(prompts, params)]
    texts = [
        told[f"{index}"]["response"]["body"]["choices"][0]["text"] for index in range(NUM_LINES)
    ]
    assert texts == expected
