"""Files that only their owner may read."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

__all__ = ["warn_if_shared", "write_private"]

logger = logging.getLogger(__name__)


def warn_if_shared(path: Path, option: str) -> None:
    """Say so if others than its owner may use the file with secrets that ``option`` names."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & 0o077:
        logger.warning(
            "%s: other users may use %s (mode %04o): chmod 600 it", option, path, stat.S_IMODE(mode)
        )


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 0600, or replace it: readers find the old one or the new one, whole."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
    temporary.rename(path)
