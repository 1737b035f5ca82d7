"""Files and directories that one process at a time writes; the lock ends with the process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vmserve.errors import ConfigurationError

__all__ = ["lock_for_writing"]


def lock_for_writing(fd: int, path: Path, output: Path) -> None:
    """Lock what ``fd`` has open, as long as it is what has the name ``path``.

    ``output``: what the error says is written. Raises
    :class:`~vmserve.errors.ConfigurationError` if another process has the lock, or has put
    something else in the place of ``path``.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    raise ConfigurationError(f"{output}: another run writes it: wait for its end")
