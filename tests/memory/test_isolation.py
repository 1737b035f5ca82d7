"""No tenant ever reads a byte of another, whatever way its memory came to it.

Ten thousand pairs of tenants, one command:

pytest tests/memory/test_isolation.py --hypothesis-profile=thorough --timeout=0
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.memory.core_support import Options, Rig
from tests.memory.model_types import NUM_TENANTS, Kind, Op, Shape
from vmserve._core import MapperMode, ZeroPolicy

NUM_PAIRS = 1_250 if settings.get_current_profile_name() == "thorough" else 100  # of 8 kinds


def options(blocks_per_page: int, policy: ZeroPolicy, mapper: MapperMode) -> Options:
    page_tokens = 2 * blocks_per_page
    shape = Shape(
        block_tokens=2,
        blocks_per_page=blocks_per_page,
        max_seqs=4,
        num_slots=3,
        max_len=4 * page_tokens,
        max_pages=12,
        null_page=True,
        swap_blocks=8 * blocks_per_page,
    )
    ahead = page_tokens if mapper is MapperMode.MANUAL else 0
    return Options(
        shape,
        limit_pages=11,
        zero_policy=policy,
        mapper=mapper,
        lookahead_tokens=ahead,
        eager_slots=1 if ahead else 0,
        eager_pages=1,
    )


class Pairs:
    """Tenant A fills memory and leaves; B comes by it in every way there is."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.random = random.Random(7)
        self.paths: list[Callable[[int], None]] = [
            self.grow,
            self.fork,
            self.convert,
            self.swap,
            self.attach,
            self.slide,
        ]

    def coin(self) -> bool:
        return self.random.random() < 0.5

    def step(self, *ops: Op) -> bool:
        done = self.rig.step(ops)
        self.rig.check_isolation()
        if done and self.coin():
            self.rig.complete(self.rig.model.begun)
        if self.coin():
            self.rig.core.run_mapper(2)
            self.rig.quiet()
            self.rig.check_isolation()
        return done

    def open(self, tenant: int, salt: bytes) -> int:
        max_len = self.rig.options.shape.max_len
        seq = self.rig.open(tenant, paged=self.coin(), salt=salt, known=max_len)
        assert seq is not None
        return seq

    def start(self, tenant: int, salt: bytes) -> int:
        seq = self.open(tenant, salt)
        assert self.rig.match(seq) == 0, "a foreign prefix was found"
        shape = self.rig.options.shape
        tokens = self.random.randint(1, shape.max_len // 2)
        assert self.step(Op(Kind.GROW, seq, tokens))
        return seq

    def grow(self, seq: int) -> None:
        length, most = self.rig.model.seqs[seq].length, self.rig.options.shape.max_len
        self.step(Op(Kind.GROW, seq, self.random.randint(length, most)))

    def fork(self, seq: int) -> None:
        model = self.rig.model.seqs[seq]
        child = self.open(model.tenant, model.salt)  # type: ignore[arg-type]
        end = self.random.randint(1, model.length)
        if self.step(Op(Kind.FORK, child, end, other=seq)):
            self.grow(child)
        self.rig.release(child)

    def convert(self, seq: int) -> None:
        self.step(Op(Kind.CONVERT, seq, paged=self.coin()))
        self.step(Op(Kind.CONVERT, seq, paged=self.coin()))
        self.grow(seq)

    def swap(self, seq: int) -> None:
        if self.step(Op(Kind.SWAP_OUT, seq)):
            assert self.step(Op(Kind.SWAP_IN, seq)) or self.rig.model.waiting_pages()

    def attach(self, seq: int) -> None:
        """Another sequence of the same tenant finds what the first one published."""
        model = self.rig.model.seqs[seq]
        other = self.open(model.tenant, model.salt)  # type: ignore[arg-type]
        if matched := self.rig.match(other):
            to = self.random.randint(matched + 1, self.rig.options.shape.max_len)
            self.step(Op(Kind.ATTACH, other, matched), Op(Kind.GROW, other, to))
        self.rig.release(other)

    def slide(self, seq: int) -> None:
        length, most = self.rig.model.seqs[seq].length, self.rig.options.shape.max_len
        to, first = self.random.randint(length, most), self.random.randint(0, length)
        self.step(Op(Kind.GROW, seq, to, first))

    def pair(self, number: int) -> None:
        one, two = self.random.sample(range(NUM_TENANTS), 2)
        salt = b"pair %d" % number
        for tenant in (one, two):
            seq = self.start(tenant, salt)
            for path in self.random.choices(self.paths[:-1], k=2):
                if not self.rig.model.seqs[seq].swapped:
                    path(seq)
            if self.coin() and not self.rig.model.seqs[seq].swapped:
                self.slide(seq)
            self.rig.release(seq)
            if self.coin():
                self.rig.trim(self.random.randint(0, 3), drop_idle=self.coin())
            self.rig.complete(self.rig.model.begun)
            self.rig.quiet()


@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.MANUAL])
@pytest.mark.parametrize("policy", [ZeroPolicy.TENANT, ZeroPolicy.ALWAYS])
@pytest.mark.parametrize("blocks_per_page", [1, 4])
@pytest.mark.slow
def test_no_tenant_reads_anothers_bytes(
    blocks_per_page: int, policy: ZeroPolicy, mapper: MapperMode
) -> None:
    rig = Rig(options(blocks_per_page, policy, mapper))
    pairs = Pairs(rig)
    for number in range(NUM_PAIRS // 8):
        pairs.pair(number)
    rig.check()
    rig.give_everything_back()
