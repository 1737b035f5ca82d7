"""Errors in messages between processes: each arrives as its nearest base class listed here."""

from __future__ import annotations

from typing import Any

from vmserve.errors import (
    ConfigurationError,
    DeadlineError,
    DriverError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
    RankLostError,
    UnsupportedError,
    VmserveError,
)

__all__ = ["pack_error", "unpack_error"]

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        VmserveError,
        InvalidRequestError,
        ConfigurationError,
        UnsupportedError,
        OutOfMemoryError,
        DeadlineError,
        DriverError,
        EngineDeadError,
        RankLostError,
        ValueError,
    )
}


def pack_error(error: Any) -> tuple[str, str, str | None]:
    """Return its class, text and parameter. Raises ``TypeError`` for what is no error."""
    if not isinstance(error, Exception):
        raise TypeError(f"{type(error).__name__} cannot be in a message")
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _ERRORS), "VmserveError")
    return kind, str(error), getattr(error, "param", None)


def unpack_error(packed: Any) -> Exception:
    """Return the error that :func:`pack_error` made ``packed`` of."""
    name, text, param = packed
    error = _ERRORS[name]
    return error(text, param) if issubclass(error, InvalidRequestError) else error(text)
