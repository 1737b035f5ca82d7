"""Random operations on the memory core, judged by the model after every one of them.

A slice that is the same on every run belongs to the test suite. A million random steps, one
command (a failing example prints its steps and the blob that replays it):

pytest tests/memory/test_stateful.py --hypothesis-profile=thorough --timeout=0
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.memory.core_support import Fault, Options, Rig
from tests.memory.model import NUM_TENANTS, Kind, Op, Shape
from vmserve._core import Health, MapperMode, ZeroPolicy

FAULTS = st.one_of(
    st.none(), st.none(), st.none(), st.builds(Fault, st.integers(1, 24), st.booleans())
)
SALTS = (b"", b"", b"salt")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    block_tokens, blocks_per_page = (
        draw(st.sampled_from([2, 4])),
        draw(st.sampled_from([1, 2, 4, 8])),
    )
    page_tokens = block_tokens * blocks_per_page
    return Shape(
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        max_seqs=6,
        num_slots=draw(st.integers(1, 5)),
        max_len=max(12, 3 * page_tokens) + draw(st.integers(0, 1)),
        max_pages=20,
        null_page=draw(st.booleans()),
        prefix_caching=draw(st.sampled_from([True, True, False])),
        swap_blocks=draw(st.sampled_from([0, 8, 200])),
        read_slack=draw(st.sampled_from([0, 0, 3])),
    )


@st.composite
def options(draw: st.DrawFn) -> Options:
    shape = draw(shapes())
    mapper = draw(st.sampled_from([MapperMode.OFF, MapperMode.MANUAL]))
    return Options(
        shape=shape,
        limit_pages=draw(st.integers(3, 18)),
        grow_pages=draw(st.integers(1, 4)),
        zero_policy=draw(st.sampled_from([ZeroPolicy.TENANT, ZeroPolicy.ALWAYS, ZeroPolicy.NEVER])),
        deferred_reclamation=draw(st.sampled_from([True, True, False])),
        seal_read_only=draw(st.booleans()),
        mapper=mapper,
        lookahead_tokens=draw(st.sampled_from([0, shape.page_tokens, 2 * shape.page_tokens])),
        eager_slots=draw(st.integers(0, 1)),
        eager_pages=draw(st.integers(0, 2)),
        shadow=draw(st.booleans()),
    )


class MemoryMachine(RuleBasedStateMachine):
    rig: Rig

    @initialize(options=options())
    def start(self, options: Options) -> None:
        self.rig = Rig(options)
        self.rig.check()

    def teardown(self) -> None:
        """Whatever happened, everything comes back."""
        if hasattr(self, "rig"):
            self.rig.give_everything_back()
            assert self.rig.core.stats().health is Health.HEALTHY

    # -- drawing

    @property
    def seqs(self) -> list[int]:
        return sorted(self.rig.model.seqs)

    def some(self, data: st.DataObject, which: Callable[[int], bool]) -> int | None:
        fitting = [seq for seq in self.seqs if which(seq)]
        return data.draw(st.sampled_from(fitting), label="sequence") if fitting else None

    def is_open(self, seq: int) -> bool:
        model = self.rig.model.seqs[seq]
        return model.length > 0 and not model.swapped

    def draw_growth(self, data: st.DataObject, seq: int, length: int) -> list[Op]:
        model, shape = self.rig.model.seqs[seq], self.rig.options.shape
        # The token after the last known one may be computed ahead of being known.
        is_named = model.known > 0 and not model.nameless
        most = min(model.known + 1, shape.max_len) if is_named else shape.max_len
        if most <= length and model.first >= length:
            return []
        to = data.draw(st.integers(max(length, 1), max(length, most, 1)), label="tokens")
        windowed = data.draw(st.sampled_from([False, False, False, True]), label="window")
        first = data.draw(st.integers(model.first, length), label="first") if windowed else 0
        return [Op(Kind.GROW, seq, to, first)]

    def draw_ops(self, data: st.DataObject, seq: int) -> list[Op]:
        """What a plan may hold for one sequence: at most one op, and a growth."""
        model = self.rig.model.seqs[seq]
        if model.swapped:
            return [Op(Kind.SWAP_IN, seq), *self.maybe_growth(data, seq, model.length)]
        if model.length == 0:
            cached = self.rig.match(seq) // self.rig.options.shape.block_tokens
            blocks = data.draw(st.integers(0, cached), label="attached blocks")
            tokens = blocks * self.rig.options.shape.block_tokens
            attach = [Op(Kind.ATTACH, seq, tokens)] if tokens else []
            return [*attach, *self.draw_growth(data, seq, tokens)]
        kind = data.draw(
            st.sampled_from([Kind.GROW, Kind.GROW, Kind.GROW, Kind.CONVERT, Kind.SWAP_OUT]),
            label="kind",
        )
        if kind is Kind.SWAP_OUT:
            return [Op(kind, seq)]
        if kind is Kind.CONVERT:
            convert = Op(kind, seq, paged=data.draw(st.booleans(), label="paged"))
            return [convert, *self.maybe_growth(data, seq, model.length)]
        return self.draw_growth(data, seq, model.length)

    def maybe_growth(self, data: st.DataObject, seq: int, length: int) -> list[Op]:
        grows = data.draw(st.booleans(), label="grows")
        return self.draw_growth(data, seq, length) if grows else []

    # -- sequences

    @rule(
        tenant=st.integers(0, NUM_TENANTS - 1),
        paged=st.booleans(),
        salt=st.sampled_from(SALTS),
        ones=st.integers(0, 40),
        known=st.integers(1, 40),
        private=st.sampled_from([False, False, False, True]),
    )
    def open(
        self, tenant: int, paged: bool, salt: bytes, ones: int, known: int, private: bool
    ) -> None:
        max_len = self.rig.options.shape.max_len
        ones, known = min(ones, max_len), min(known, max_len)
        stream = [1] * ones + [2] * (max_len - ones)  # prefixes collide
        seq = self.rig.open(
            tenant, paged=paged, salt=salt, stream=stream, known=known, private=private
        )
        if seq is not None:
            self.rig.match(seq)
        self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), count=st.integers(1, 4), fault=FAULTS)
    def step(self, data: st.DataObject, count: int, fault: Fault | None) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.seqs), min_size=1, max_size=count, unique=True),
            label="sequences",
        )
        ops = [op for seq in chosen for op in self.draw_ops(data, seq)]
        if ops:
            self.rig.step(ops, fault)
        self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), fault=FAULTS)
    def decode(self, data: st.DataObject, fault: Fault | None) -> None:
        """One token for every sequence that can take one, as a step of the engine does."""
        model, max_len = self.rig.model, self.rig.options.shape.max_len
        growing = [s for s in self.seqs if self.is_open(s) and model.seqs[s].length < max_len]
        if growing:
            ops = [Op(Kind.GROW, seq, model.seqs[seq].length + 1) for seq in growing]
            self.rig.step(ops, fault)
        self.append_where(lambda seq: seq in growing)
        self.rig.check()

    def append_where(self, which: Callable[[int], bool]) -> None:
        model, max_len = self.rig.model, self.rig.options.shape.max_len
        seqs = [
            seq
            for seq in self.seqs
            if which(seq) and not model.seqs[seq].nameless and 0 < model.seqs[seq].known < max_len
        ]
        if seqs:
            self.rig.append(seqs)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        seq = self.some(data, lambda seq: self.rig.model.seqs[seq].known > 0)
        self.append_where(lambda other: other == seq)
        self.rig.quiet()
        self.rig.check()

    @rule(data=st.data(), paged=st.booleans(), fault=FAULTS)
    def fork(self, data: st.DataObject, paged: bool, fault: Fault | None) -> None:
        model = self.rig.model
        current = model.weights
        parent = self.some(
            data,
            lambda seq: (
                self.is_open(seq)
                and model.seqs[seq].first == 0
                and model.seqs[seq].weights == current
            ),
        )
        if parent is None:
            return
        source = model.seqs[parent]
        end = data.draw(st.integers(1, source.length), label="tokens")
        private = source.known == 0
        child = self.rig.open(
            source.tenant,
            paged=paged,
            salt=b"" if private else source.salt,
            stream=source.stream[:end] + [3] * (len(source.stream) - end),
            known=data.draw(st.integers(end, len(source.stream)), label="known"),
            private=private,
        )
        if child is None:
            return
        ops = [Op(Kind.FORK, child, end, other=parent), *self.maybe_growth(data, child, end)]
        ops += self.maybe_growth(data, parent, source.length)
        if any(op.seq == parent and op.first_token for op in ops):
            ops = [op for op in ops if op.seq == child]
        if not self.rig.step(ops, fault):
            self.rig.release(child)
        self.rig.check()

    @rule(data=st.data(), fault=FAULTS)
    def release(self, data: st.DataObject, fault: Fault | None) -> None:
        seq = self.some(data, lambda seq: True)
        if seq is not None:
            self.rig.release(seq, fault)
        self.rig.check()

    # -- epochs

    def in_flight(self) -> range:
        return range(self.rig.model.completed + 1, self.rig.model.begun + 1)

    @precondition(lambda self: len(self.in_flight()) > 0)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.rig.complete(data.draw(st.sampled_from(self.in_flight()), label="epoch"))
        self.rig.check()

    @precondition(lambda self: len(self.in_flight()) > 0)
    @rule(data=st.data(), lost=st.sampled_from([False, False, True]))
    def launch_or_abandon(self, data: st.DataObject, lost: bool) -> None:
        epoch = data.draw(st.sampled_from(self.in_flight()), label="epoch")
        if lost:
            self.rig.abandon(epoch)
        else:
            self.rig.launch(epoch)
        self.rig.check()

    # -- the pool

    @rule(keep=st.integers(0, 4), drop_idle=st.booleans(), fault=FAULTS)
    def trim(self, keep: int, drop_idle: bool, fault: Fault | None) -> None:
        self.rig.trim(keep, drop_idle=drop_idle, fault=fault)
        self.rig.check()

    @rule(limit=st.integers(2, 20), fault=FAULTS)
    def set_limit(self, limit: int, fault: Fault | None) -> None:
        self.rig.set_limit(limit, fault)
        self.rig.check()

    @rule(fault=FAULTS)
    def compact(self, fault: Fault | None) -> None:
        self.rig.compact(fault)
        self.rig.check()

    @rule(rare=st.integers(0, 3))
    def clear_cache(self, rare: int) -> None:
        if rare == 0:
            self.rig.clear_cache()
        self.rig.check()

    @rule(count=st.integers(1, 3), fault=FAULTS)
    def run_mapper(self, count: int, fault: Fault | None) -> None:
        self.rig.under(fault, lambda: self.rig.core.run_mapper(count))
        self.rig.quiet()
        self.rig.check()

    @rule()
    def settle_mapper(self) -> None:
        self.rig.core.settle_mapper()
        self.rig.quiet()
        self.rig.check()

    @precondition(lambda self: not self.rig.model.seqs)
    @rule(paged=st.booleans())
    def one_alone_has_the_whole_pool(self, paged: bool) -> None:
        """Whatever was left parked, spare, cached or waiting: pages for one are pages for one."""
        rig, shape = self.rig, self.rig.options.shape
        rig.complete(rig.model.begun)
        rig.set_limit(shape.pages_for(shape.max_len + shape.read_slack) + shape.null_page)
        seq = rig.open(paged=paged, private=True)
        assert seq is not None
        assert rig.step([Op(Kind.GROW, seq, shape.max_len)])
        rig.check()


def slice_settings(max_examples: int, steps: int) -> Any:
    """The same on every run: a trap ends the process and could not be replayed."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestMemory = MemoryMachine.TestCase
if settings.get_current_profile_name() != "thorough":
    TestMemory.settings = slice_settings(max_examples=120, steps=40)
