"""Where files are kept that can be made or fetched again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["user_cache"]


def user_cache(kind: str) -> Path:
    """``$XDG_CACHE_HOME/vmserve/KIND``, by default under ``~/.cache``; it may not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "vmserve" / kind
