"""What tests of several folders use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["peak_bytes", "run_python", "smollm2_file", "start_python", "until"]


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for what another thread or process brings about."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def start_python(code: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """The code in a process of its own, which it may crash; it imports what this one imports."""
    path = [*sys.path, str(Path(__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", code],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """:func:`start_python` to its end; one that hangs is killed, and the test fails."""
    with start_python(code) as process:
        try:
            out, err = process.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the process hangs: {out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that torch held for ``work`` on the CPU."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def smollm2_file() -> Path:
    """SmolLM2's GGUF file: of VMSERVE_TEST_SMOLLM2_GGUF, or as it was pulled. Without it the test
    is skipped."""
    from vmserve.models.pullable import PULLABLE, find_pulled

    given = os.environ.get("VMSERVE_TEST_SMOLLM2_GGUF")
    found = Path(given) if given else find_pulled(PULLABLE["smollm2"])
    if found is None:
        pytest.skip("SmolLM2 is not here: run `vmserve pull smollm2`")
    return found
