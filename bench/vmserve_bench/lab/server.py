"""``vmserve serve`` in a process of its own, for what measures it from outside."""

from __future__ import annotations

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
    from collections.abc import Iterator

__all__ = ["serving"]

_READY = re.compile(r"ready: serving .* at (\S+)")
_POLL_SECONDS = 0.05


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve with these options of ``vmserve serve`` until the block ends.

    Yields the process and its address once it serves. Raises :class:`VmserveError` with what the
    process said if it ends before.
    """
    command = [sys.executable, "-m", "vmserve", "serve", *options]
    # A file, because a pipe that nobody reads fills up.
    with tempfile.NamedTemporaryFile() as log, subprocess.Popen(command, stderr=log) as process:
        try:
            while (found := _READY.search(Path(log.name).read_text())) is None:
                if process.poll() is not None:
                    said = Path(log.name).read_text().strip()
                    raise VmserveError(f"the server did not start: {said}")
                time.sleep(_POLL_SECONDS)
            yield process, found[1]
        finally:
            process.terminate()
