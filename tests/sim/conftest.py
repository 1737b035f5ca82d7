"""The simulated CUDA driver library, built once per session; a new machine for each test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim.simcuda import SimConfig, SimCuda, build_library, make_sim_cuda_driver
from vmserve import _core


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulated device")
    group.addoption("--sim-steps", type=int, metavar="N", help="random steps of the core, in all")
    group.addoption("--sim-seed", type=int, metavar="SEED", help="one random life: this one")


@pytest.fixture(scope="session")
def sim_library() -> Path:
    return build_library()


@pytest.fixture
def sim(sim_library: Path) -> SimCuda:
    assert sim_library.exists()
    # Drivers in cycles with tracebacks would close in the middle of a test and use up its faults.
    gc.collect()
    return SimCuda(SimConfig())


@pytest.fixture
def sim_cuda_driver(sim_library: Path) -> Callable[..., _core.CudaDriver]:
    """``make_sim_cuda_driver(frame_bytes, num_frames, **config)``."""
    assert sim_library.exists()
    return make_sim_cuda_driver
