"""Servers in processes of their own, for what measures them from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import httpx

from vmserve.errors import VmserveError
from vmserve_bench.lab.machine import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Process", "inherited", "llama_serving", "serving", "started"]

Process: TypeAlias = "subprocess.Popen[bytes]"

_READY = re.compile(r"ready: serving .* at (\S+)")
_POLL_SECONDS = 0.01
_START_SECONDS = 120.0
_GRACE_SECONDS = 60.0


def inherited(*left_out: str) -> dict[str, str]:
    """This process's variables, without these and what importing vmserve has put there.

    How idle threads wait is another engine's own choice.
    """
    without = {"OMP_WAIT_POLICY", *left_out}
    return {name: value for name, value in os.environ.items() if name not in without}


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[Process, Callable[[], str]]]:
    """Start a process, and end it with all that it has started. Yields what it has said, too."""
    # A file, because a pipe that nobody reads fills up.
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process, lambda: Path(log.name).read_text(errors="replace").strip()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # its children may outlive it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def serving(
    *options: str, command: Sequence[str] = ("-m", "vmserve", "serve")
) -> Iterator[tuple[Process, str]]:
    """Serve with these options of ``vmserve serve`` until the block ends.

    ``command``: arguments of the interpreter that serve otherwise. Yields the process and its
    address once it serves. Raises :class:`VmserveError` with what the process said if it ends
    before.
    """
    # With a key of the environment's, the server would turn us away.
    environment = {name: v for name, v in os.environ.items() if name != "VMSERVE_API_KEY"}
    with started([sys.executable, *command, *options], environment) as (process, said):
        while (found := _READY.search(said())) is None:
            if process.poll() is not None:
                raise VmserveError(f"the server did not start: {said()}")
            time.sleep(_POLL_SECONDS)
        yield process, found[1]


@contextmanager
def llama_serving(
    program: str, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Serve with these options of llama.cpp's server until the block ends.

    Yields a client of it once it is ready. Raises :class:`VmserveError` if it does not get there.
    """
    port = str(free_port())
    command = [program, *options, "--host", "127.0.0.1", "--port", port]
    deadline, is_ready = time.monotonic() + _START_SECONDS, False
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as client,
        started(command, {**inherited(), **(variables or {})}) as (process, _),
    ):
        while not is_ready:
            if process.poll() is not None or time.monotonic() > deadline:
                raise VmserveError(f"{' '.join(command)} does not serve")
            time.sleep(_POLL_SECONDS)
            with contextlib.suppress(httpx.TransportError):
                is_ready = client.get("/health").is_success
        yield client
