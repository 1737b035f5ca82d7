"""Blocks in files: what is read is what was put, whatever happens to the files.

Ten thousand kills at every byte that is written, and hundreds of real ones:
VMSERVE_STORE_KILLS=10000 pytest tests/memory/test_file_store.py -k kill --timeout=0
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest

from vmserve import _core

KILLS = int(os.environ.get("VMSERVE_STORE_KILLS", "0"))
HEADER_BYTES = 112
SPACE = bytes(range(32))
BLOCK_BYTES = 40
BLOCKS = {bytes([i]) * 32: random.Random(i).randbytes(BLOCK_BYTES) for i in range(1, 13)}
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


def open_store(
    path: Path, limit: int = 1 << 20, ops: _core.FileOps | None = None
) -> _core.PageStore:
    (path / "s").mkdir(parents=True, exist_ok=True)
    return _core.StoreDirectory(str(path), limit, ops).space("s", SPACE)


def file_of(path: Path, digest: bytes) -> Path:
    return path / "s" / f"{digest.hex()}.kv"


def found(store: _core.PageStore) -> set[bytes]:
    """The blocks that are found, each with its own content."""
    digests = set()
    for digest, content in BLOCKS.items():
        got = store.get(digest, BLOCK_BYTES)
        assert got in (None, content)
        if got is not None:
            digests.add(digest)
    return digests


def test_a_block_comes_back_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    [(digest, content), (other, _), *_] = BLOCKS.items()
    assert store.get(digest, BLOCK_BYTES) is None
    assert store.put(digest, content)
    os.utime(file_of(tmp_path, digest), (1, 1))
    assert store.put(digest, content)  # it is there: not written again, and used
    assert file_of(tmp_path, digest).stat().st_mtime > 1
    assert store.has(digest)
    assert not store.has(other)
    assert open_store(tmp_path).get(digest, BLOCK_BYTES) == content
    [file] = (tmp_path / "s").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert store.stats()["written_bytes"] == FILE_BYTES == file.stat().st_size
    assert store.take_message() == ""


def test_checksums_are_those_of_a_table() -> None:
    rng = random.Random(1)
    for size in (*range(70), 4096, 12_345):
        data = rng.randbytes(size)
        assert _core.checksum(data) == _core.checksum(data, by_table=True)
    # RFC 3720, B.4: CRC-32C of 32 bytes of zeros, and of ones: each lane has as many.
    assert _core.checksum(bytes(128)) == bytes.fromhex("aa36918a") * 4
    assert _core.checksum(bytes([0xFF]) * 128) == bytes.fromhex("43aba862") * 4


@pytest.mark.parametrize("kind", ["bits", "lengths"])
def test_every_flipped_bit_and_every_other_length_is_found(tmp_path: Path, kind: str) -> None:
    store = open_store(tmp_path)
    digest, content = next(iter(BLOCKS.items()))
    store.put(digest, content)
    file = file_of(tmp_path, digest)
    whole = file.read_bytes()
    assert _core.verify_file(str(file)) == ""
    places = range(len(whole))
    broken = [whole[:size] for size in places] + [whole + b"\0", whole * 2]
    if kind == "bits":
        flips = [(at, 1 << bit) for at in places for bit in range(8)]
        broken = [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :] for at, bit in flips]
    for damaged in broken:
        file.write_bytes(damaged)
        assert _core.verify_file(str(file)) != ""
        assert store.get(digest, BLOCK_BYTES) is None
        assert not file.exists()  # it is computed and written again
    assert store.stats()["broken_blocks"] == len(broken)
    assert "was dropped and is computed again" in store.take_message()
    assert store.take_message() == ""  # told once


def test_a_file_of_another_block_space_or_size_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    [(digest, content), (other, _), *_] = BLOCKS.items()
    store.put(digest, content)
    file = file_of(tmp_path, digest)
    moved = file_of(tmp_path, other)
    moved.write_bytes(file.read_bytes())
    assert _core.verify_file(str(moved)) == "it has another block's name"
    assert store.get(other, BLOCK_BYTES) is None
    foreign = _core.StoreDirectory(str(tmp_path), 1 << 20).space("s", bytes(32))
    assert foreign.get(digest, BLOCK_BYTES) is None
    assert not file.exists()
    for size in (BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2 * BLOCK_BYTES):
        store.put(digest, content)
        assert store.get(digest, size) is None
    file.symlink_to(tmp_path / "elsewhere")
    assert store.get(digest, BLOCK_BYTES) is None


def test_the_oldest_go_first_and_a_hit_is_a_use(tmp_path: Path) -> None:
    limit = 8 * FILE_BYTES
    store = open_store(tmp_path, limit)
    digests = list(BLOCKS)
    for age, digest in enumerate(digests[:8]):
        store.put(digest, BLOCKS[digest])
        long_ago = time.time() - 1000 + age
        os.utime(file_of(tmp_path, digest), (long_ago, long_ago))
    assert store.get(digests[0], BLOCK_BYTES) is not None
    store.put(digests[8], BLOCKS[digests[8]])
    kept = {digest for digest in digests if file_of(tmp_path, digest).exists()}
    assert kept == {digests[0], *digests[3:9]}  # an eighth of the limit is free again
    assert store.stats()["evicted_blocks"] == 2
    assert store.stats()["bytes"] == 7 * FILE_BYTES


def test_two_engines_share_a_directory_and_its_limit(tmp_path: Path) -> None:
    limit = 8 * FILE_BYTES
    first, second = open_store(tmp_path, limit), open_store(tmp_path, limit)
    for number, (digest, content) in enumerate(BLOCKS.items()):
        assert (first, second)[number % 2].put(digest, content)
        assert (second, first)[number % 2].get(digest, BLOCK_BYTES) == content
    held = sum(file.stat().st_size for file in (tmp_path / "s").iterdir())
    assert held <= limit


def test_stores_write_to_files_of_their_own_until_a_block_is_whole(tmp_path: Path) -> None:
    """Those of one process, or of processes of one number in several containers."""
    for digest, content in list(BLOCKS.items())[:2]:
        ops = _core.FaultFileOps()
        store = open_store(tmp_path, ops=ops)
        ops.kill_after(FILE_BYTES)
        assert not store.put(digest, content)
    assert len(list((tmp_path / "s").glob(".*.tmp"))) == 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_system_that_refuses_writes_costs_nothing_but_what_is_not_kept(
    tmp_path: Path, error: int
) -> None:
    ops = _core.FaultFileOps()
    store = open_store(tmp_path, ops=ops)
    [(digest, content), (other, another), *_] = BLOCKS.items()
    assert store.put(digest, content)
    ops.refuse_writes(error)
    assert not store.put(other, another)
    assert store.get(digest, BLOCK_BYTES) == content  # reading goes on
    assert os.strerror(error) in store.take_message()
    ops.refuse_writes(0)
    assert not store.put(other, another)  # not tried again at once
    assert store.stats()["refused_writes"] == 2
    assert found(open_store(tmp_path)) == {digest}


def test_a_disk_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    ops = _core.FaultFileOps()
    store = open_store(tmp_path, ops=ops)
    digest, content = next(iter(BLOCKS.items()))
    store.put(digest, content)
    ops.refuse_reads(errno.EIO)
    assert store.get(digest, BLOCK_BYTES) is None
    assert "Input/output error" in store.take_message()
    ops.refuse_reads(0)
    assert store.get(digest, BLOCK_BYTES) == content  # it was not removed for that


def _write_all(store: _core.PageStore) -> None:
    for digest, content in BLOCKS.items():
        store.put(digest, content)


@pytest.mark.slow
def test_a_kill_at_any_byte_of_any_write_loses_blocks_and_never_changes_one(tmp_path: Path) -> None:
    """Twelve blocks under a limit of eight: opening, each byte, renames and evictions."""
    limit = 8 * FILE_BYTES
    ops = _core.FaultFileOps()
    _write_all(open_store(tmp_path / "whole", limit, ops))
    num_points = ops.num_changes + 1
    assert num_points > 12 * (FILE_BYTES + 2)
    rng = random.Random(79)
    points = [rng.randrange(num_points) for _ in range(max(0, KILLS - num_points))]
    points += range(num_points)
    most = 0
    for number, point in enumerate(points):
        directory = tmp_path / str(number)
        ops = _core.FaultFileOps()
        ops.kill_after(point)
        _write_all(open_store(directory, limit, ops))
        after = open_store(directory, limit)
        whole = found(after)
        assert after.stats()["broken_blocks"] == 0  # a name appears with its content, or not at all
        most = max(most, len(whole))
        if number % 50 == 0:  # life goes on
            _write_all(after)
            assert list(BLOCKS)[-1] in found(after)
        for file in (directory / "s").iterdir():
            file.unlink()
    assert most == 8


@pytest.mark.parametrize("num_kills", [max(30, KILLS // 20)])
@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_blocks(tmp_path: Path, num_kills: int) -> None:
    """One store over all kills: what each left is there for the next."""
    rng = random.Random(9)
    num_written = 0
    for kill in range(num_kills):
        child = os.fork()
        if child == 0:
            store = open_store(tmp_path, 8 * FILE_BYTES)
            while True:
                _write_all(store)
        while kill == 0 and not found(open_store(tmp_path, 8 * FILE_BYTES)):
            time.sleep(0.001)  # on a busy machine it may take long to begin
        time.sleep(rng.random() * 0.004)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        after = open_store(tmp_path, 8 * FILE_BYTES)
        num_written += len(found(after))
        assert after.stats()["broken_blocks"] == 0
    assert num_written > 0


def test_what_a_killed_process_was_writing_goes_after_a_while(tmp_path: Path) -> None:
    _write_all(open_store(tmp_path))
    old, young = tmp_path / "s" / ".1-1.tmp", tmp_path / "s" / ".1-2.tmp"
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    open_store(tmp_path)
    assert (old.exists(), young.exists()) == (False, True)
