"""The version of the installed distribution; apart, as the module that finds it imports a lot."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("vmserve")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
