"""Importing without the garbage collector."""

from __future__ import annotations

import gc
import importlib
from types import ModuleType

__all__ = ["import_quickly"]


def import_quickly(name: str) -> ModuleType:
    """The module ``name``, imported with Python's collector paused.

    What an import makes stays, and a library such as torch makes so much of it that the collector
    would walk through all of it dozens of times: a tenth of the time, for nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
