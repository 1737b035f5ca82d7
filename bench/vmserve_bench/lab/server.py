"""``vmserve serve`` in a process of its own, for what measures it from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vmserve.errors import VmserveError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["serving"]

_READY = re.compile(r"ready: serving .* at (\S+)")
_POLL_SECONDS = 0.01


@contextmanager
def serving(
    *options: str, command: Sequence[str] = ("-m", "vmserve", "serve")
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve with these options of ``vmserve serve`` until the block ends.

    ``command``: arguments of the interpreter that serve otherwise. Yields the process and its
    address once it serves. Raises :class:`VmserveError` with what the process said if it ends
    before.
    """
    # With a key of the environment's, the server would turn us away.
    environment = {name: v for name, v in os.environ.items() if name != "VMSERVE_API_KEY"}
    arguments = [sys.executable, *command, *options]
    # A file, because a pipe that nobody reads fills up.
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(arguments, stderr=log, env=environment) as process,
    ):
        try:
            while (found := _READY.search(Path(log.name).read_text())) is None:
                if process.poll() is not None:
                    said = Path(log.name).read_text().strip()
                    raise VmserveError(f"the server did not start: {said}")
                time.sleep(_POLL_SECONDS)
            yield process, found[1]
        finally:
            process.terminate()
