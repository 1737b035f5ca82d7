"""Sizes in bytes, as users write and read them."""

from __future__ import annotations

import re

from vmserve.errors import ConfigurationError

__all__ = ["format_size", "parse_size", "size_to_set"]

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", start=1):
    _UNITS[_prefix] = _UNITS[f"{_prefix}IB"] = 1024**_power
    _UNITS[f"{_prefix}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: int | str, name: str = "size") -> int:
    """Bytes of ``value``: an integer, or a number with KiB/MiB/GiB/TiB (or kB/MB/GB/TB, K/M/G/T).

    Raises :class:`ConfigurationError` naming the option for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        unit = _UNITS.get(match.group(2).upper()) if match else None
        if match is None or unit is None:
            raise ConfigurationError(
                f"{name}: {value!r} is not a size; write a number of bytes or e.g. 512MiB, 1.5GiB"
            )
        size = int(float(match.group(1)) * unit)
    if size < 0:
        raise ConfigurationError(f"{name}: {size} is negative; give a size of 0 or more bytes")
    return size


def format_size(num_bytes: float) -> str:
    """``num_bytes`` in the largest binary unit that keeps the number at 1 or more."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def size_to_set(num_bytes: int) -> str:
    """:func:`format_size` rounded up, so that an option of this size is enough."""
    rounded = num_bytes
    while parse_size(format_size(rounded)) < num_bytes:
        rounded += num_bytes // 10_000 + 1
    return format_size(rounded)
