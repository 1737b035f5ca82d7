"""The memory core on the simulated CUDA device, whose kernels run late: random lives.

A slice of seeds belongs to the test suite. A million random steps, one command; a failure's
``seed`` is in its name and replays alone (with the mapper's thread, its timing does not):

pytest tests/sim/test_core_on_cuda.py --sim-steps 1000000
pytest tests/sim/test_core_on_cuda.py --sim-seed 4711
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.memory.walk import EVERYTHING, Walk
from tests.sim.cuda_rig import ONE_KIND, SEVERAL, CudaRig, Setting, setting

STEPS = 100
"""Steps of one life."""
SLICE = 4800
"""Steps in all, unless ``--sim-steps`` says otherwise."""
HABITS = EVERYTHING | {"speculate": 0, "alone": 0}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--sim-seed", default=None)
    steps = metafunc.config.getoption("--sim-steps", default=None) or SLICE
    metafunc.parametrize("seed", range(math.ceil(steps / STEPS)) if seed is None else [seed])


def live(one: Setting, before: CudaRig | None = None, directory: Path | None = None) -> CudaRig:
    """One life to its end, with everything that a walk can do to a device that runs late."""
    rng = random.Random(one.seed ^ (0x5EED if before is None else 0xE11A))
    rig = CudaRig(one, rng, before, directory)
    is_plain = len(one.kinds) == 1
    Walk(rig, rng, HABITS, faults=one.faults, disturbs=is_plain, is_plain=is_plain).run(STEPS)
    if not rig.is_over:
        rig.finish()
    return rig


@pytest.mark.parametrize("kinds", [ONE_KIND, SEVERAL], ids=["one_kind", "kinds"])
def test_a_random_life(seed: int, kinds: tuple) -> None:  # type: ignore[type-arg]
    """No kernel meets anything but its sequence's own memory, whatever is refused meanwhile."""
    live(setting(seed, kinds)).close()


def test_random_lives_whose_blocks_outlive_them(tmp_path: Path) -> None:
    """Blocks are copied from device pages to files, and read back in the same life and the next.

    Without swaps, so that all copies are those of blocks on their way to files.
    """
    num_written = num_restored = 0
    for seed in range(12):
        one = setting(seed)
        one = replace(one, shape=replace(one.shape, prefix_caching=True, swap_blocks=0))
        directory = tmp_path / str(seed)
        directory.mkdir()
        before = None
        for _ in range(2):
            rig = live(one, before, directory)
            stats = rig.core.stats()
            num_written += stats.persist_written_blocks_total
            num_restored += stats.persist_restored_blocks_total
            assert stats.persist_broken_blocks_total == 0, seed
            rig.close()
            if rig.is_over:
                break
            before = rig
    assert num_written > 100
    assert num_restored > 20
