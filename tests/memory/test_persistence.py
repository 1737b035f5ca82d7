"""Blocks that outlive their memory: what a new one reads back is what the old one had computed."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.memory.kinds import KINDS, STATE, attached, do, make_kinds, opened
from tests.memory.kinds import grow as grow_kinds
from tests.memory.model_types import Kind, Op
from tests.memory.rig import Fault, Rig, as_tuple
from tests.memory.support import BLOCK_TOKENS, GROUPS, PAGE, Memory, attach, grow, make_memory
from tests.memory.support import Op as OpTuple
from vmserve import _core
from vmserve._core import MapperMode, View, ZeroPolicy

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
VIEWS = pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])


def store_in(
    path: Path, name: str = "s", limit: int = 1 << 20, ops: _core.FileOps | None = None
) -> _core.PageStore:
    (path / name).mkdir(parents=True, exist_ok=True)
    return _core.StoreDirectory(str(path), limit, ops).space(name, bytes(32))


def memory_over(path: Path, ops: _core.FileOps | None = None, **options: Any) -> Memory:
    memory = make_memory(**options)
    memory.core.persist_to([store_in(path, ops=ops)])
    return memory


def digest_of(tokens: list[int], tenant: int = 0, salt: bytes = b"") -> bytes:
    """Of the block that ends with these tokens; the same in every process."""
    digest = _core.sha256(struct.pack("<qQ", tenant, 0) + salt)
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[at : at + BLOCK_TOKENS]
        digest = _core.sha256(digest + struct.pack(f"<{BLOCK_TOKENS}i", *block))
    return digest


def compute(path: Path, tokens: list[int] = TOKENS, **options: Any) -> None:
    """A memory that computes the tokens, writes what is whole, and ends."""
    memory = memory_over(path, **options)
    memory.release(memory.start(tokens))
    assert memory.core.flush(10)
    memory.core.check()
    memory.core.close()


def hit(memory: Memory, view: View = View.VIRTUAL, tokens: list[int] = TOKENS, **whose: Any) -> int:
    """Tokens that a new sequence takes from the cache or the store, after comparing each byte."""
    seq = memory.open(tokens, view, **whose)
    matched = restored(memory, seq)
    epoch = memory.begin(attach(seq, matched), grow(seq, len(tokens)))
    assert memory.read(seq, 0, matched) == tokens[:matched]
    memory.write(seq, matched, tokens[matched:])
    memory.core.complete(epoch)
    memory.core.check()
    memory.release(seq)
    return matched


def restored(memory: Memory, seq: int, *held: OpTuple) -> int:
    """Tokens of the sequence that are cached once what is stored of them has been read."""
    if memory.core.restore(seq, held):
        memory.core.finish_restores()
    return int(memory.core.match(seq))


def files_in(path: Path) -> list[Path]:
    return sorted((path / "s").glob("*.kv"))


def file_of(path: Path, tokens: list[int]) -> Path:
    return path / "s" / f"{digest_of(tokens).hex()}.kv"


@VIEWS
@pytest.mark.parametrize("blocks_per_page", [1, 2, 4])
@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.THREAD])
def test_a_new_memory_hits_what_an_old_one_computed(
    tmp_path: Path, view: View, blocks_per_page: int, mapper: MapperMode
) -> None:
    compute(tmp_path, blocks_per_page=blocks_per_page, mapper=mapper)
    memory = memory_over(tmp_path, blocks_per_page=blocks_per_page, mapper=mapper)
    assert hit(memory, view) == 20
    assert memory.stats("persist_restored_blocks_total", "persist_written_blocks_total") == (5, 0)
    assert hit(memory, view) == 20  # now an ordinary hit
    assert memory.stat("persist_restored_blocks_total") == 5
    if view is View.VIRTUAL:
        assert memory.stat("copied_blocks_total") == 0  # its blocks lie in their pages as in slots


def test_what_is_cached_is_not_read_and_what_is_stored_continues_it(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path)
    assert hit(memory, tokens=TOKENS[:9]) == 8
    assert memory.stat("persist_restored_blocks_total") == 2
    assert hit(memory) == 20
    assert memory.stat("persist_restored_blocks_total") == 5


@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_a_broken_block_ends_the_prefix_and_is_written_again(
    tmp_path: Path, blocks_per_page: int
) -> None:
    compute(tmp_path, blocks_per_page=blocks_per_page)
    file = file_of(tmp_path, TOKENS[:12])
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    memory = memory_over(tmp_path, blocks_per_page=blocks_per_page)
    assert hit(memory) == 8
    assert memory.stat("persist_broken_blocks_total") == 1
    assert "was dropped and is computed again" in memory.core.persist_message()
    assert memory.core.flush(10)
    assert hit(memory_over(tmp_path, blocks_per_page=blocks_per_page)) == 20


def test_tenants_and_salts_never_share(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path)
    assert hit(memory, tenant=1) == 0
    assert hit(memory, salt=b"mine") == 0
    assert memory.stat("persist_read_bytes_total") == 0
    memory.core.flush(10)
    memory = memory_over(tmp_path)
    assert [hit(memory), hit(memory, tenant=1), hit(memory, salt=b"mine")] == [20, 20, 20]


@pytest.mark.parametrize("policy", [ZeroPolicy.ALWAYS, ZeroPolicy.TENANT])
def test_a_page_that_is_filled_in_part_shows_nothing_of_another_tenant(
    tmp_path: Path, policy: ZeroPolicy
) -> None:
    options: dict[str, Any] = {"blocks_per_page": 4, "zero_policy": policy, "limit_pages": 2}
    compute(tmp_path, **options)
    memory = memory_over(tmp_path, **options)
    memory.release(memory.start([77] * 31, tenant=5))  # both pages
    memory.core.trim(0, drop_idle=False)
    seq = memory.open(TOKENS[:9])
    assert restored(memory, seq) == 8
    memory.do(attach(seq, 8), grow(seq, 9))
    arena = memory.core.arena_buffer(0)[memory.pages(seq)[0]]
    assert not (arena == 77).any()
    memory.core.check()


def test_without_pages_nothing_is_read_and_no_sequence_loses_any(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path, limit_pages=6)
    running = memory.start([7] * 12)
    assert hit(memory, tokens=TOKENS[:9]) == 8
    seq = memory.open(TOKENS)
    assert not memory.core.restore(seq)  # three pages are there, and the prefix needs three more
    assert memory.read(running) == [7] * 12
    memory.core.check()


@VIEWS
def test_pages_for_a_restore_are_not_those_of_prefixes_that_start_beside_it(
    tmp_path: Path, view: View
) -> None:
    """The oldest cached prefix would go first."""
    compute(tmp_path)
    for is_beside in (True, False):
        memory = memory_over(tmp_path, limit_pages=10)
        memory.release(memory.start([7] * 12, view))  # three pages, then four
        memory.release(memory.start([8] * 16, view))
        first, second = memory.open([7] * 12 + [1], view), memory.open(TOKENS, view)
        assert memory.core.match(first) == 12
        held = [attach(first, 12)] if is_beside else []
        assert restored(memory, second, *held) == 20
        assert (memory.core.match(first) == 12) is is_beside
        ops = [attach(first, 12), attach(second, 20)]
        plan = memory.core.plan(ops)
        assert (plan.fits, plan.lost_prefixes) == (is_beside, 1 - is_beside)
        if is_beside:
            memory.core.apply(ops, plan.version)
        memory.core.check()


def test_what_has_a_blocks_name_and_is_no_file_is_a_miss(tmp_path: Path) -> None:
    """And nobody waits for what would come out of it."""
    compute(tmp_path)
    file = file_of(tmp_path, TOKENS[:8])
    for make in (os.mkfifo, os.mkdir, lambda path: path.symlink_to(tmp_path / "none")):
        file.unlink(missing_ok=True)
        make(file)
        store = store_in(tmp_path)
        digest = digest_of(TOKENS[:8])
        assert not store.has(digest)
        assert store.get(digest, GROUPS * PAGE) is None
        assert hit(memory_over(tmp_path)) == 4
        assert _core.verify_file(str(file)) != ""
        file.rmdir() if file.is_dir() else file.unlink()
    os.mkfifo(tmp_path / "s" / "1.generation")
    memory_over(tmp_path).core.clear_cache()


def test_a_block_that_is_evicted_before_it_is_written_is_not_kept(tmp_path: Path) -> None:
    memory = memory_over(tmp_path, limit_pages=6)
    memory.release(memory.start(TOKENS))
    memory.core.trim(0, drop_idle=True)
    assert memory.core.flush(10)
    assert memory.stat("persist_missed_blocks_total") == 5
    assert hit(memory_over(tmp_path)) == 0


def test_while_blocks_are_read_others_go_on(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path, mapper=MapperMode.MANUAL)
    running = memory.start([7] * 3)
    seq = memory.open(TOKENS)
    assert memory.core.restore(seq)
    assert memory.core.restore(seq)  # it is on its way: not read twice
    assert memory.core.match(seq) == 0
    assert memory.stat("held_pages") >= 5
    memory.do(grow(running, 8))
    other = memory.open(TOKENS[:9])
    assert memory.core.restore(other)  # the same blocks are coming
    assert memory.core.run_store(100) == 1
    assert not memory.core.restore(seq)
    assert memory.core.match(seq) == 20
    assert memory.core.match(other) == 8
    assert memory.stat("persist_restored_blocks_total") == 5
    assert memory.core.stats().persist_hidden_seconds_total > 0
    assert memory.core.stats().persist_wait_seconds_total == 0
    memory.core.check()


def test_a_plan_that_needs_the_pages_waits_for_them(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path, mapper=MapperMode.MANUAL, limit_pages=5)
    assert memory.core.restore(memory.open(TOKENS))
    memory.grown(20, [7] * 20)  # all five, which the other would have had
    memory.core.check()


def test_a_cleared_cache_finds_nothing_of_before_and_keeps_what_comes(tmp_path: Path) -> None:
    compute(tmp_path)
    memory = memory_over(tmp_path)
    old = files_in(tmp_path)
    assert hit(memory, tokens=TOKENS[:9]) == 8  # read, and pending in part
    memory.core.clear_cache()
    assert not files_in(tmp_path)
    assert hit(memory) == 0
    assert memory.core.flush(10)
    assert len({*files_in(tmp_path)} - {*old}) == 5
    memory.core.trim(0, drop_idle=True)
    assert hit(memory) == 20  # in this process, and in the next
    assert hit(memory_over(tmp_path)) == 20
    again = memory_over(tmp_path)
    again.core.clear_cache()
    assert hit(again) == 0


@pytest.mark.parametrize("is_running", [False, True])
def test_what_was_computed_and_not_yet_written_is_not_kept_if_the_cache_is_cleared(
    tmp_path: Path, is_running: bool
) -> None:
    memory = memory_over(tmp_path, mapper=MapperMode.MANUAL)
    seq = memory.start(TOKENS)
    if not is_running:
        memory.release(seq)
        memory.core.write_when_idle()  # copied, and not yet written
        assert memory.stat("persist_waiting_blocks") == 0
    memory.core.clear_cache()
    memory.release(*memory.seqs & {seq})
    assert memory.core.flush(10)
    assert not files_in(tmp_path)
    assert hit(memory_over(tmp_path)) == 0


def test_engines_that_clear_their_caches_together_share_what_comes(tmp_path: Path) -> None:
    compute(tmp_path)
    first, second = memory_over(tmp_path), memory_over(tmp_path)
    assert hit(second) == 20
    first.core.clear_cache()
    assert hit(second) == 20  # it was not told
    second.core.clear_cache()
    assert hit(second) == 0
    assert second.core.flush(10)
    assert hit(first) == 20


def test_a_directory_that_cannot_be_written_is_cleared_for_this_process(tmp_path: Path) -> None:
    compute(tmp_path)
    ops = _core.FaultFileOps()
    memory = memory_over(tmp_path, ops)
    ops.refuse_writes(errno.EROFS)
    memory.core.clear_cache()
    assert "will be found again after a restart" in memory.core.persist_message()
    assert hit(memory) == 0
    assert hit(memory_over(tmp_path)) == 20


def test_a_kill_at_any_point_of_a_clearing_leaves_all_of_before_or_nothing_to_find(
    tmp_path: Path,
) -> None:
    found = []
    for point in range(9):
        directory = tmp_path / str(point)
        compute(directory)
        ops = _core.FaultFileOps()
        memory = memory_over(directory, ops)
        ops.kill_after(point)
        memory.core.clear_cache()
        found.append(hit(memory_over(directory)))
    # The generation first; then five files of before.
    assert found == [20, *[0] * 8]


def test_what_is_hit_in_memory_is_used_in_the_store(tmp_path: Path) -> None:
    """The store is told at most once in a time, and at the end."""
    compute(tmp_path)
    memory = memory_over(tmp_path)
    often = make_memory()
    often.core.persist_to([store_in(tmp_path)], touch_seconds=0)

    def age() -> None:
        for file in files_in(tmp_path):
            os.utime(file, (1, 1))

    def used() -> int:
        return sum(file.stat().st_mtime > 1 for file in files_in(tmp_path))

    assert hit(memory) == 20
    age()
    assert (hit(memory), used()) == (20, 0)
    assert memory.core.flush(10)
    assert used() == 5
    assert hit(often) == 20
    age()
    assert (hit(often, tokens=TOKENS[:9]), used()) == (8, 2)


def test_a_full_disk_and_a_lost_directory_change_no_content(tmp_path: Path) -> None:
    ops = _core.FaultFileOps()
    memory = memory_over(tmp_path, ops)
    ops.refuse_writes(errno.ENOSPC)
    memory.release(memory.start(TOKENS))
    assert memory.core.flush(10)
    assert memory.stat("persist_refused_blocks_total") == 5
    assert "No space left on device" in memory.core.persist_message()
    assert hit(memory) == 20
    shutil.rmtree(tmp_path)
    memory.core.trim(0, drop_idle=True)
    assert hit(memory) == 0


def test_a_driver_that_refuses_a_copy_costs_a_block(tmp_path: Path) -> None:
    compute(tmp_path)
    for call in range(1, 30):
        memory = memory_over(tmp_path)
        memory.faults.arm(call)
        seq = memory.open(TOKENS)
        restored(memory, seq)
        memory.faults.disarm()
        memory.core.check()
        memory.release(seq)
        assert hit(memory) == 20  # what was lost is read again
    for call in range(1, 30):
        memory = make_memory()
        shutil.rmtree(tmp_path)
        memory.core.persist_to([store_in(tmp_path)])
        first = memory.start(TOKENS)
        memory.faults.arm(call)
        memory.core.flush(10)
        memory.faults.disarm()
        assert memory.read(first) == TOKENS
        memory.core.check()
        assert hit(memory_over(tmp_path)) in (0, 20)


def test_copies_beside_kernels_pin_blocks_until_they_end(tmp_path: Path) -> None:
    memory = memory_over(tmp_path, mapper=MapperMode.MANUAL, late_copies=True, limit_pages=8)
    seq = memory.start(TOKENS)
    memory.do(grow(seq, 22))  # copies what the step before has published
    assert memory.stat("copying_blocks") == 5
    memory.release(seq)
    memory.core.complete(memory.core.begun_epoch)
    assert memory.stat("waiting_pages") > 0
    memory.core.check()
    memory.faults.run_copies(100)
    assert memory.stat("copying_blocks") == 0
    memory.core.run_store(100)
    memory.core.check()
    assert hit(memory_over(tmp_path, late_copies=True)) == 20


def test_bad_uses_are_refused(tmp_path: Path) -> None:
    for cannot in (memory_over(tmp_path), make_memory(prefix_caching=False)):
        with pytest.raises(ValueError, match="takes stores once"):
            cannot.core.persist_to([store_in(tmp_path)])
    with pytest.raises(ValueError, match="a store is missing"):
        make_memory().core.persist_to([None])


def test_a_cache_cleared_before_it_has_a_store_finds_what_it_stores(tmp_path: Path) -> None:
    memory = make_memory()
    memory.core.clear_cache()
    memory.core.persist_to([store_in(tmp_path)])
    memory.release(memory.start(TOKENS))
    assert memory.core.flush(10)
    assert hit(memory_over(tmp_path)) == 20


# -- several kinds of layers


def run_kinds(rig: Rig, tokens: list[int], *, paged: bool, chunk: int = 8) -> int:
    """Attach what there is, compute the rest in chunks; every byte is compared."""
    seq = opened(rig, tokens, paged=paged)
    rig.restore(seq)
    rig.core.finish_restores()
    for model in rig.oracle.kinds:  # an earlier life has published them
        model.may_match |= {model.seqs[seq].key(end) for end in range(len(tokens))}
    ops = attached(rig, seq)
    matched = sum(op.num_tokens for op in ops)
    # States are published at the multiples of 8, and at the end of the last whole block.
    ends = {*range(chunk, len(tokens), chunk), (len(tokens) - 1) // 4 * 4, len(tokens)}
    for to in sorted(end for end in ends if end > matched):
        do(rig, *ops, grow_kinds(seq, to))
        ops = []
    rig.release(seq)
    return matched


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.THREAD])
def test_windows_and_states_come_back_with_the_rest(
    tmp_path: Path, paged: bool, has_state: bool, mapper: MapperMode
) -> None:
    tokens = list(range(1, 30))
    for expected in (0, 28):
        rig = kinds_over(tmp_path, has_state=has_state, mapper=mapper)
        assert run_kinds(rig, tokens, paged=paged) == expected
        assert rig.core.flush(10)
        restored = [stats.persist_restored_blocks_total for stats in rig.core.kind_stats()]
        assert rig.core.stats().persist_restored_blocks_total == sum(restored)
        rig.core.close()
    # Of windows no more than the next query sees: of 6 positions 23 to 28, of 11 18 to 28.
    assert restored == [7, 2, 3, 1][: STATE + has_state]


def kinds_over(path: Path, *, has_state: bool = True, **options: Any) -> Rig:
    options = {"limit_pages": 32, "num_slots": 4} | options
    return make_kinds(has_state=has_state, files=path, **options)


@pytest.mark.parametrize("paged", [False, True])
def test_pages_for_a_restore_of_kinds_are_not_those_of_prefixes_beside_it(
    tmp_path: Path, paged: bool
) -> None:
    first, second = [7] * 29, list(range(1, 30))
    rig = kinds_over(tmp_path)
    run_kinds(rig, second, paged=paged)
    assert rig.core.flush(10)
    for is_beside in (True, False):
        rig = kinds_over(tmp_path, limit_pages=9)
        run_kinds(rig, first, paged=paged)
        run_kinds(rig, [8] * 9, paged=paged)
        seqs = [opened(rig, tokens, paged=paged) for tokens in (first, second)]
        assert rig.match(seqs[0]) == 28
        ops = [Op(Kind.ATTACH, seqs[0], 28)]
        rig.restore(seqs[1], ops if is_beside else [])
        rig.core.finish_restores()
        assert (rig.core.match(seqs[0]) == 28) is is_beside
        plan = rig.core.plan([as_tuple(op) for op in ops])
        assert (plan.fits, plan.lost_prefixes) == (is_beside, 1 - is_beside)
        assert rig.core.open_seqs() == seqs
        rig.core.check()


@pytest.mark.parametrize("kind", range(len(KINDS) + 1))
def test_a_block_that_one_kind_lacks_shortens_the_prefix_of_all(tmp_path: Path, kind: int) -> None:
    tokens = list(range(1, 30))
    rig = kinds_over(tmp_path)
    run_kinds(rig, tokens, paged=True)
    rig.core.flush(10)
    shutil.rmtree(tmp_path / str(kind))
    rig = kinds_over(tmp_path)
    assert run_kinds(rig, tokens, paged=True) == 0
    assert rig.core.stats().persist_read_bytes_total == 0
    rig.core.flush(10)
    assert run_kinds(kinds_over(tmp_path), tokens, paged=True) == 28


def test_a_refusal_when_a_restore_begins_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its pages come back, and the blocks are found when they are asked for again."""
    tokens = list(range(1, 30))
    rig = kinds_over(tmp_path, blocks_per_page=2)
    run_kinds(rig, tokens, paged=True)
    assert rig.core.flush(10)
    refused: set[str] = set()
    for call in range(1, 9):
        rig = kinds_over(tmp_path, blocks_per_page=2, limit_pages=8)
        other = rig.open(tenant=1, paged=True, private=True)
        assert other is not None
        do(rig, grow_kinds(other, 40))
        rig.release(other)  # its pages hold what nobody else may see
        seq = opened(rig, tokens)
        rig.restore(seq, fault=Fault(call))
        rig.release(seq)
        rig.core.finish_restores()
        refused |= {*rig.parts[0].faults.num_refused}
        rig.trim(0, drop_idle=True)
        assert rig.committed_bytes() == 0
        assert run_kinds(rig, tokens, paged=True) == 28
        rig.give_everything_back()
    assert "zero" in refused
