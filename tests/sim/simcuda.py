"""The simulated CUDA driver library: built from ``simcuda/`` when it is first needed.

``SimCuda`` is its control surface, ``make_sim_cuda_driver`` a ``CudaDriver`` on it. The library
has one simulated machine per process: configuring it forgets the one before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import c_int32, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve import _core

__all__ = [
    "GRANULE",
    "NOTHING",
    "SPAN",
    "Counts",
    "SimConfig",
    "SimCuda",
    "build_library",
    "make_sim_cuda_driver",
]

GRANULE = 4096
"""Bytes of a simulated device page in tests: the least that the host can map."""

SPAN = np.dtype(
    [
        ("address", "<u8"),
        ("num_bytes", "<u8"),
        ("low", "u1"),
        ("high", "u1"),
        ("zero_too", "u1"),
        ("writes", "u1"),
        ("unused", "<u4"),
    ]
)
"""Part of a kernel: it writes ``low``, or any byte outside ``low`` to ``high`` that it reads is a
violation (0 excepted with ``zero_too``)."""

SOURCES = Path(__file__).parent / "simcuda"
ABI = Path(__file__).parents[2] / "csrc" / "driver"
FLAGS = [
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror"),
]


def compiler() -> str:
    """The C++ compiler: ``$CXX`` or g++."""
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise RuntimeError(f"the simulated CUDA library needs a C++ compiler: {wanted} is missing")
    return found


@functools.cache
def build_library() -> Path:
    """Compile the simulator, once per content of its sources; returns the shared library."""
    units = [*sorted(SOURCES.glob("*.cpp")), ABI / "cuda_api.cpp"]
    headers = [*sorted(SOURCES.glob("*.h")), ABI / "cuda_api.h"]
    digest = hashlib.sha256(" ".join([compiler(), *FLAGS]).encode())
    for source in [*units, *headers]:
        digest.update(source.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"vmserve-simcuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    library = folder / f"libsimcuda-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        include = ABI.parent / "include"
        command = [compiler(), *FLAGS, f"-I{include}", *map(str, units), "-ldl"]
        subprocess.run([*command, "-o", str(partial)], check=True, timeout=110)
        partial.replace(library)
    return library


@dataclass(frozen=True)
class SimConfig:
    """The simulated machine.

    ``pump_per_mille``: how often a call lets queued work run. ``partial_access``: a
    ``cuMemSetAccess`` that fails has done its first mapping.
    """

    seed: int = 0
    granularity: int = GRANULE
    recommended_granularity: int = 0
    total_bytes: int = 1 << 24
    latency_ns: int = 0
    pump_per_mille: int = 0
    read_only: bool = True
    virtual_memory: bool = True
    num_devices: int = 1
    sticky_violations: bool = True
    partial_access: bool = False


class _Config(ctypes.Structure):
    _fields_ = tuple(
        (field.name, c_uint64 if place < 5 else c_uint32)
        for place, field in enumerate(fields(SimConfig))
    )


@dataclass(frozen=True)
class Counts:
    """What is alive in the simulated driver; all zero when nothing leaked."""

    allocations: int
    allocated_bytes: int
    handles: int
    mappings: int
    reservations: int
    host_blocks: int
    streams: int
    events: int
    contexts: int
    pending_work: int


class _Counts(ctypes.Structure):
    _fields_ = tuple((field.name, c_uint64) for field in fields(Counts))


NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class SimCuda:
    """The simulated machine: configuration, failures, counts and kernels.

    With a ``config`` it is a new machine, without one the machine that the process has.
    ``library`` gives the driver API itself (``sim.library.cuMemMap``); each call returns a
    CUresult.
    """

    def __init__(self, config: SimConfig | None = None) -> None:
        self.path = build_library()
        self.library = ctypes.CDLL(str(self.path))
        self._declare()
        if config is not None:
            self.configure(config)

    def _declare(self) -> None:
        text: Any = ctypes.c_char_p
        for name, result, arguments in (
            ("num_calls", c_int64, (text,)),
            ("num_failed", c_int64, ()),
            ("pump", c_int64, (c_int64,)),
            ("violations", c_uint64, (text, c_uint64)),
            ("set_fault", c_int32, (c_int64, text, c_int32, c_int32)),
            ("set_cost", c_int32, (text, c_uint64)),
            ("access", c_int32, (c_uint64,)),
            ("launch_write", c_int32, (c_void_p, c_uint64, c_uint64, c_uint8)),
            ("launch_read", c_int32, (c_void_p, c_uint64, c_uint64, c_uint8)),
            ("launch_spans", c_int32, (c_void_p, text, c_void_p, c_uint64)),
            ("launch_failure", c_int32, (c_void_p, c_int32)),
        ):
            function = getattr(self.library, f"simcuda_{name}")
            function.restype, function.argtypes = result, arguments

    def configure(self, config: SimConfig) -> None:
        """A new machine; everything of the old one is gone."""
        fields = {name: int(getattr(config, name)) for name, _ in _Config._fields_}
        fields["recommended_granularity"] = fields["recommended_granularity"] or config.granularity
        self.library.simcuda_configure(ctypes.byref(_Config(**fields)))

    def fail(self, call: int, result: int, *, name: str = "", forever: bool = False) -> None:
        """The call-th call from now on (1 is the next; of ``name`` only) returns ``result``."""
        self.library.simcuda_set_fault(call, name.encode() or None, result, forever)

    def no_faults(self) -> None:
        """Forget the plan of failures; a lost device stays lost."""
        self.library.simcuda_set_fault(0, None, 0, False)

    def costs(self, nanoseconds: int, *names: str) -> None:
        """Calls of these functions take so long from now on."""
        for name in names:
            self.library.simcuda_set_cost(name.encode(), nanoseconds)

    @property
    def num_failed(self) -> int:
        """Calls that the plan has failed since ``fail``."""
        return int(self.library.simcuda_num_failed())

    def num_calls(self, name: str = "") -> int:
        """Calls of a function, or of all, since the machine was configured."""
        return int(self.library.simcuda_num_calls(name.encode() or None))

    def pump(self, steps: int = 1 << 30) -> int:
        """Let up to ``steps`` pieces of queued work run; returns how many did."""
        return int(self.library.simcuda_pump(steps))

    def counts(self) -> Counts:
        """What is alive now."""
        raw = _Counts()
        self.library.simcuda_counts(ctypes.byref(raw))
        return Counts(*(int(getattr(raw, name)) for name, _ in _Counts._fields_))

    def violations(self) -> list[str]:
        """What work did that it may not, in the order in which it ran."""
        size = int(self.library.simcuda_violations(None, 0))
        buffer = ctypes.create_string_buffer(size)
        self.library.simcuda_violations(buffer, size)
        return buffer.raw[:size].decode().splitlines()

    def access(self, address: int) -> int:
        """The access flags of what the device shows at an address; -1 for nothing."""
        return int(self.library.simcuda_access(address))

    def launch_write(self, address: int, num_bytes: int, value: int, stream: int = 0) -> None:
        """Queue a kernel that writes a byte value everywhere in the range."""
        assert self.library.simcuda_launch_write(stream, address, num_bytes, value) == 0

    def launch_read(self, address: int, num_bytes: int, expected: int, stream: int = 0) -> None:
        """Queue a kernel that reads the range; any other byte value is a violation."""
        assert self.library.simcuda_launch_read(stream, address, num_bytes, expected) == 0

    def launch_spans(self, spans: NDArray[Any], label: str, stream: int = 0) -> None:
        """Queue one kernel of many parts: ``SPAN[n]``, done in order; violations name it."""
        data = np.ascontiguousarray(spans, SPAN)
        launch = self.library.simcuda_launch_spans
        assert launch(stream, label.encode(), data.ctypes.data, len(data)) == 0

    def launch_failure(self, result: int, stream: int = 0) -> None:
        """Queue a kernel that loses the device when it runs."""
        assert self.library.simcuda_launch_failure(stream, result) == 0

    def new_stream(self, *, blocking: bool = False) -> int:
        """A stream of the device; needs a current context in this thread (``make_current``)."""
        stream = c_void_p()
        assert self.library.cuStreamCreate(ctypes.byref(stream), 0 if blocking else 1) == 0
        return int(stream.value or 0)

    def make_current(self) -> None:
        """Retain the primary context and make it current in this thread."""
        context = c_void_p()
        assert self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert self.library.cuCtxSetCurrent(context) == 0


def make_sim_cuda_driver(
    frame_bytes: int = GRANULE, num_frames: int = 64, *, stream: int = 0, **config: Any
) -> _core.CudaDriver:
    """A ``CudaDriver`` on a newly configured simulated machine (``config`` as in ``SimConfig``)."""
    sim = SimCuda(SimConfig(**config))
    return _core.CudaDriver(
        frame_bytes, num_frames, stream=stream, library=str(sim.path), spare_bytes=0
    )
