"""Random operations against a model: page ids, contents, limits and the laws after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.memory.support import GROUPS, PAGE_TOKENS, make_memory
from vmserve._core import ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

NUM_SLOTS, MAX_LEN, MAX_PAGES = 4, 20, 24


@dataclass
class ModelSlot:
    #: Byte of each token; None where the sequence never wrote.
    tokens: list[int | None] = field(default_factory=list)
    tenant: int = 0
    pages: list[int] = field(default_factory=list)


class Model:
    """What the memory must do, in a few lines of sets and lists."""

    def __init__(self, limit: int, grow_pages: int) -> None:
        self.limit = limit
        self.grow_pages = grow_pages
        self.free: set[int] = set()
        self.committed: set[int] = set()
        self.slots: dict[int, ModelSlot] = {}

    @property
    def available(self) -> int:
        return max(0, self.limit - (len(self.committed) - len(self.free)))

    def missing(self, slot: int, num_tokens: int) -> int:
        return max(0, -(-num_tokens // PAGE_TOKENS) - len(self.slots[slot].pages))

    def reserve(self, count: int) -> None:
        deficit = count - len(self.free)
        if deficit > 0:
            chunk = min(max(deficit, self.grow_pages), self.limit - len(self.committed))
            absent = sorted(set(range(MAX_PAGES)) - self.committed)[:chunk]
            self.committed.update(absent)
            self.free.update(absent)

    def append_page(self, slot: ModelSlot, previous: int | None) -> None:
        adjacent = None if previous is None else previous + 1
        page = adjacent if adjacent in self.free else min(self.free)
        assert page is not None
        self.free.remove(page)
        slot.pages.append(page)

    def grow(self, growths: list[tuple[int, int]]) -> None:
        final = {slot: max(n for s, n in growths if s == slot) for slot, _ in growths}
        self.reserve(sum(self.missing(slot, n) for slot, n in final.items()))
        for slot_id, num_tokens in final.items():
            slot = self.slots[slot_id]
            for _ in range(self.missing(slot_id, num_tokens)):
                self.append_page(slot, slot.pages[-1] if slot.pages else None)
            slot.tokens += [None] * (num_tokens - len(slot.tokens))

    def release(self, slot: int) -> None:
        pages = self.slots.pop(slot).pages
        others = {page for other in self.slots.values() for page in other.pages}
        self.free.update(set(pages) - others)
        self.trim(max(0, len(self.committed) - self.limit))

    def trim(self, count: int) -> int:
        given_back = sorted(self.free, reverse=True)[:count]
        self.free.difference_update(given_back)
        self.committed.difference_update(given_back)
        return len(given_back)

    def fork(self, src: int, num_tokens: int) -> ModelSlot:
        source = self.slots[src]
        whole, partial = divmod(num_tokens, PAGE_TOKENS)
        fork = ModelSlot(source.tokens[:num_tokens], source.tenant, source.pages[:whole])
        if partial:
            self.reserve(1)
            self.append_page(fork, None)
        return fork


class MemoryMachine(RuleBasedStateMachine):
    @initialize(
        limit=st.integers(3, 16),
        grow_pages=st.integers(1, 5),
        shadow=st.booleans(),
        policy=st.sampled_from([ZeroPolicy.ALWAYS, ZeroPolicy.TENANT]),
    )
    def start(self, limit: int, grow_pages: int, shadow: bool, policy: ZeroPolicy) -> None:
        self.memory = make_memory(
            num_slots=NUM_SLOTS,
            max_len=MAX_LEN,
            limit_pages=limit,
            max_pages=MAX_PAGES,
            grow_pages=grow_pages,
            zero_policy=policy,
        )
        self.shadow = shadow
        if shadow:
            self.memory.core.shadow_buffer(0)
        self.model = Model(limit, grow_pages)
        self.policy = policy
        self.num_written = 0

    def used(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model.slots)), label="slot")

    @rule(tenant=st.integers(0, 2))
    def alloc(self, tenant: int) -> None:
        slot = self.memory.core.alloc_slot(tenant)
        unused = sorted(set(range(NUM_SLOTS)) - set(self.model.slots))
        assert slot == (unused[0] if unused else None)
        if slot is not None:
            self.memory.slots.add(slot)
            self.model.slots[slot] = ModelSlot(tenant=tenant)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data(), fail_call=st.one_of(st.none(), st.integers(1, 12)))
    def grow(self, data: st.DataObject, fail_call: int | None) -> None:
        growths = [
            (self.used(data), data.draw(st.integers(0, MAX_LEN), label="tokens"))
            for _ in range(data.draw(st.integers(1, 3), label="growths"))
        ]
        final = {slot: max(n for s, n in growths if s == slot) for slot, _ in growths}
        expected = sum(self.model.missing(slot, n) for slot, n in final.items())
        needed, available, version = self.memory.core.plan(growths)
        assert (needed, available) == (expected, self.model.available)
        if needed > available:
            return
        if fail_call is not None:
            before = self.memory.state(totals=True)
            self.memory.faults.arm(fail_call)
            try:
                self.memory.core.apply(growths, version)
            except (DriverError, OutOfMemoryError):
                assert self.memory.state(totals=True) == before
                return
            finally:
                self.memory.faults.disarm()
            # The chunk was refused and the bare need was granted, or the call was never made.
            self.sync_chunk(expected)
        else:
            self.memory.core.apply(growths, version)
        self.model.grow(growths)

    def sync_chunk(self, needed: int) -> None:
        committed = self.memory.stat("committed_pages")
        if committed == len(self.model.committed) + max(0, needed - len(self.model.free)):
            grow_pages, self.model.grow_pages = self.model.grow_pages, 1
            self.model.reserve(needed)
            self.model.grow_pages = grow_pages

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Every token that the slot has not written yet, as a sequence does."""
        slot = self.used(data)
        model = self.model.slots[slot]
        for position, token in enumerate(model.tokens):
            if token is not None:
                continue
            byte = 40 * model.tenant + self.num_written % 40 + 1  # it tells the tenant
            for group in range(GROUPS):
                row = self.memory.tokens(slot, group, position, position + 1)
                before = int(row[0, 0])
                assert (row == before).all()
                own = (before ^ group * 128) - 1 in range(40 * model.tenant, 40 * model.tenant + 40)
                assert before == 0 or (own and self.policy is ZeroPolicy.TENANT)
                row[:] = byte ^ group * 128
            model.tokens[position] = byte
            self.num_written += 1

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.used(data)
        self.memory.release(slot)
        self.model.release(slot)

    @precondition(lambda self: self.model.slots)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src = self.used(data)
        # Only what is written can be shared: whole pages are read-only from here on.
        tokens = self.model.slots[src].tokens
        written = tokens.index(None) if None in tokens else len(tokens)
        num_tokens = data.draw(st.integers(0, written), label="tokens")
        if len(self.model.slots) == NUM_SLOTS:
            assert self.memory.core.fork_slot(src, num_tokens) is None
            return
        if num_tokens % PAGE_TOKENS and self.model.available == 0:
            before = self.memory.state(totals=True)
            try:
                self.memory.core.fork_slot(src, num_tokens)
            except OutOfMemoryError:
                assert self.memory.state(totals=True) == before
                return
            raise AssertionError("forked without a page for the copy")
        fork = self.memory.fork(src, num_tokens)
        self.model.slots[fork] = self.model.fork(src, num_tokens)

    @rule(keep=st.integers(0, 4))
    def trim(self, keep: int) -> None:
        expected = self.model.trim(max(0, len(self.model.free) - keep))
        assert self.memory.core.trim(keep) == expected

    @rule(limit=st.integers(1, MAX_PAGES))
    def set_limit(self, limit: int) -> None:
        self.memory.core.set_limit(limit)
        self.model.limit = limit
        self.model.trim(max(0, len(self.model.committed) - limit))

    @invariant()
    def the_laws_hold(self) -> None:
        self.memory.core.check()

    @invariant()
    def pages_are_as_in_the_model(self) -> None:
        model = self.model
        stats = self.memory.core.stats()
        assert stats.committed_pages == len(model.committed)
        assert stats.free_pages == len(model.free)
        assert stats.memfd_allocated_bytes == len(model.committed) * stats.page_bytes
        pages = [page for slot in model.slots.values() for page in slot.pages]
        assert stats.used_pages == len(set(pages))
        assert stats.shared_pages == sum(pages.count(page) > 1 for page in set(pages))
        assert stats.used_tokens == sum(len(slot.tokens) for slot in model.slots.values())
        assert stats.quarantined_pages == stats.pending_repairs == 0
        for slot_id, slot in model.slots.items():
            assert self.memory.table(slot_id) == slot.pages
            assert self.memory.core.slot_length(slot_id) == len(slot.tokens)

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for slot_id, slot in self.model.slots.items():
            for group in range(GROUPS):
                tokens = self.memory.tokens(slot_id, group, 0, len(slot.tokens))
                for position, byte in enumerate(slot.tokens):
                    if byte is not None:
                        assert (tokens[position] == byte ^ group * 128).all()
        if self.shadow:
            shadow = self.memory.core.shadow_buffer(0)
            for slot_id in set(range(NUM_SLOTS)) - set(self.model.slots):
                assert not shadow[slot_id].any()


TestMemory = MemoryMachine.TestCase
if settings.get_current_profile_name() != "thorough":
    # A slice that is the same on every run: a trap ends the process and could not be replayed.
    TestMemory.settings = settings(
        max_examples=60,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
