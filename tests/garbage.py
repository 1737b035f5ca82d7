"""Garbage of a test, without looking at all that the process had before."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["only_new_garbage"]


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Make ``gc.collect()`` within quick: it looks at what was made since."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
