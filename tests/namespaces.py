"""Two hosts with a cable between them, as network namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["cut_cable", "inside", "namespaces"]

_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:00"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between 10.77.0.1 and 10.77.0.2."""
    names = f"vmserve-{os.getpid()}-a", f"vmserve-{os.getpid()}-b"
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
            cable = ("type", "veth", "peer", "name", "rank1", "netns", names[1])
            _ip("link", "add", "rank0", "netns", names[0], *cable)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("makes network namespaces, which needs root and iproute2")
        for rank, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", f"rank{rank}")
            for device in (f"rank{rank}", "lo"):
                _ip("-n", name, "link", "set", device, "up")
        yield names


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """What this thread opens here belongs to the namespace, and stays in it."""
    here, other = Path("/proc/thread-self/ns/net"), Path("/run/netns", name)
    with here.open("rb") as home, other.open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


@contextlib.contextmanager
def cut_cable(names: tuple[str, str], senders: tuple[int, ...] = (0, 1)) -> Iterator[None]:
    """Lose all that ``senders`` send, and tell them nothing: it goes to a device that is not there.

    A link that is set down would end routes, which a switch that fails does not.
    """

    def neighbour(sender: int, *what: str) -> None:
        where = f"10.77.0.{2 - sender}", "dev", f"rank{sender}"
        _ip("-n", names[sender], "neigh", what[0], *where, *what[1:])

    for sender in senders:
        neighbour(sender, "replace", "lladdr", _NOBODY, "nud", "permanent")
    try:
        yield
    finally:
        for sender in senders:
            neighbour(sender, "del")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
