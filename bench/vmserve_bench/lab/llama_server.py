"""llama.cpp's server in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from vmserve.errors import VmserveError
from vmserve_bench.lab.machine import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["llama_serving"]

_POLL_SECONDS = 0.05
_START_SECONDS = 120.0


@contextmanager
def llama_serving(
    program: str, *options: str, variables: Mapping[str, str] | None = None
) -> Iterator[httpx.Client]:
    """Serve with these options of llama.cpp's server until the block ends.

    Yields a client of it once it is ready. Raises :class:`VmserveError` if it does not get there.
    """
    port = str(free_port())
    command = [program, *options, "--host", "127.0.0.1", "--port", port]
    # How its idle threads wait is its own choice, and not what importing vmserve has put there.
    inherited = {name: each for name, each in os.environ.items() if name != "OMP_WAIT_POLICY"}
    silent = subprocess.DEVNULL
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0) as client,
        subprocess.Popen(
            command, stdout=silent, stderr=silent, env={**inherited, **(variables or {})}
        ) as process,
    ):
        try:
            deadline = time.monotonic() + _START_SECONDS
            is_ready = False
            while not is_ready:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise VmserveError(f"{' '.join(command)} does not serve")
                time.sleep(_POLL_SECONDS)
                with contextlib.suppress(httpx.TransportError):
                    is_ready = client.get("/health").is_success
            yield client
        finally:
            process.terminate()
