"""Every call of the CUDA API fails in turn, under a scripted life of a driver.

After each failure the batched calls' law holds (``completed`` runs are done, the others had no
effect) and the account is exact, or the error is sticky; and nothing leaks.
"""

from __future__ import annotations

import gc

import pytest

from tests.sim.model import RO, RW, Checked, DeviceLostError, assert_lost
from tests.sim.simcuda import GRANULE, NOTHING, SimConfig, SimCuda
from vmserve._core import Backing, CudaDriver
from vmserve.errors import DriverError, OutOfMemoryError

OUT_OF_MEMORY, INVALID_VALUE, NOT_READY, ILLEGAL_ADDRESS = 2, 1, 600, 700
ERRORS = {
    "out of memory": OUT_OF_MEMORY,
    "invalid value": INVALID_VALUE,
    "not ready": NOT_READY,
    "illegal address": ILLEGAL_ADDRESS,
}
CONFIGS = {
    "quiet": SimConfig(),
    "half eager": SimConfig(seed=7, pump_per_mille=500),
    "eager": SimConfig(seed=8, pump_per_mille=1000),
    "half done": SimConfig(partial_access=True),
    "no read-only": SimConfig(read_only=False),
}


def open_driver(sim: SimCuda) -> CudaDriver:
    return CudaDriver(GRANULE, 8, library=str(sim.path), spare_bytes=0)


def life(checked: Checked) -> None:
    """Every call of the driver at least once, in batches of several runs."""
    driver = checked.driver
    base = checked.reserve(8 * GRANULE, Backing.TRAP)
    page = [base + i * GRANULE for i in range(8)]
    checked.batch("create", (0, 3), (5, 1))
    # Two runs that are one group, one of other access, one of a frame that is mapped already.
    checked.batch(
        "map", (page[0], 0, 2, RW), (page[2], 2, 1, RW), (page[3], 5, 1, RO), (page[6], 0, 1, RW)
    )
    checked.write(page[0], 3 * GRANULE, 7)
    checked.batch("zero", (page[0], GRANULE), (page[1], 100))
    checked.batch("copy", (page[1], page[0] + 8, 64), (page[2], page[1] + 96, 16))
    host = checked.single(lambda: driver.alloc_host(GRANULE))
    checked.single(lambda: driver.copy([(host, page[1], GRANULE)]))
    mark = checked.single(driver.mark)
    checked.single(lambda: driver.reached(mark))
    checked.single(driver.fence)
    assert checked.single(lambda: driver.reached(mark))
    # Out and back, with clearing that the second has to wait for.
    checked.single(lambda: driver.copy_out([(host, page[0], 64), (host + 64, page[1], 64)]))
    copied = checked.single(driver.copy_mark)
    checked.single(lambda: driver.copy_reached(copied))
    checked.batch("zero", (page[2], 192))
    checked.single(lambda: driver.copy_in([(page[2], host + 64, 64), (page[2] + 64, host, 64)]))
    checked.model.write(page[2], checked.model.read(page[1], 64) + checked.model.read(page[0], 64))
    checked.single(driver.fence)
    assert checked.single(lambda: driver.copy_reached(copied))
    checked.batch("set_access", (page[0], 2 * GRANULE, RO), (page[3], GRANULE, RW))
    checked.check()
    checked.batch("unmap", (page[0], GRANULE), (page[1], 2 * GRANULE), (page[3], GRANULE))
    checked.batch("destroy", (1, 2), (5, 1))
    checked.batch("create", (4, 2))
    checked.batch("map", (page[0], 4, 2, RW))
    checked.check()
    checked.single(lambda: driver.free_host(host))
    checked.free_reservation(base)
    checked.batch("destroy", (0, 1), (4, 2))
    checked.check()


def run_case(config: SimConfig, call: int, error: int, *, forever: bool) -> tuple[bool, int]:
    """One life with one plan of failure: whether the plan was met, and how many calls raised."""
    sim = SimCuda(config)
    sim.fail(call, error, forever=forever)
    closing_fails = True
    failures = 0
    driver = None
    try:
        driver = open_driver(sim)
    except (DriverError, OutOfMemoryError):
        closing_fails, failures = forever, 1
    if driver is not None:
        checked = Checked(sim, driver)
        try:
            life(checked)
        except DeviceLostError:
            assert_lost(driver)
            sim.no_faults()
        closing_fails = forever and sim.num_failed == 0
        failures = checked.failures
        del checked, driver
        if error != ILLEGAL_ADDRESS and sim.counts().contexts > 0:
            gc.collect()  # a traceback may hold the driver still
    met = sim.num_failed > 0 or failures > 0
    # A lost device keeps what it has; a driver that may not close leaves it to the process.
    if error != ILLEGAL_ADDRESS and not closing_fails and not (forever and failures == 0):
        assert sim.counts() == NOTHING, f"call {call} leaked"
    assert sim.violations() == []
    return met, failures


def num_calls(config: SimConfig) -> int:
    """Calls of a whole life without failures, opening and closing included."""
    sim = SimCuda(config)
    checked = Checked(sim, open_driver(sim))
    life(checked)
    assert checked.failures == 0
    del checked
    assert sim.counts() == NOTHING
    return sim.num_calls()


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_call_fails_in_turn(config: str, error: str, forever: bool) -> None:
    total = num_calls(CONFIGS[config])
    met = raised = 0
    for call in range(1, total + 1):
        was_met, failures = run_case(CONFIGS[config], call, ERRORS[error], forever=forever)
        met += was_met
        raised += failures
    assert met == total > 50
    assert raised > total // 2
