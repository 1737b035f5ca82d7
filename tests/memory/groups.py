"""Memories over a group of two drivers, one of which refuses calls and copies late."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conformance.ranks import behind_loop
from vmserve import _core


def with_another(
    faults: _core.FaultInjectingDriver,
    member: int | None,
    *,
    max_map_count: int = 0,
    is_remote: bool = False,
) -> _core.PageDriver:
    """The driver of a memory: a group whose member of this number is ``faults``; None: no group.

    ``is_remote``: the group has it behind a rank's loop.
    """
    if member is None:
        return faults
    other = _core.HostDriver(faults.frame_bytes, faults.num_frames, max_map_count=max_map_count)
    if not is_remote:
        return _core.GroupDriver([other, faults] if member else [faults, other])
    remote, loop = behind_loop(faults)
    group = _core.GroupDriver([other, remote] if member else [remote, other])
    weakref.finalize(group, loop.close)
    return group


def everywhere(driver: _core.PageDriver, array: NDArray[Any]) -> list[NDArray[Any]]:
    """The contiguous array, which lies in the driver's memory, in every member of a group."""
    if not isinstance(driver, _core.GroupDriver):
        return [array]
    assert array.flags.c_contiguous
    places = [driver.address_of(member, array.ctypes.data) for member in range(driver.num_members)]
    assert places[0] == array.ctypes.data
    memories = ((ctypes.c_char * array.nbytes).from_address(place) for place in places)
    return [np.ndarray(array.shape, array.dtype, memory) for memory in memories]
