"""Where pages are: the driver of a device's memory."""

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
    """The memory that a pool of pages is made of."""

    @property
    def granularity(self) -> int:
        """Sizes of pages are multiples of this."""
        ...

    @property
    def grow_bytes(self) -> int:
        """The pool grows by this much at a time, as taking memory has a fixed cost."""
        ...

    @property
    def ready_bytes(self) -> int:
        """So much free memory is kept at hand, also while nothing runs, as making it takes long."""
        ...

    @property
    def total_bytes(self) -> int:
        """All of the device's memory: what a pool can grow to, whatever its cap is now."""
        ...

    @property
    def seals_under_readers(self) -> bool:
        """Whether the access of mapped pages may change while a step reads them."""
        ...

    def create_driver(
        self, page_bytes: int, num_frames: int, limits: _core.SystemLimits | None
    ) -> _core.PageDriver:
        """Raises :class:`~vmserve.errors.DriverError` where the device cannot be used."""
        ...

    def wait(self) -> None:
        """Until all work that was given to the device is done."""
        ...

    def release_unused(self) -> bool:
        """Have torch give back what it holds without need; whether it held any."""
        ...

    def missing_bytes(self) -> int:
        """How much less is free than growing leaves to torch and to libraries; 0 if nothing is."""
        ...


@dataclass(frozen=True)
class HostMemory:
    """Memory of the processor. ``driver``: "host", or the path of a driver's shared library
    (drivers_ext/README.md), whose memory the processor must be able to address.
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
        """Work on the host is done when its call returns."""

    def release_unused(self) -> bool:
        return False

    def missing_bytes(self) -> int:
        return 0


def memory_device(name: str) -> MemoryDevice:
    """Of a driver's name: "host", "cuda", or the path of a driver's shared library.

    "cuda" follows torch's current stream of the current device: kernels that use the pool must
    run on that stream.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name and where there is no
    usable GPU.
    """
    if name == "host" or "/" in name:
        return HostMemory(name)
    if name != "cuda":
        raise ConfigurationError(
            f"driver {name!r} is unknown: use host, cuda, or the path of a driver's shared library"
        )
    # Only now: torch drives the GPU, and nobody else needs it.
    from vmserve.memory.cuda import current_memory  # noqa: PLC0415

    return current_memory()
