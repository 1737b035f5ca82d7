"""Where files are kept that can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path

from vmserve.errors import ConfigurationError

__all__ = ["user_cache"]


def user_cache(kind: str) -> Path:
    """``$XDG_CACHE_HOME/vmserve/KIND``, by default under ``~/.cache``; it may not exist.

    Raises :class:`~vmserve.errors.ConfigurationError` for a user without a home directory.
    """
    if base := os.environ.get("XDG_CACHE_HOME", ""):
        return Path(base) / "vmserve" / kind
    try:
        return Path.home() / ".cache" / "vmserve" / kind
    except RuntimeError as error:
        raise ConfigurationError("there is no home directory: set XDG_CACHE_HOME") from error
