"""The drivers that the conformance suite runs over: one line each in ``_REGISTERED``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

from tests.conformance import plugins, ranks
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from vmserve._core import (
    Capabilities,
    CudaDriver,
    FaultInjectingDriver,
    GroupDriver,
    HostDriver,
    NullDriver,
    PageDriver,
    PluginDriver,
)

CAPABILITIES = ("unmap", "read_only", "zeros_backing")
CAPABILITIES += ("host_memory", "asynchronous", "copy_stream")
NUM_FRAMES = 32


def read_on_host(driver: PageDriver, address: int, num_bytes: int) -> bytes:
    """For drivers whose addresses the host may touch."""
    driver.fence()
    return ctypes.string_at(address, num_bytes)


def write_on_host(driver: PageDriver, address: int, data: bytes) -> None:
    driver.fence()
    ctypes.memmove(address, data, len(data))


def places(driver: PageDriver, address: int) -> list[int]:
    """The address in each member of a group."""
    assert isinstance(driver, GroupDriver)
    return [driver.address_of(member, address) for member in range(driver.num_members)]


def read_members(driver: PageDriver, address: int, num_bytes: int) -> bytes:
    """What all members of a group have."""
    driver.fence()
    first, *others = (ctypes.string_at(place, num_bytes) for place in places(driver, address))
    assert all(other == first for other in others)
    return first


def write_members(driver: PageDriver, address: int, data: bytes) -> None:
    driver.fence()
    for place in places(driver, address):
        ctypes.memmove(place, data, len(data))


Read = Callable[[PageDriver, int, int], bytes]
Write = Callable[[PageDriver, int, bytes], None]


class Look(TypedDict, total=False):
    """How to see a driver's memory: fields of :class:`Subject`."""

    read: Read
    write: Write
    traps: bool
    contents: bool


def by_copy(read: Read, write: Write) -> Look:
    """For devices that only copies reach; takes ``host_memory``, which these two are for."""

    def read_copy(driver: PageDriver, address: int, num_bytes: int) -> bytes:
        buffer = driver.alloc_host(num_bytes)
        driver.copy([(buffer, address, num_bytes)])
        data = read(driver, buffer, num_bytes)
        driver.free_host(buffer)
        return data

    def write_copy(driver: PageDriver, address: int, data: bytes) -> None:
        buffer = driver.alloc_host(len(data))
        write(driver, buffer, data)
        driver.copy([(address, buffer, len(data))])
        driver.fence()
        driver.free_host(buffer)

    return {"read": read_copy, "write": write_copy, "traps": False}


BY_COPY = by_copy(read_on_host, write_on_host)
MEMBERS: Look = {"read": read_members, "write": write_members}
UNSEEN: Look = {"traps": False, "contents": False}


@dataclass(frozen=True)
class Subject:
    """A driver, how to make it and how to see its memory.

    ``make(frame_bytes, num_frames)`` gives a fresh one. ``capabilities`` is what it must report.
    ``traps``: what the host touches at an unmapped address is a fault; only where the host
    may touch the addresses at all. ``contents``: what is written can be read again; without it
    ``read`` and ``write`` cannot be called. ``rebuild``: an expression that gives this subject
    again in another process, where everything in this module is known.
    """

    name: str
    make: Callable[[int, int], PageDriver]
    capabilities: frozenset[str]
    frame_bytes: int = 4096
    read: Read = read_on_host
    write: Write = write_on_host
    traps: bool = True
    contents: bool = True
    rebuild: str = ""

    @property
    def features(self) -> frozenset[str]:
        seen = {"traps": self.traps, "contents": self.contents}
        return self.capabilities | {name for name, there in seen.items() if there}


def _sample(frame_bytes: int, num_frames: int, **options: str) -> PageDriver:
    return PluginDriver(str(plugins.sample()), frame_bytes, num_frames, options=options)


def _lean(frame_bytes: int, num_frames: int) -> PageDriver:
    return _sample(frame_bytes, num_frames, host_memory="off")


