"""The memory core over device pages: what is written is what is read, in both views, for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from vmserve.memory.base import Convert, Fork, Growth, MemoryPlan, Regime, SwapIn
from vmserve.memory.layout import KVLayout, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import contiguous_view, paged_view
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip

pytestmark = pytest.mark.gpu

HEADS, DIM, LAYERS, MAX_LEN, NUM_SLOTS = 2, 64, 4, 2048, 6


def layout(granularity: int) -> KVLayout:
    # 1 KiB a token in each of two groups: pages of 2 MiB have 2048 tokens, too few to see much.
    return plan_layout(LAYERS, HEADS, DIM, "float32", granularity, layers_per_group=LAYERS)


def make(runtime: TorchRuntime, num_pages: int, **options: object) -> MemoryManager:
    pages = runtime.memory()
    planned = layout(pages.granularity)
    return MemoryManager(
        planned,
        num_slots=NUM_SLOTS,
        num_seqs=2 * NUM_SLOTS,
        max_len=MAX_LEN,
        limit_bytes=num_pages * planned.total_page_bytes,
        options=MemoryOptions(driver=pages, **options),  # type: ignore[arg-type]
    )


@dataclass
class Seq:
    id: int
    length: int
    tenant: int
    #: The number at each position, of layer 0's first element.
    numbers: list[float]


class Life:
    """Random growths, forks, conversions, swaps and releases, with every number known."""

    def __init__(self, memory: MemoryManager, seed: int) -> None:
        self.memory = memory
        self.rng = random.Random(seed)
        self.view, self.paged = contiguous_view(memory), paged_view(memory)
        self.seqs: list[Seq] = []
        self.next_number = 1.0
        self.done: dict[str, int] = {}

    def rows(self, seq: Seq, position: int) -> list[torch.Tensor]:
        """K of each layer at a position, then V, in the view that the sequence is in."""
        if self.memory.regime(seq.id) is Regime.VIRTUAL:
            view, index = self.view, (int(self.memory.slots([seq.id])[0]), position)
        else:
            size, per_page = self.memory.layout.block_tokens, self.memory.layout.blocks_per_page
            block = int(self.memory.blocks(seq.id)[position // size])
            view, index = self.paged, (block // per_page, block % per_page * size + position % size)
        return [tensor[index] for tensor in (*view.keys, *view.values)]

    def write(self, seq: Seq, first: int) -> None:
        for position in range(first, seq.length):
            seq.numbers.append(self.next_number)
            for row in self.rows(seq, position):
                row.fill_(self.next_number)
            self.next_number += 1.0

    def look(self, seq: Seq) -> None:
        for position in sorted({0, seq.length // 2, seq.length - 1}):
            found = torch.stack(self.rows(seq, position))
            assert torch.equal(found, torch.full_like(found, seq.numbers[position]))

    def apply(self, growths: list[Growth], ops: list[Fork | Convert]) -> int | None:
        plan = self.memory.plan(growths, ops)
        return self.memory.apply(plan) if isinstance(plan, MemoryPlan) else None

    def step(self) -> None:
        rng = self.rng
        what = rng.choice(["open", "grow", "grow", "fork", "convert", "release", "swap"])
        self.done[what] = self.done.get(what, 0) + bool(getattr(self, what)())
        self.memory.check()

    def open(self) -> bool:
        if len(self.seqs) == NUM_SLOTS:
            return False
        tenant = self.rng.choice([0, 1])
        id_ = self.memory.open(regime=self.rng.choice(list(Regime)), tenant=tenant)
        assert id_ is not None
        seq = Seq(id_, 0, tenant, [])
        if not self._grow(seq, self.rng.randint(1, 40)):
            self.memory.release(id_)
            return False
        self.seqs.append(seq)
        return True

    def _grow(self, seq: Seq, by: int) -> bool:
        to = min(seq.length + by, MAX_LEN)
        epoch = self.apply([Growth(seq.id, to)], [])
        if epoch is None:
            return False
        first, seq.length = seq.length, to
        self.write(seq, first)
        self.memory.launched(epoch)
        return True

    def grow(self) -> bool:
        return bool(self.seqs) and self._grow(self.rng.choice(self.seqs), self.rng.randint(1, 30))

    def fork(self) -> bool:
        if not self.seqs or len(self.seqs) == NUM_SLOTS:
            return False
        parent = self.rng.choice(self.seqs)
        length = self.rng.randint(1, parent.length)
        id_ = self.memory.open(regime=self.rng.choice(list(Regime)), tenant=parent.tenant)
        assert id_ is not None
        epoch = self.apply([], [Fork(id_, parent.id, length)])
        if epoch is None:
            self.memory.release(id_)
            return False
        self.memory.launched(epoch)
        self.seqs.append(Seq(id_, length, parent.tenant, parent.numbers[:length]))
        return True

    def convert(self) -> bool:
        if not self.seqs:
            return False
        seq = self.rng.choice(self.seqs)
        epoch = self.apply([], [Convert(seq.id, self.rng.choice(list(Regime)))])
        if epoch is None:
            return False
        self.memory.launched(epoch)
        self.look(seq)
        return True

    def release(self) -> bool:
        if len(self.seqs) < 2:
            return False
        seq = self.seqs.pop(self.rng.randrange(len(self.seqs)))
        self.look(seq)
        self.memory.release(seq.id)
        return True

    def swap(self) -> bool:
        if not self.seqs:
            return False
        seq = self.rng.choice(self.seqs)
        if not self.memory.swap_out([seq.id]):
            return False
        plan = self.memory.plan([], [SwapIn(seq.id)])
        assert isinstance(plan, MemoryPlan)
        self.memory.launched(self.memory.apply(plan))
        self.look(seq)
        return True


@pytest.mark.parametrize("mapper", ["off", "thread"])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_life(active: TorchRuntime, seed: int, mapper: str) -> None:
    memory = make(active, 48, mapper=mapper, swap_bytes=64 << 20, lookahead_tokens=16)
    life = Life(memory, seed)
    for _ in range(120):
        life.step()
    for seq in life.seqs:
        life.look(seq)
    assert min(life.done.values()) > 0, life.done
    memory.close()


def test_no_tenant_reads_a_byte_of_another(active: TorchRuntime) -> None:
    """A fills the pool with one number and leaves; B finds it nowhere, in neither view."""
    memory = make(active, 8, zero_pages="tenant")
    secret = 7.25
    for regime in list(Regime) * 2:
        life = Life(memory, 0)
        for tenant, writes in ((0, True), (1, False)):
            seq = memory.open(regime=regime, tenant=tenant)
            assert seq is not None
            length = min(MAX_LEN, 4 * memory.layout.page_tokens)
            plan = memory.plan([Growth(seq, length)])
            assert isinstance(plan, MemoryPlan)
            epoch = memory.apply(plan)
            entry = Seq(seq, length, tenant, [])
            if writes:
                for position in range(length):
                    for row in life.rows(entry, position)[:2]:
                        row.fill_(secret)
            else:
                for position in range(0, length, 7):
                    assert not (torch.stack(life.rows(entry, position)) == secret).any()
            memory.launched(epoch)
            memory.release(seq)
        memory.check()
    assert memory.stats().pages_zeroed_total > 0
    memory.close()


def test_memory_goes_back_to_the_device(active: TorchRuntime) -> None:
    memory = make(active, 40)
    seq = memory.open()
    assert seq is not None
    plan = memory.plan([Growth(seq, MAX_LEN)])
    assert isinstance(plan, MemoryPlan)
    memory.launched(memory.apply(plan))
    assert memory.stats().memfd_allocated_bytes > 0
    memory.release(seq)
    memory.wait()
    memory.trim(0, drop_idle=True)
    assert memory.stats().memfd_allocated_bytes == 0
    memory.close()
