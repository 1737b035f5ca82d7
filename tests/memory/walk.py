"""Random lives of a memory: one language of operations over every driver, kinds and faults.

A :class:`Walk` draws what is legal now from what the rig's model knows; the rig carries it out,
and its model judges every step. A seed says everything, so that a failure replays alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.memory.model_types import NUM_TENANTS, Kind, ModelSequence, Op
from tests.memory.rig import Fault

#: How often each operation is drawn, of the sum of all.
EVERYTHING: Mapping[str, int] = {
    "admit": 16,
    "step": 26,
    "decode": 14,
    "speculate": 6,
    "fork": 9,
    "make_way": 8,
    "release": 10,
    "end_epoch": 8,
    "keep_house": 14,
    "alone": 1,
}
#: Requests that come, grow and are gone at any moment.
ABORTS = EVERYTHING | {"release": 40, "speculate": 0}
#: Prefixes that come back after they left memory.
RETURNS = EVERYTHING | {"admit": 40, "release": 25, "keep_house": 30, "decode": 6}
CHORES = (
    *("trim", "set_limit", "compact", "run_mapper", "settle_mapper", "finish_copies"),
    *("trim", "set_limit", "compact", "run_mapper", "run_mapper", "clear_cache", "run_copies"),
)
STORING = ("run_store", "run_store", "flush", "damage_files") * 2


@dataclass
class Walk:
    rig: Any
    rng: random.Random
    habits: Mapping[str, int] = field(default_factory=lambda: EVERYTHING)
    faults: bool = True
    #: Whether a plan that fits must be carried out though the mapper works in between.
    disturbs: bool = False
    #: Windows that a growth states, drafts, and cuts of a prefix or a fork anywhere: what a memory
    #: of one kind can do.
    is_plain: bool = True
    has_state: bool = False
    num_steps: int = 0

    def run(self, num_steps: int) -> None:
        names, weights = list(self.habits), list(self.habits.values())
        for self.num_steps in range(num_steps):
            if self.rig.is_over:
                return
            getattr(self, self.rng.choices(names, weights)[0])()
            if not self.rig.is_over:
                self.rig.let_run(self.rng, self.fault())
            self.rig.check()

    # -- drawing

    @property
    def seqs(self) -> dict[int, ModelSequence]:
        return self.rig.model.seqs

    @property
    def present(self) -> list[int]:
        return [seq for seq, model in self.seqs.items() if model.length and not model.swapped]

    def fault(self) -> Fault | None:
        rng = self.rng
        if not self.faults or rng.random() < 0.65:
            return None
        call = rng.choice([1, 1, 1, 2, 3, rng.randint(1, 24)])
        return Fault(call, rng.random() < 0.3, rng.randrange(8))

    def meanwhile(self) -> Callable[[], None] | None:
        if not self.disturbs or self.rng.random() < 0.5:
            return None
        jobs = self.rng.randint(0, 3)
        return lambda: self.rig.core.run_mapper(jobs) if jobs else self.rig.core.stats()

    def length(self) -> int:
        most = self.rig.shape.max_len
        some = [1, most // 4, most // 2, most - 1, most]
        return self.rng.choice([*some, self.rng.randint(1, most)])

    def growth(self, seq: int, length: int, most: int | None = None) -> list[Op]:
        """To `most` tokens at most, or to what the sequence can have."""
        rng, model, max_len = self.rng, self.seqs[seq], self.rig.shape.max_len
        # The token after the last known one may be computed ahead of being known.
        is_named = model.known > 0 and not model.tokens_unknown
        is_named = is_named and model.weights == self.rig.model.weights
        top = min(model.known + 1, max_len) if is_named else max_len
        top = min(top, most or max_len)
        if top <= length and model.first >= length:
            return []
        to = rng.choice([top, rng.randint(length, top)]) if top > length else length
        to = max(to, 1)
        if not self.is_plain:
            return [Op(Kind.GROW, seq, to)] if to > length else []
        first = rng.randint(model.first, length) if rng.random() < 0.15 else 0
        drafted = min(5, max_len - to) if rng.random() < 0.15 and self.habits["speculate"] else 0
        return [Op(Kind.GROW, seq, to + drafted, first, num_drafted=drafted)]

    def maybe_growth(self, seq: int, length: int) -> list[Op]:
        return self.growth(seq, length) if self.rng.random() < 0.5 else []

    def start(self, seq: int) -> list[Op]:
        """An empty sequence takes what the cache has of it, and grows."""
        found = self.rig.match(seq)
        width = self.rig.shape.block_tokens
        if self.is_plain and self.rng.random() < 0.4:
            found = self.rng.randint(0, found // width) * width
        elif self.rng.random() < 0.1:
            found = 0
        attach = [Op(Kind.ATTACH, seq, found)] if found else []
        return [*attach, *self.growth(seq, found)]

    def ops_of(self, seq: int) -> list[Op]:
        """What a plan may hold for one sequence: at most one op, and a growth."""
        rng, model = self.rng, self.seqs[seq]
        if model.swapped:
            return [Op(Kind.SWAP_IN, seq), *self.maybe_growth(seq, model.length)]
        if model.length == 0:
            return self.start(seq)
        draw = rng.random()
        if draw < 0.15:
            return [Op(Kind.SWAP_OUT, seq)]
        if draw < 0.4:
            convert = Op(Kind.CONVERT, seq, paged=model.paged is (rng.random() < 0.1))
            return [convert, *self.maybe_growth(seq, model.length)]
        return self.growth(seq, model.length)

    # -- operations

    def open(self) -> int | None:
        rng, max_len = self.rng, self.rig.shape.max_len
        ones = self.length()
        seq: int | None = self.rig.open(
            rng.choice([0, 0, 0, *range(NUM_TENANTS)]),
            paged=rng.random() < 0.5,
            salt=rng.choice([b"", b"", b"", b"salt"]),
            stream=[1] * ones + [2] * (max_len - ones),  # prefixes collide
            known=max(self.length(), self.length()),
            private=rng.random() < 0.12,
        )
        return seq

    def admit(self) -> None:
        """New sequences take what the cache has of them, and grow, in one plan."""
        opened, ops = list[int](), list[Op]()
        for _ in range(self.rng.randint(1, 3)):
            if (seq := self.open()) is None:
                break
            opened.append(seq)
            if self.rng.random() < 0.8:
                self.rig.restore(seq, ops, self.fault())
                if self.rig.is_over:
                    return
            ops += self.start(seq)
        if not ops or self.rig.step(ops, self.fault(), self.meanwhile()):
            return
        for seq in opened:
            if self.rng.random() < 0.5 and not self.rig.is_over:
                self.rig.release(seq, None)

    def step(self) -> None:
        """Anything that one plan may hold, for several sequences."""
        seqs = list(self.seqs)
        chosen = self.rng.sample(seqs, min(len(seqs), self.rng.randint(1, 4)))
        if ops := [op for seq in chosen for op in self.ops_of(seq)]:
            self.rig.step(ops, self.fault(), self.meanwhile())

    def decode(self) -> None:
        """A token or a few for most sequences, as an engine does nearly always."""
        for _ in range(self.rng.choice([1, 1, 3])):
            growing = [seq for seq in self.present if self.rng.random() < 0.85]
            self.tell(growing)
            few = self.rng.choice([1, 1, 1, 5])
            ops = [
                op
                for s in growing
                for op in self.growth(s, self.seqs[s].length, self.seqs[s].length + few)
            ]
            if (
                not ops
                or not self.rig.step(ops, self.fault(), self.meanwhile())
                or self.rig.is_over
            ):
                return
            self.rig.let_run(self.rng, self.fault())

    def tell(self, seqs: list[int]) -> None:
        """The memory learns the next token of those whose known ones are all computed."""
        max_len = self.rig.shape.max_len
        self.rig.append(
            [
                seq
                for seq in seqs
                if not self.seqs[seq].tokens_unknown
                and 0 < self.seqs[seq].known <= min(self.seqs[seq].length, max_len - 1)
            ]
        )

    def speculate(self) -> None:
        """Decode with drafts, of which some tokens are kept, before or after the step is over."""
        rng, max_len = self.rng, self.rig.shape.max_len
        rooms = {seq: max_len - self.seqs[seq].length - 1 for seq in self.present}
        drafted = {seq: rng.randint(0, min(7, room)) for seq, room in rooms.items() if room >= 0}
        lengths = {seq: self.seqs[seq].length + 1 for seq in drafted}
        ops = [
            Op(Kind.GROW, seq, lengths[seq] + num, num_drafted=num) for seq, num in drafted.items()
        ]
        if self.has_state or not ops or not self.rig.step(ops, self.fault(), None):
            return
        if rng.random() < 0.5:
            self.rig.end_epoch(rng, None)
        kept = {seq: rng.randint(0, num) for seq, num in drafted.items() if num}
        for seq in drafted:
            for _ in range(kept.get(seq, 0) + 1):
                self.tell_any(seq)
        if kept:
            self.rig.keep({seq: lengths[seq] + num for seq, num in kept.items()})

    def tell_any(self, seq: int) -> None:
        model = self.seqs[seq]
        if not model.tokens_unknown and 0 < model.known < self.rig.shape.max_len:
            self.rig.append([seq])

    def fork(self) -> None:
        parents = [
            seq
            for seq in self.present
            if self.seqs[seq].weights == self.rig.model.weights
            and (self.seqs[seq].first == 0 or not self.is_plain)
        ]
        if not parents:
            return
        parent = self.rng.choice(parents)
        source = self.seqs[parent]
        end = self.fork_length(source)
        private = source.known == 0
        child = self.rig.open(
            source.tenant,
            paged=self.rng.random() < 0.5,
            salt=b"" if private else source.salt,
            stream=source.stream[:end] + [3] * (len(source.stream) - end),
            known=end,
            private=private,
        )
        if child is None:
            return
        ops = [Op(Kind.FORK, child, end, other=parent), *self.maybe_growth(child, end)]
        ops += [op for op in self.maybe_growth(parent, source.length) if op.first_token == 0]
        if not self.rig.step(ops, self.fault(), self.meanwhile()) and not self.rig.is_over:
            self.rig.release(child, None)

    def fork_length(self, source: ModelSequence) -> int:
        """Before the parent's end only if no window can have given anything up, and there is no
        state: the scheduler's rule (``Families``)."""
        if self.has_state or source.length > self.rig.narrowest:
            return source.length
        return self.rng.randint(1, source.length)

    def make_way(self) -> None:
        """Somebody's pages are wanted at once; those who share with it go on meanwhile."""
        refs = self.rig.model.seen.refs
        present = self.present
        sharing = [
            s
            for s in present
            if any(refs.get(b, 0) > 1 for b in self.rig.model.seen.seqs[s].blocks)
        ]
        if not present:
            return
        victim = self.rng.choice(sharing or present)
        if not self.rig.step([Op(Kind.SWAP_OUT, victim)], self.fault(), None):
            return
        for _ in range(self.rng.randint(0, 3)):
            if not self.rig.is_over:
                self.rng.choice([self.decode, self.decode, self.admit, self.fork])()
        back = self.seqs.get(victim)
        if back is not None and back.swapped and self.rng.random() < 0.5 and not self.rig.is_over:
            self.rig.step([Op(Kind.SWAP_IN, victim)], self.fault(), self.meanwhile())

    def release(self) -> None:
        if self.seqs:
            self.rig.release(self.rng.choice(list(self.seqs)), self.fault())

    def end_epoch(self) -> None:
        self.rig.end_epoch(self.rng, self.fault())

    def keep_house(self) -> None:
        chores = CHORES + STORING * self.rig.persists
        self.rig.keep_house(self.rng.choice(chores), self.rng, self.fault())

    def alone(self) -> None:
        """Whatever was left parked, spare, cached or waiting: pages for one are pages for one."""
        if self.seqs or not self.rig.is_exact:
            return
        shape, rig = self.rig.shape, self.rig
        rig.drain()
        pages = shape.pages_for(shape.max_len + shape.read_slack) + shape.null_page
        rig.set_limit(pages + self.has_state)
        seq = rig.open(paged=self.rng.random() < 0.5, private=True)
        assert seq is not None
        assert rig.step([Op(Kind.GROW, seq, shape.max_len)])
