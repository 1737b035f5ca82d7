"""Random lives of the memory core over the host's driver, judged by the model after every step.

Each row is a way to live; a seed says the memory and everything that happens to it. A slice that
is the same on every run belongs to the test suite. A million random steps, one command; a failure
names its row and its seed, which replay alone:

pytest tests/memory/test_walks.py --walk-steps 1000000 --timeout=0
pytest tests/memory/test_walks.py -k one_kind --walk-seed 4711
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings

from tests.memory.model_types import Shape
from tests.memory.rig import Layers, Options, Rig
from tests.memory.walk import ABORTS, EVERYTHING, RETURNS, Walk
from vmserve._core import Health, MapperMode, ZeroPolicy

STEPS = 60
"""Of one life."""


def one_kind(rng: random.Random) -> Options:
    block_tokens, blocks_per_page = rng.choice([2, 4]), rng.choice([1, 2, 4, 8])
    page_tokens = block_tokens * blocks_per_page
    shape = Shape(
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        max_seqs=6,
        num_slots=rng.randint(1, 5),
        max_len=max(12, 3 * page_tokens) + rng.randint(0, 1),
        max_pages=20,
        null_page=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.8,
        swap_blocks=rng.choice([0, 8, 200, 200]),
        read_slack=rng.choice([0, 0, 3]),
        copies_late=rng.random() < 0.4,
    )
    persists = shape.prefix_caching and not shape.copies_late and rng.random() < 0.6
    return Options(
        shape=shape,
        limit_pages=rng.choice([rng.randint(3, 8), rng.randint(8, 20), rng.randint(14, 20)]),
        grow_pages=rng.randint(1, 4),
        zero_policy=rng.choice([ZeroPolicy.TENANT, ZeroPolicy.ALWAYS, ZeroPolicy.NEVER]),
        deferred_reclamation=rng.random() < 0.7,
        seal_read_only=rng.random() < 0.5,
        access_under_readers=rng.random() < 0.7,
        mapper=rng.choice([MapperMode.OFF, MapperMode.MANUAL]),
        lookahead_tokens=rng.choice([0, page_tokens, 2 * page_tokens]),
        eager_slots=rng.randint(0, 1),
        eager_pages=rng.randint(0, 2),
        shadow=rng.random() < 0.5,
        max_map_count=rng.choice([0, 0, 60, 90]),
        # Ranks keep no files (vmserve/options/rules.py).
        faulty_member=None if persists else rng.choice([None, None, 0, 1]),
        persists=persists,
    )


def stored(rng: random.Random) -> Options:
    options = (kinds if rng.random() < 0.3 else one_kind)(rng)
    shape = replace(options.shape, prefix_caching=True, copies_late=False)
    return replace(options, shape=shape, persists=True, faulty_member=None)


def kinds(rng: random.Random) -> Options:
    sizes = rng.choice([(1, 1, 1), (2, 1, 3), (1, 3, 1)])
    options = one_kind(rng)
    width = rng.choice([1, 2])
    shape = replace(
        options.shape,
        block_tokens=4,
        blocks_per_page=width,
        max_len=40,
        max_pages=32,
        num_slots=rng.randint(1, 4),
    )
    return replace(
        options,
        shape=shape,
        kinds=(Layers(0, 1, sizes[0]), Layers(6, 2, sizes[1]), Layers(11, 1, sizes[2])),
        checkpoint_tokens=rng.choice([0, 8]),
        limit_pages=rng.randint(6, 24),
        lookahead_tokens=rng.choice([0, 8]),
        late_marks=rng.random() < 0.5,
        shadow=False,
        max_map_count=0,
    )


@dataclass(frozen=True)
class Row:
    drawn: Callable[[random.Random], Options]
    lives: int
    habits: Mapping[str, int] = field(default_factory=lambda: EVERYTHING)
    #: Refused calls; else the mapper works between plans and what they are for.
    has_faults: bool = True


ROWS = {
    "one_kind": Row(one_kind, 100),
    "kinds": Row(kinds, 40),
    "stored": Row(stored, 40, RETURNS),
    "aborts": Row(one_kind, 30, ABORTS),
    "plans_hold": Row(one_kind, 60, has_faults=False),
    "plans_of_kinds_hold": Row(kinds, 30, has_faults=False),
}


def life(name: str, seed: int) -> Rig:
    """Whatever happened, everything comes back."""
    row, rng = ROWS[name], random.Random(f"{name} {seed}")
    options = row.drawn(rng)
    if not row.has_faults:
        options = replace(options, mapper=MapperMode.MANUAL)
    rig = Rig(options)
    rig.check()
    walk = Walk(
        rig,
        rng,
        row.habits,
        faults=row.has_faults,
        disturbs=not row.has_faults,
        is_plain=len(options.kinds) == 1,
        has_state=options.checkpoint_tokens > 0,
    )
    walk.run(STEPS)
    rig.give_everything_back()
    assert rig.core.stats().health is Health.HEALTHY
    return rig


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--walk-seed", default=None)
    steps = metafunc.config.getoption("--walk-steps", default=None)
    total = sum(row.lives for row in ROWS.values()) * STEPS
    is_fast = settings.get_current_profile_name() == "fast"
    share = 1 / (10 if is_fast else 1) if steps is None else steps / total
    cases = [
        (name, each)
        for name, row in ROWS.items()
        for each in ([seed] if seed is not None else range(round(row.lives * share)))
    ]
    metafunc.parametrize(("name", "seed"), cases)


def test_a_random_life(name: str, seed: int) -> None:
    life(name, seed)


@pytest.mark.slow
def test_lives_take_every_path_and_meet_a_refusal_of_every_call() -> None:
    """Of what a driver does, only its reservations are made once."""
    calls = {
        *("alloc_host", "copy", "copy_in", "copy_mark", "copy_out", "create", "destroy", "fence"),
        *("free_host", "map", "mark", "set_access", "unmap", "zero"),
    }
    paths = {
        *("compactions", "converted_to_paged", "converted_to_virtual", "cow_blocks"),
        *("evicted_blocks", "persist_broken_blocks", "persist_restored_blocks"),
        *("swapped_in_blocks", "swapped_out_blocks", "prefix_hit_blocks"),
    }
    refused: Counter[str] = Counter()
    taken: Counter[str] = Counter()
    for seed in range(100):
        for name in ("stored", "kinds"):
            rig = life(name, seed)
            stats = rig.core.stats().as_dict()
            taken += Counter({path: stats[f"{path}_total"] for path in paths})
            for part in rig.every_part:
                refused.update(part.faults.num_refused)
        if calls <= {*refused} and paths <= {*taken}:
            break
    assert {*refused} == calls
    assert {*taken} == paths