def _uvm(frame_bytes: int, num_frames: int) -> PageDriver:
    options = {"ioctl_library": str(plugins.simulated_uvm())}
    return PluginDriver(str(plugins.uvm_small_pages()), frame_bytes, num_frames, options=options)


def _cuda(frame_bytes: int, num_frames: int) -> PageDriver:
    """On the simulated library, where drivers that live at the same time share the machine."""
    sim = SimCuda()
    if sim.counts() == NOTHING:
        sim.configure(SimConfig())
    return CudaDriver(frame_bytes, num_frames, library=str(sim.path), spare_bytes=0)


def _group(make: Callable[[int, int], PageDriver]) -> Callable[[int, int], PageDriver]:
    return lambda frame_bytes, num_frames: GroupDriver(
        [make(frame_bytes, num_frames) for _ in range(2)]
    )


def _late(frame_bytes: int, num_frames: int) -> PageDriver:
    return FaultInjectingDriver(HostDriver(frame_bytes, num_frames), late_copies=True)


_ON_HOST = frozenset({"unmap", "read_only", "zeros_backing", "host_memory"})
_LATE = _ON_HOST | {"copy_stream"}
_ON_GPU = frozenset({"unmap", "read_only", "host_memory", "asynchronous", "copy_stream"})
_IN_PROCESS: Look = {
    "read": lambda *arguments: ranks.rank().read(*arguments),
    "write": lambda *arguments: ranks.rank().write(*arguments),
    "traps": False,
}

_REGISTERED = (
    Subject("host", HostDriver, _ON_HOST),
    Subject("faults", lambda size, n: FaultInjectingDriver(HostDriver(size, n)), _ON_HOST),
    Subject("late", _late, _LATE),
    Subject("null", NullDriver, _ON_HOST, **UNSEEN),
    Subject("sample", _sample, _ON_HOST),
    Subject("lean", _lean, _ON_HOST - {"host_memory"}, frame_bytes=8192),
    Subject("uvm", _uvm, frozenset({"host_memory", "asynchronous"}), frame_bytes=1 << 16),
    Subject("cuda", _cuda, _ON_GPU, **BY_COPY),
    Subject("remote", ranks.in_thread(HostDriver), _ON_HOST),
    Subject("remote-late", ranks.in_thread(_late), _LATE),
    Subject("remote-cuda", ranks.in_thread(_cuda), _ON_GPU, **BY_COPY),
    Subject("remote-process", lambda *size: ranks.rank().make(*size), _ON_HOST, **_IN_PROCESS),
    Subject("remote-tcp", ranks.over_tcp, _ON_HOST),
    Subject("group-remote", ranks.half_remote, _ON_HOST, **MEMBERS),
    Subject("group", _group(HostDriver), _ON_HOST, **MEMBERS),
    Subject("group-late", _group(_late), _LATE, **MEMBERS),
    Subject("group-null", _group(NullDriver), _ON_HOST, **UNSEEN),
    Subject("group-cuda", _group(_cuda), _ON_GPU, **by_copy(read_members, write_members)),
)


#: The real library, with the smallest pages of stock CUDA: for tests/gpu.
GPU = Subject("gpu", CudaDriver, _ON_GPU, frame_bytes=2 << 20, rebuild="GPU", **BY_COPY)


def registered() -> dict[str, Subject]:
    return {subject.name: subject for subject in _REGISTERED}


def reported(capabilities: Capabilities) -> frozenset[str]:
    return frozenset(name for name in CAPABILITIES if getattr(capabilities, name))


def plugin(path: str, frame_bytes: int, copies: bool, options: Mapping[str, str]) -> Subject:
    """The subject of ``--driver-plugin``: it may have any capabilities."""

    def make(size: int, num_frames: int) -> PageDriver:
        return PluginDriver(path, size, num_frames, options=options)

    look: Look = BY_COPY if copies else {}
    rebuild = f"plugin({path!r}, {frame_bytes}, {copies}, {dict(options)!r})"
    capabilities = reported(make(frame_bytes, NUM_FRAMES).capabilities)
    return Subject("plugin", make, capabilities, frame_bytes=frame_bytes, rebuild=rebuild, **look)
