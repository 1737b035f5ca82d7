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
from tests.memory.model_types import Kind, Op, Shape
from vmserve._core import Health, MapperMode, ZeroPolicy

FAULTS = st.one_of(
    st.none(), st.none(), st.none(), st.builds(Fault, st.integers(1, 24), st.booleans())
)
SALTS = (b"", b"", b"", b"salt")
TENANTS = (0, 0, 0, 1, 2)
CHORES = (
    *("trim", "set_limit", "compact", "run_mapper", "settle_mapper", "finish_copies"),
    *("trim", "set_limit", "compact", "run_mapper", "run_mapper", "clear_cache", "run_copies"),
    *("run_store", "run_store", "damage_files"),
)


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
        copies_late=draw(st.booleans()),
    )


@st.composite
def options(draw: st.DrawFn) -> Options:
    shape = draw(shapes())
    mapper = draw(st.sampled_from([MapperMode.OFF, MapperMode.MANUAL]))
    return Options(
        shape=shape,
        limit_pages=draw(st.one_of(st.integers(3, 8), st.integers(8, 20), st.integers(14, 20))),
        grow_pages=draw(st.integers(1, 4)),
        zero_policy=draw(st.sampled_from([ZeroPolicy.TENANT, ZeroPolicy.ALWAYS, ZeroPolicy.NEVER])),
        deferred_reclamation=draw(st.sampled_from([True, True, False])),
        seal_read_only=draw(st.booleans()),
        access_under_readers=draw(st.sampled_from([True, True, False])),
        mapper=mapper,
        lookahead_tokens=draw(st.sampled_from([0, shape.page_tokens, 2 * shape.page_tokens])),
        eager_slots=draw(st.integers(0, 1)),
        eager_pages=draw(st.integers(0, 2)),
        shadow=draw(st.booleans()),
        max_map_count=draw(st.sampled_from([0, 0, 60, 90])),
        faulty_member=draw(st.sampled_from([None, None, 0, 1])),
        persists=(
            shape.prefix_caching
            and not shape.copies_late
            and draw(st.sampled_from([False, False, True]))
        ),
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
        is_named = model.known > 0 and not model.tokens_unknown
        most = min(model.known + 1, shape.max_len) if is_named else shape.max_len
        if most <= length and model.first >= length:
            return []
        least, most = max(length, 1), max(length, most, 1)
        to = data.draw(st.one_of(st.integers(least, most), st.just(most)), label="tokens")
        windowed = data.draw(st.sampled_from([False, False, False, True]), label="window")
        first = data.draw(st.integers(model.first, length), label="first") if windowed else 0
        drafted = data.draw(st.sampled_from([0, 0, 0, min(5, shape.max_len - to)]), label="drafted")
        return [Op(Kind.GROW, seq, to + drafted, first, num_drafted=drafted)]

    def draw_ops(self, data: st.DataObject, seq: int) -> list[Op]:
        """What a plan may hold for one sequence: at most one op, and a growth."""
        model = self.rig.model.seqs[seq]
        if model.swapped:
            return [Op(Kind.SWAP_IN, seq), *self.maybe_growth(data, seq, model.length)]
        if model.length == 0:
            cached = self.rig.match(seq) // self.rig.options.shape.block_tokens
            some = st.one_of(st.just(cached), st.integers(0, cached))
            blocks = data.draw(some, label="attached blocks")
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

    @rule(data=st.data(), count=st.integers(1, 3), fault=FAULTS)
    def admit(self, data: st.DataObject, count: int, fault: Fault | None) -> None:
        """New sequences take what the cache has of them, and grow, in one plan."""
        opened = [self.open(data) for _ in range(count)]
        ops = [op for seq in opened if seq is not None for op in self.draw_ops(data, seq)]
        if ops:
            self.rig.step(ops, fault)
        self.rig.check()

    def open(self, data: st.DataObject) -> int | None:
        max_len = self.rig.options.shape.max_len
        lengths = st.sampled_from([1, max_len // 4, max_len // 2, max_len - 1, max_len])
        lengths = st.one_of(lengths, st.integers(1, max_len))
        ones = data.draw(lengths, label="ones")
        seq = self.rig.open(
            data.draw(st.sampled_from(TENANTS), label="tenant"),
            paged=data.draw(st.booleans(), label="paged"),
            salt=data.draw(st.sampled_from(SALTS), label="salt"),
            stream=[1] * ones + [2] * (max_len - ones),  # prefixes collide
            known=data.draw(lengths, label="known"),
            private=data.draw(st.sampled_from([False] * 7 + [True]), label="private"),
        )
        if seq is not None:
            if self.rig.options.persists and data.draw(st.booleans(), label="restore"):
                self.rig.restore(seq, data.draw(FAULTS, label="fault"))
            self.rig.match(seq)
        return seq

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), count=st.integers(1, 4), fault=FAULTS)
    def step(self, data: st.DataObject, count: int, fault: Fault | None) -> None:
        """Anything that one plan may hold, for several sequences."""
        chosen = data.draw(
            st.lists(st.sampled_from(self.seqs), min_size=1, max_size=count, unique=True),
            label="sequences",
        )
        ops = [op for seq in chosen for op in self.draw_ops(data, seq)]
        if ops:
            self.rig.step(ops, fault)
        self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(steps=st.integers(1, 6), completes=st.booleans(), fault=FAULTS)
    def decode(self, steps: int, completes: bool, fault: Fault | None) -> None:
        """A token for every sequence that can take one, a few times, as an engine does."""
        model, max_len = self.rig.model, self.rig.options.shape.max_len
        for _ in range(steps):
            growing = [s for s in self.seqs if self.is_open(s) and model.seqs[s].length < max_len]
            if not growing:
                break
            ops = [Op(Kind.GROW, seq, model.seqs[seq].length + 1) for seq in growing]
            self.rig.step(ops, fault)
            self.append(growing)
            if completes:
                self.rig.complete(model.begun)
            self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), steps=st.integers(1, 4), completes=st.booleans(), fault=FAULTS)
    def speculate(
        self, data: st.DataObject, steps: int, completes: bool, fault: Fault | None
    ) -> None:
        """Decode with drafts, of which some tokens are kept, before or after the step is over."""
        model, max_len = self.rig.model, self.rig.options.shape.max_len
        for _ in range(steps):
            drafted = {}
            for seq in self.seqs:
                room = max_len - model.seqs[seq].length - 1
                if self.is_open(seq) and room >= 0:
                    drafted[seq] = data.draw(st.integers(0, min(7, room)), label="drafted")
            lengths = {seq: model.seqs[seq].length + 1 for seq in drafted}
            ops = [
                Op(Kind.GROW, seq, lengths[seq] + num, num_drafted=num)
                for seq, num in drafted.items()
            ]
            if not ops or not self.rig.step(ops, fault):
                break
            if completes:
                self.rig.complete(model.begun)
            self.append(list(drafted))
            kept = {seq: data.draw(st.integers(0, num)) for seq, num in drafted.items() if num}
            for seq, num in kept.items():
                for _ in range(num):
                    self.append([seq])
            if kept:
                self.rig.keep({seq: lengths[seq] + num for seq, num in kept.items()})
            self.rig.check()

    def append(self, seqs: list[int]) -> None:
        model, max_len = self.rig.model, self.rig.options.shape.max_len
        named = [seq for seq in seqs if not model.seqs[seq].tokens_unknown]
        if told := [seq for seq in named if 0 < model.seqs[seq].known < max_len]:
            self.rig.append(told)

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
            known=end,
            private=private,
        )
        if child is None:
            return
        ops = [Op(Kind.FORK, child, end, other=parent), *self.maybe_growth(data, child, end)]
        growth = self.maybe_growth(data, parent, source.length)
        ops += [op for op in growth if op.first_token == 0]
        if not self.rig.step(ops, fault):
            self.rig.release(child)
        self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), steps=st.integers(0, 2), fault=FAULTS)
    def make_way(self, data: st.DataObject, steps: int, fault: Fault | None) -> None:
        """Somebody's pages are wanted at once; those who share with it go on meanwhile."""
        refs = self.rig.model.seen.refs
        seqs = [seq for seq in self.seqs if self.is_open(seq)]
        sharing = [
            s for s in seqs if any(refs.get(b, 0) > 1 for b in self.rig.model.seen.seqs[s].blocks)
        ]
        seq = data.draw(st.sampled_from(sharing or seqs), label="sequence") if seqs else None
        if seq is None or not self.rig.step([Op(Kind.SWAP_OUT, seq)], fault):
            return
        for _ in range(steps):
            for other in [s for s in self.seqs if self.is_open(s)]:
                if growth := self.draw_growth(data, other, self.rig.model.seqs[other].length):
                    self.rig.step(growth)
        self.rig.check()

    @precondition(lambda self: self.rig.model.seqs)
    @rule(data=st.data(), fault=FAULTS)
    def release(self, data: st.DataObject, fault: Fault | None) -> None:
        seq = self.some(data, lambda seq: True)
        assert seq is not None
        self.rig.release(seq, fault)
        self.rig.check()

    # -- epochs

    @precondition(lambda self: self.rig.model.completed < self.rig.model.begun)
    @rule(data=st.data(), how=st.sampled_from(["complete", "complete", "launch", "abandon"]))
    def end_epoch(self, data: st.DataObject, how: str) -> None:
        running = range(self.rig.model.completed + 1, self.rig.model.begun + 1)
        epoch = data.draw(st.sampled_from(running), label="epoch")
        {"complete": self.rig.complete, "launch": self.rig.launch, "abandon": self.rig.abandon}[
            how
        ](epoch)
        self.rig.check()

    # -- the pool

    @rule(data=st.data(), fault=FAULTS, what=st.sampled_from(CHORES))
    def keep_house(self, data: st.DataObject, fault: Fault | None, what: str) -> None:
        rig = self.rig
        if what == "trim":
            drop_idle = data.draw(st.booleans(), label="drop_idle")
            rig.trim(data.draw(st.integers(0, 4), label="keep"), drop_idle=drop_idle, fault=fault)
        elif what == "set_limit":
            # Often below what is in use.
            limits = st.one_of(st.integers(2, rig.options.shape.max_pages), st.integers(2, 4))
            rig.set_limit(data.draw(limits, label="limit"), fault)
        elif what == "compact":
            if data.draw(st.booleans(), label="nothing runs"):
                rig.complete(rig.model.begun)
            rig.compact(fault)
        elif what == "clear_cache":
            rig.clear_cache()
        elif what == "run_mapper":
            rig.under(fault, lambda: rig.core.run_mapper(data.draw(st.integers(1, 3))))
            rig.quiet()
        elif what == "run_store":
            rig.under(fault, lambda: rig.core.run_store(data.draw(st.integers(1, 3))))
            rig.quiet()
        elif what == "damage_files":
            rig.damage_files(data.draw(st.integers(0, 5000), label="number"))
        elif what == "run_copies":
            rig.run_copies(data.draw(st.integers(1, 3)))
        elif what == "finish_copies":
            rig.finish_copies(fault)
        else:
            rig.core.settle_mapper()
            rig.quiet()
        rig.check()

    @precondition(lambda self: not self.rig.model.seqs)
    @rule(paged=st.booleans())
    def one_alone_has_the_whole_pool(self, paged: bool) -> None:
        """Whatever was left parked, spare, cached or waiting: pages for one are pages for one."""
        rig, shape = self.rig, self.rig.options.shape
        rig.complete(rig.model.begun)
        rig.finish_copies()
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
if (profile := settings.get_current_profile_name()) != "thorough":
    TestMemory.settings = slice_settings(max_examples=30 if profile == "fast" else 120, steps=40)
