"""The memory of a device, and its driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol

from vmserve import _core
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import HOST_GRANULARITY

__all__ = [
    "HostMemory",
    "MemoryDevice",
    "memory_device",
]


class MemoryDevice(Protocol):
    """The memory that a pool takes its pages from."""

    @property
    def granularity(self) -> int:
        """Page sizes are multiples of this."""
        ...

    @property
    def grow_bytes(self) -> int:
        """The pool grows by this much at a time, because taking memory has a fixed cost."""
        ...

    @property
    def ready_bytes(self) -> int:
        """Free memory kept ready, even while nothing runs, because making it takes long."""
        ...

    @property
    def total_bytes(self) -> int:
        """All of the device's memory: the most that a pool can grow to, whatever its limit is
        now."""
        ...

    @property
    def seals_under_readers(self) -> bool:
        """Whether the access of mapped pages may change while a step reads them."""
        ...

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        """Make the driver. Raises :class:`~vmserve.errors.DriverError` if the device cannot be
        used."""
        ...

    def wait(self) -> None:
        """Wait for all work given to the device."""
        ...

    def release_unused(self) -> bool:
        """Let torch give back memory that it holds without need; returns whether it held any."""
        ...

    def missing_bytes(self) -> int:
        """Bytes missing of the free memory that is left to torch and libraries; 0 if none."""
        ...


@dataclass(frozen=True)
class HostMemory:
    """Memory of the processor.

    ``driver``: "host", or the path of a driver's shared library (drivers_ext/README.md), whose
    memory the processor must be able to address.
    """

    driver: str = "host"
    granularity: int = HOST_GRANULARITY
    grow_bytes: int = 8 << 20
    ready_bytes: int = 0
    seals_under_readers: bool = True

    @property
    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        if self.driver == "host":
            return _core.HostDriver(page_bytes, num_frames, limits=limits or _core.SystemLimits())
        try:
            driver = _core.PluginDriver(self.driver, page_bytes, num_frames)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        if not driver.capabilities.unmap:
            raise ConfigurationError(
                f"the driver {driver.plugin_name} cannot unmap: its pages could never serve "
                "another request; use host"
            )
        return driver

    def wait(self) -> None:
        """Nothing to wait for: work on the host is done when its call returns."""

    def release_unused(self) -> bool:
        return False

    def missing_bytes(self) -> int:
        return 0


def memory_device(name: str) -> MemoryDevice:
    """The memory of a driver: "host", "cuda", or the path of a driver's shared library.

    "cuda" follows torch's current stream of the current device: kernels that use the pool must run
    on that stream.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name or without a usable GPU.
    """
    if name == "host" or "/" in name:
        return HostMemory(name)
    if name != "cuda":
        raise ConfigurationError(
            f"driver {name!r} is unknown: use host, cuda, or the path of a driver's shared library"
        )
    # Imported late: only the GPU needs torch.
    from vmserve.memory.cuda import current_memory  # noqa: PLC0415

    return current_memory()
