"""A batch over several engines: the command is killed, and an engine of it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from tests.batch.commands import check_killed_runs


@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_kills_of_the_command_and_of_an_engine_lose_and_repeat_no_line(tmp_path: Path) -> None:
    def kill_an_engine(command: psutil.Process) -> None:
        one, _ = (
            each for each in command.children() if "vmserve.client.engine_main" in each.cmdline()
        )
        one.kill()

    check_killed_runs(tmp_path, "--data-parallel-size", "2", during=kill_an_engine)
