"""The memory core on the simulated CUDA device, whose kernels run late: random lives.

A slice of seeds belongs to the test suite. A million random steps, one command; a failure's
``seed`` is in its name and replays alone (with the mapper's thread, its timing does not):

pytest tests/sim/test_core_on_cuda.py --sim-steps 1000000
pytest tests/sim/test_core_on_cuda.py --sim-seed 4711
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.core_sim import Life, setting

STEPS = 100
"""Steps of one life."""
SLICE = 4800
"""Steps in all, unless ``--sim-steps`` says otherwise."""
FOUND = (646, 1110, 2117, 4379, 4470, 4557, 5466, 5529, 6141, 7187, 8694, 8861, 9865)
"""Seeds that once failed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--sim-seed", default=None)
    steps = metafunc.config.getoption("--sim-steps", default=None) or SLICE
    first = range(math.ceil(steps / STEPS))
    seeds = [*first, *(s for s in FOUND if s not in first)] if seed is None else [seed]
    metafunc.parametrize("seed", seeds)


def test_a_random_life(seed: int) -> None:
    """No kernel meets anything but its sequence's own memory, whatever is refused meanwhile."""
    life = Life(setting(seed))
    life.run(STEPS)
    assert life.num_steps == STEPS or life.lost
    life.close()


def test_random_lives_whose_blocks_outlive_them(tmp_path: Path) -> None:
    """Blocks are copied from device pages to files, and read back in the same life and the next.

    Without swaps, so that all copies are those of blocks on their way to files.
    """
    num_written = num_restored = 0
    for seed in range(12):
        one = setting(seed)
        one = replace(one, core={**one.core, "prefix_caching": True, "swap_blocks": 0})
        directory = tmp_path / str(seed)
        directory.mkdir()
        before = None
        for _ in range(2):
            life = Life(one, before, directory)
            life.run(STEPS)
            assert life.num_steps == STEPS or life.lost, seed
            stats = life.core.stats()
            num_written += stats.persist_written_blocks_total
            num_restored += stats.persist_restored_blocks_total
            assert stats.persist_broken_blocks_total == 0, seed
            life.close()
            if life.lost:
                break
            before = life
    assert num_written > 100
    assert num_restored > 20
