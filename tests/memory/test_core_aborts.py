"""Sequences that end at random moments leave nothing behind.

A hundred thousand aborts, one command:

pytest tests/memory/test_core_aborts.py --hypothesis-profile=thorough --timeout=0
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings

from tests.memory.core_support import Options, Rig
from tests.memory.model_types import NUM_TENANTS, Kind, Op, Shape
from vmserve._core import MapperMode

THOROUGH = settings.get_current_profile_name() == "thorough"
NUM_ABORTS = 12_500 if THOROUGH else 400  # in each of 8 configurations
ROUND = 250  # aborts after which everything must come back


def options(blocks_per_page: int, mapper: MapperMode, *, null_page: bool) -> Options:
    block_tokens = 2
    page_tokens = block_tokens * blocks_per_page
    shape = Shape(
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        max_seqs=6,
        num_slots=4,
        max_len=4 * page_tokens,
        max_pages=20,
        null_page=null_page,
        swap_blocks=16,
    )
    return Options(
        shape,
        limit_pages=14,
        grow_pages=2,
        mapper=mapper,
        lookahead_tokens=0 if mapper is MapperMode.OFF else page_tokens,
        eager_slots=0 if mapper is MapperMode.OFF else 1,
        eager_pages=1,
    )


class Aborts:
    """Requests that come, grow, fork, move and are gone."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.num_aborts = 0

    def any_of(self, *, running: bool) -> int | None:
        seqs = self.rig.model.seqs
        fitting = [
            seq
            for seq, model in seqs.items()
            if not running or (model.length and not model.swapped)
        ]
        return self.random.choice(fitting) if fitting else None

    def open(self) -> int | None:
        max_len = self.rig.options.shape.max_len
        ones = self.random.randint(0, max_len)
        return self.rig.open(
            self.random.randrange(NUM_TENANTS),
            paged=self.random.random() < 0.5,
            stream=[1] * ones + [2] * (max_len - ones),
            known=self.random.randint(1, max_len),
        )

    def admit(self) -> None:
        if (seq := self.open()) is None:
            return
        known = self.rig.model.seqs[seq].known
        matched = self.rig.match(seq)
        attach = [Op(Kind.ATTACH, seq, matched)] if matched else []
        self.rig.step([*attach, Op(Kind.GROW, seq, self.random.randint(matched + 1, known))])

    def grow(self) -> None:
        if (seq := self.any_of(running=True)) is None:
            return
        length, most = self.rig.model.seqs[seq].length, self.rig.options.shape.max_len
        self.rig.step([Op(Kind.GROW, seq, self.random.randint(length, most))])

    def fork(self) -> None:
        parent = self.any_of(running=True)
        if parent is None or len(self.rig.model.seqs) == self.rig.options.shape.max_seqs:
            return
        source = self.rig.model.seqs[parent]
        end = self.random.randint(1, source.length)
        child = self.rig.open(
            source.tenant,
            paged=self.random.random() < 0.5,
            stream=source.stream,
            known=max(end, source.known),
        )
        assert child is not None
        self.rig.step([Op(Kind.FORK, child, end, other=parent)])  # or it stays empty

    def convert(self) -> None:
        if (seq := self.any_of(running=True)) is not None:
            self.rig.step([Op(Kind.CONVERT, seq, paged=self.random.random() < 0.5)])

    def swap(self) -> None:
        if (seq := self.any_of(running=False)) is None:
            return
        model = self.rig.model.seqs[seq]
        if model.length:
            self.rig.step([Op(Kind.SWAP_IN if model.swapped else Kind.SWAP_OUT, seq)])

    def complete(self) -> None:
        model = self.rig.model
        if model.completed < model.begun:
            self.rig.complete(self.random.randint(model.completed + 1, model.begun))

    def abort(self) -> None:
        if (seq := self.any_of(running=False)) is not None:
            self.rig.release(seq)
            self.num_aborts += 1

    def pack(self) -> None:
        if self.random.random() < 0.5:
            self.rig.complete(self.rig.model.begun)
        self.rig.compact()

    def map_ahead(self) -> None:
        self.rig.core.run_mapper(2)
        self.rig.quiet()

    def act(self) -> None:
        actions = [self.admit, self.grow, self.fork, self.convert, self.swap, self.complete]
        self.random.choice(
            [*actions, self.admit, self.abort, self.abort, self.map_ahead, self.pack]
        )()


@pytest.mark.parametrize("null_page", [False, True])
@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.MANUAL])
@pytest.mark.parametrize("blocks_per_page", [1, 4])
@pytest.mark.slow
def test_aborts_leave_nothing(blocks_per_page: int, mapper: MapperMode, null_page: bool) -> None:
    rig = Rig(options(blocks_per_page, mapper, null_page=null_page))
    aborts = Aborts(rig, seed=blocks_per_page)
    while aborts.num_aborts < NUM_ABORTS // 8:
        target = aborts.num_aborts + ROUND
        while aborts.num_aborts < target:
            aborts.act()
        rig.check()
        rig.give_everything_back()
