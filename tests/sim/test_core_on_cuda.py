"""The memory core on the simulated CUDA device, whose kernels run late: random lives.

A slice of seeds belongs to the test suite. A million random steps, one command; a failure's
``seed`` is in its name and replays alone (with the mapper's thread, its timing does not):

pytest tests/sim/test_core_on_cuda.py --sim-steps 1000000
pytest tests/sim/test_core_on_cuda.py --sim-seed 4711
"""

from __future__ import annotations

import math

import pytest

from tests.sim.core_sim import Life, setting

STEPS = 100
"""Steps of one life."""
SLICE = 4800
"""Steps in all, unless ``--sim-steps`` says otherwise."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--sim-seed", default=None)
    steps = metafunc.config.getoption("--sim-steps", default=None) or SLICE
    seeds = range(math.ceil(steps / STEPS)) if seed is None else [seed]
    metafunc.parametrize("seed", seeds)


def test_a_random_life(seed: int) -> None:
    """No kernel meets anything but its sequence's own memory, whatever is refused meanwhile."""
    life = Life(setting(seed))
    life.run(STEPS)
    assert life.num_steps == STEPS or life.lost
    life.close()
