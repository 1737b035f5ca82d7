"""What processes do that another one starts and ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["child_environment", "describe_end", "die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> bool:
    """Have the kernel kill this process when the *thread* that started it ends.

    False: it has ended already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent_pid


def child_environment() -> dict[str, str]:
    """Environment variables for a Python process that finds modules where this process does.

    Numpy's library makes no threads there: the engine multiplies no matrices with it.
    """
    import_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {"OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": import_path}


def describe_end(status: int) -> str:
    """How a process ended, by its status as Popen has it."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
