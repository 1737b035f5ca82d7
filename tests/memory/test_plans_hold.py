"""A plan that fits is carried out, whatever the mapper and running steps do in between.

Random lives of a small pool, each the same on every run: between a plan and its apply the mapper
executes some of its commands, an epoch ends, statistics are read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.memory.support import (
    Memory,
    Op,
    attach,
    convert,
    fork,
    grow,
    make_memory,
    swap_in,
    swap_out,
)
from vmserve._core import MapperMode, OpKind, View, ZeroPolicy

#: Where a plan that fitted was refused: pages evicted beyond the plan's count while the mapper had
#: the slot in hand, more in use than a lowered limit allows, an attach of what is converted,
#: cached blocks given up as the mapper came back.
FOUND = (825, 1430, 3867, 6854, 8671, 9146, 10682)
STEPS = 120


@dataclass
class Life:
    seed: int
    lengths: dict[int, int] = field(default_factory=dict)
    tenants: dict[int, int] = field(default_factory=dict)
    swapped: set[int] = field(default_factory=set)
    running: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice = self.dice = random.Random(self.seed)
        self.memory: Memory = make_memory(
            blocks_per_page=dice.choice([1, 2, 4]),
            num_slots=dice.randint(2, 5),
            max_seqs=8,
            max_len=dice.choice([32, 64]),
            limit_pages=dice.randint(4, 14),
            max_pages=20,
            zero_policy=dice.choice([ZeroPolicy.ALWAYS, ZeroPolicy.TENANT]),
            mapper=MapperMode.MANUAL,
            lookahead_tokens=dice.choice([4, 8, 16]),
            grow_pages=dice.randint(1, 4),
            eager_slots=dice.randint(0, 1),
            eager_pages=dice.randint(0, 2),
            prefix_caching=dice.random() < 0.7,
            swap_blocks=dice.choice([0, 40]),
            reclaim_share=dice.choice([0.1, 0.5]),
            seal_read_only=dice.random() < 0.5,
        )
        self.max_len = self.memory.core.block_tables().shape[1] * 4

    def turn(self) -> None:
        dice, core, todo = self.dice, self.memory.core, self.dice.random()
        if todo < 0.15 and len(self.lengths) < 8:
            view = dice.choice([View.VIRTUAL, View.PAGED])
            tokens = [1] * dice.randint(1, 30)  # all share one prefix
            tenant = dice.choice([0, 0, 1])
            seq = core.open(tenant, view, b"", tokens)
            assert seq is not None
            self.lengths[seq] = 0
            self.tenants[seq] = tenant
        elif todo < 0.25 and self.lengths:
            seq = dice.choice(list(self.lengths))
            core.release(seq)
            del self.lengths[seq]
            self.swapped.discard(seq)
        elif todo < 0.35 and self.running:
            self.complete(dice.randint(0, len(self.running) - 1))
        elif todo < 0.42:
            core.run_mapper(dice.randint(1, 3))
        elif todo < 0.45:
            core.set_limit(dice.randint(3, 16))
        else:
            self.step(self.draw())

    def complete(self, index: int) -> None:
        self.memory.core.complete(self.running[index])
        self.running = self.running[index + 1 :]

    def draw(self) -> list[Op]:
        dice, ops = self.dice, list[Op]()
        count = min(len(self.lengths), dice.randint(1, 4))
        for seq in dice.sample(list(self.lengths), count):
            todo, length = dice.random(), self.lengths[seq]
            if seq in self.swapped:
                ops += [swap_in(seq)] if todo < 0.5 else []
            elif length == 0 and todo < 0.4:
                cached = self.memory.core.match(seq)
                ops += [attach(seq, cached)] if cached else []
                if dice.random() < 0.8:
                    ops.append(grow(seq, min(self.max_len, cached + dice.randint(1, 12))))
            elif todo < 0.1 and length:
                ops.append(convert(seq, View.PAGED if dice.random() < 0.5 else View.VIRTUAL))
            elif todo < 0.15 and length:
                ops.append(swap_out(seq))
            else:
                ops.append(grow(seq, min(32, length + dice.choice([1, 1, 1, 2, 4, 8]))))
        return ops

    def step(self, ops: list[Op]) -> None:
        dice, core = self.dice, self.memory.core
        if not ops:
            return
        core.plan(ops)  # may wait for the mapper,
        core.plan(ops)  # and gives back what is above the limit
        state = core.fingerprint()
        plan = core.plan(ops)
        assert core.fingerprint() == state  # nothing changed, to the bit
        if not plan.fits:
            return
        if dice.random() < 0.5:
            core.run_mapper(dice.randint(1, 3))
        if dice.random() < 0.3:
            core.stats()
        if dice.random() < 0.2 and self.running:
            self.complete(0)
        self.running.append(core.apply(ops, plan.version))
        for kind, seq, num_tokens, *_ in ops:
            self.lengths[seq] = max(self.lengths[seq], num_tokens)
            if kind.name.startswith("SWAP"):
                (self.swapped.add if kind.name == "SWAP_OUT" else self.swapped.discard)(seq)


class ForkingLife(Life):
    """New sequences are often forks of others."""

    def draw(self) -> list[Op]:
        dice, ops = self.dice, super().draw()
        changed = {op[1] for op in ops}
        busy = {op[1] for op in ops if op[0] is not OpKind.GROW} | self.swapped
        empty = [seq for seq, n in self.lengths.items() if n == 0 and seq not in changed]
        parents = [seq for seq, n in self.lengths.items() if n > 0 and seq not in busy]
        pairs = [(c, p) for c in empty for p in parents if self.tenants[c] == self.tenants[p]]
        if pairs and dice.random() < 0.5:
            child, parent = dice.choice(pairs)
            ops.insert(0, fork(child, parent, dice.randint(1, self.lengths[parent])))
        return ops


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((Life, seed) for seed in (*range(40), *FOUND)),
        *((ForkingLife, seed) for seed in range(40)),
    ],
)
def test_a_plan_that_fits_is_not_refused(kind: type[Life], seed: int) -> None:
    life = kind(seed)
    for _ in range(STEPS):
        life.turn()
    life.memory.core.settle_mapper()
    life.memory.core.check()


def test_what_was_found_in_the_cache_can_be_attached_above_a_lowered_limit() -> None:
    memory = make_memory()
    prompt = list(range(1, 21))
    seq = memory.start(prompt)
    epoch = memory.begin(grow(seq, 21))
    memory.release(seq)
    memory.core.set_limit(1)  # the step that runs may read its pages
    memory.core.complete(epoch)
    newcomer = memory.open(prompt)
    cached = memory.core.match(newcomer)
    assert cached == 16
    assert not memory.core.plan([attach(newcomer, cached)]).fits
    assert memory.core.stats().committed_pages > 1
    assert not memory.core.plan([grow(newcomer, 8)]).fits
    assert memory.core.stats().committed_pages == 1
