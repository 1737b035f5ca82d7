"""Files that one process at a time writes or only their owner may read, and files of JSON."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

from vmserve.errors import ConfigurationError

__all__ = ["lock_for_writing", "read_json", "warn_if_shared", "write_private"]

logger = logging.getLogger(__name__)


def lock_for_writing(fd: int, path: Path, output: Path) -> None:
    """Lock what ``fd`` has open, as long as it is what has the name ``path``.

    The lock ends with the process. ``output``: what the error says is written. Raises
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


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``, a file of a model.

    Raises :class:`~vmserve.errors.ConfigurationError` with the reason that there is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_with_floats)
    except OSError as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path.name} is not valid JSON ({error}): fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name} is not a JSON object: fetch the model again")
    return value


def _with_floats(value: dict[str, Any]) -> Any:
    """``transformers`` writes what JSON has no number for as ``{"__float__": "Infinity"}``."""
    if value.keys() == {"__float__"} and isinstance(text := value["__float__"], str):
        return float(text)
    return value
