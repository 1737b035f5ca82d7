"""The host's plan: every pair of a new token and a key that it sees, exactly once."""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmserve.attention.cuda import params
from vmserve.attention.cuda.backend import _Limits
from vmserve.attention.cuda.plan import (
    APPEND_COSTS,
    APPEND_ROWS,
    DECODE_COSTS,
    DECODE_ROWS,
    ITEM_FIELDS,
    Costs,
    CudaPlan,
    Heads,
    Resident,
    SharedPrefix,
    Step,
    choose_chunks,
    chunk_limit,
    find_shared_prefixes,
    item_limit,
    make_plan,
)
from vmserve.attention.cuda.variant import (
    HEAD_DIMS,
    PART_TOKENS,
    TILE_TOKENS,
    append_rows,
    architecture,
    sizes_for,
)
from vmserve.errors import UnsupportedError

H100 = Resident(264, 264)


def step_of(past: list[int], new: list[int]) -> Step:
    count = np.array(new, np.int64)
    rows = np.arange(len(new))[::-1] + 3
    return Step(rows, np.array(past, np.int64), count, np.cumsum(count) - count)


def items_of(plan: CudaPlan) -> list[tuple[int, dict[str, int]]]:
    """Rows of a tile that the kernel has, and the item's fields by name."""
    return [
        (rows, dict(zip(ITEM_FIELDS, item.tolist(), strict=True)))
        for rows, items in ((DECODE_ROWS, plan.decode), (APPEND_ROWS, plan.append))
        for item in items
    ]


def lengths_of(plan: CudaPlan) -> list[int]:
    """Keys of each item of the decodes."""
    return (plan.decode[:, 4] - plan.decode[:, 3]).tolist()


def tokens_of(plan: CudaPlan, item: dict[str, int]) -> list[int]:
    first, count = item["token"], item["num_tokens"]
    if first >= 0:
        return list(range(first, first + count))
    return plan.lists[-1 - first : -1 - first + count].tolist()


@st.composite
def steps(draw: st.DrawFn) -> tuple[Step, list[SharedPrefix]]:
    past = draw(st.lists(st.integers(0, 200) | st.integers(1000, 9000), min_size=1, max_size=6))
    one = st.just(1) | st.integers(1, 80)
    new = draw(st.lists(one, min_size=len(past), max_size=len(past)))
    members = draw(st.lists(st.sampled_from(range(len(past))), unique=True, max_size=4))
    most = min((past[i] // PART_TOKENS for i in members), default=0)
    shared = PART_TOKENS * draw(st.integers(1, most)) if most else 0
    return step_of(past, new), [SharedPrefix(tuple(members), shared)] if most else []


RESIDENT = st.sampled_from([Resident(1, 1), Resident(16, 8), H100])


@settings(max_examples=150, deadline=None)
@given(
    step_and_prefixes=steps(),
    heads=st.builds(Heads, st.sampled_from([1, 2, 8]), st.integers(1, 16), st.just(APPEND_ROWS)),
    window=st.none() | st.integers(1, 5000),
    resident=RESIDENT,
)
def test_a_plan_covers_each_visible_pair_once(step_and_prefixes, heads, window, resident):
    step, prefixes = step_and_prefixes
    new = step.num_new
    plan = make_plan(step, heads, resident, window, prefixes)
    sequence = np.repeat(np.arange(len(new)), new)
    position = np.arange(sum(new)) - np.repeat(step.starts - step.num_past, new)
    rows_of_prefix = {int(step.rows[m]) for p in prefixes for m in p.members}
    # Keys that each token's items cover, as intervals; and the first part of each and their number.
    covered: dict[int, list[tuple[int, int]]] = {token: [] for token in range(sum(new))}
    parts: dict[int, list[tuple[int, int]]] = {token: [] for token in range(sum(new))}
    for rows, item in items_of(plan):
        tokens = tokens_of(plan, item)
        assert 0 < len(tokens) * heads.group <= rows
        begin, end = item["kv_begin"], item["kv_end"]
        assert begin % TILE_TOKENS == 0
        assert begin < end
        in_item = -(-end // PART_TOKENS) - begin // PART_TOKENS
        assert rows == DECODE_ROWS or in_item == 1 or plan.needs_scratch
        at = [int(position[token]) for token in tokens]
        assert (item["min_position"], item["max_position"]) == (min(at), max(at))
        if item["token"] < 0:
            assert item["row"] in rows_of_prefix
            assert item["kv_end"] <= min(prefixes[0].num_tokens, min(at))
        else:
            assert item["row"] == step.rows[sequence[tokens[0]]]
            assert at == list(range(at[0], at[0] + len(at)))
        for token in tokens:
            covered[token].append((begin, end))
            parts[token].append((item["part"], in_item))
    for token, intervals in covered.items():
        in_order = sorted(intervals)
        seen = int(position[token])
        first = 0 if window is None else max(0, seen + 1 - window)
        assert in_order[0][0] <= first
        assert in_order[-1][1] > seen
        # They adjoin, except at a gap of keys that the window hides.
        for (_, end), (begin, _) in itertools.pairwise(in_order):
            assert end == begin or (end < begin <= first)
            assert end % PART_TOKENS == 0
        # In the order of their keys.
        expected = 0
        for _, (index, count) in sorted(zip(intervals, parts[token], strict=True)):
            assert index == expected
            expected += count
    check_parts(plan, parts)


@settings(max_examples=60, deadline=None)
@given(
    new=st.lists(st.just(1) | st.integers(1, 90), min_size=1, max_size=8),
    past=st.integers(PART_TOKENS, 40_000),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.integers(1, 16),
    shared=st.booleans(),
    resident=RESIDENT,
    head_dim=st.sampled_from(HEAD_DIMS),
)
def test_the_room_for_parts_in_a_plan_of_a_fixed_size_is_enough(
    new, past, kv_heads, group, shared, resident, head_dim
):
    step = step_of([past] * len(new), new)
    prefix = SharedPrefix(tuple(range(len(new))), past // PART_TOKENS * PART_TOKENS)
    heads = Heads(kv_heads, group, append_rows(head_dim))
    plan = make_plan(step, heads, resident, None, [prefix] if shared else [])
    limits = (chunk_limit(resident.decode, kv_heads), chunk_limit(resident.append, kv_heads))
    room = _Limits(len(new), sum(new), max(new), past + 90, shared)
    assert plan.num_parts <= room.parts(group, head_dim, limits)
    assert room.may_append(group) or not len(plan.append)
    most = sum(new) * (2 if shared else 1)
    assert len(plan.decode) <= item_limit(most, limits[0])
    assert len(plan.append) <= item_limit(most, limits[1])


def check_parts(plan: CudaPlan, parts: dict[int, list[tuple[int, int]]]) -> None:
    """Parts of a token in several items have places of their own, and are combined."""
    split = {int(token): (int(start), int(count)) for token, start, count, _ in plan.split}
    used: Counter[int] = Counter()
    for token, of_token in parts.items():
        start = int(plan.part_starts[token])
        if len(of_token) == 1:
            assert start == -1
            assert token not in split
            continue
        num_parts = sum(count for _, count in of_token)
        assert split[token] == (start, num_parts)
        used.update(range(start, start + num_parts))
    assert sorted(used) == list(range(plan.num_parts))
    assert all(count == 1 for count in used.values())


def test_a_short_step_is_one_item_for_each_tile() -> None:
    plan = make_plan(step_of([9, 0], [1, 20]), Heads(2, 4), H100)
    assert plan.decode.tolist() == [[4, 0, 1, 0, 10, 0, 9, 9]]
    assert plan.append.tolist() == [[3, 17, 4, 0, 20, 0, 16, 19], [3, 1, 16, 0, 16, 0, 0, 15]]
    assert plan.num_parts == 0
    assert not len(plan.split)
    assert plan.part_starts.tolist() == [-1] * 21


def test_long_sequences_are_split_and_many_are_not() -> None:
    alone = make_plan(step_of([8191], [1]), Heads(8, 4), H100)
    assert lengths_of(alone) == [512] * 16
    assert alone.num_parts == 16
    many = make_plan(step_of([999] * 64, [1] * 64), Heads(8, 4), H100)
    assert len(many.decode) == 64
    one_long = make_plan(step_of([999] * 15 + [131071], [1] * 16), Heads(8, 4), H100)
    lengths = lengths_of(one_long)
    assert lengths[0] <= 8192
    assert lengths == sorted(lengths, reverse=True), "the longest first"


@pytest.mark.parametrize("costs", [DECODE_COSTS, APPEND_COSTS])
def test_chunks_stay_within_the_limit(costs: Costs) -> None:
    lengths, parts = np.full(40, 100_000), np.full(40, 196)
    room = costs._replace(parts_per_item=1000)
    chunks = choose_chunks(lengths, parts, 8, 264, room)
    assert chunks.min() < 196
    assert (-(-parts // chunks)).sum() <= chunk_limit(264, 8)
    none = choose_chunks(lengths, parts, 8, 264, costs._replace(parts_per_item=1))
    assert (none == 196).all(), "more parts than there is room for"
    assert choose_chunks(np.array([100]), np.array([1]), 8, 264, costs).tolist() == [1]


def time_of(plan: CudaPlan, kv_heads: int, blocks: int) -> float:
    """Keys that the device, of so many equal blocks, would have the time for, of those it has.

    Blocks take the next item when they are done; fewer of them share what the memory gives, up to
    twice as much for each.
    """
    waiting = np.repeat(lengths_of(plan), kv_heads).tolist()[::-1]
    total = sum(waiting)
    running: list[float] = []  # by when they end, in keys of a block that runs all the time
    now = time = 0.0
    while waiting or running:
        while waiting and len(running) < blocks:
            heapq.heappush(running, now + waiting.pop())
        time += (running[0] - now) * max(len(running) / blocks, 0.5)
        now = heapq.heappop(running)
    return time * blocks / total


@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize(
    ("seqs", "tokens"),
    [
        (1, 32768), (1, 131072), (2, 65536), (3, 65536), (5, 32768), (7, 65536), (8, 8192),
        (8, 32768), (8, 131072), (12, 32768), (20, 16384), (24, 32768), (32, 8192), (33, 8192),
        (36, 8192), (40, 8192), (40, 32768), (48, 4096), (66, 4096), (80, 8192), (100, 8192),
        (128, 32768), (140, 4096), (256, 8192),
    ],
)  # fmt: skip
def test_items_of_equal_sequences_keep_all_blocks_busy(
    seqs: int, tokens: int, kv_heads: int
) -> None:
    step = step_of([tokens - 1] * seqs, [1] * seqs)
    plan = make_plan(step, Heads(kv_heads, 32 // kv_heads), H100)
    assert time_of(plan, kv_heads, H100.decode) < (1.06 if tokens > 8192 else 1.1)


@pytest.mark.parametrize("seed", range(8))
def test_items_of_sequences_of_any_length_keep_nearly_all_blocks_busy(seed: int) -> None:
    random = np.random.default_rng(seed)
    seqs = int(random.integers(4, 160))
    past = (2 ** random.uniform(9, 15, seqs)).astype(int).tolist()
    plan = make_plan(step_of(past, [1] * seqs), Heads(8, 4), H100)
    assert time_of(plan, 8, H100.decode) < 1.12


def test_only_what_whole_waves_leave_is_split() -> None:
    """Of 40 sequences, 33 at a time: the sums of seven are combined, not those of all."""
    plan = make_plan(step_of([8191] * 40, [1] * 40), Heads(8, 4), H100)
    assert len(plan.split) == 7
    assert plan.num_parts == 7 * 16
    lengths = lengths_of(plan)
    assert lengths[:33] == [8192] * 33
    assert max(lengths[33:]) <= 4096


def test_a_window_clips_what_is_read() -> None:
    """A prefix that it left behind, too."""
    plan = make_plan(step_of([9999], [1]), Heads(8, 4), H100, window=1000)
    assert plan.decode[:, 3].min() == 9000 // TILE_TOKENS * TILE_TOKENS
    assert plan.decode[:, 4].max() == 10000
    prefix = [SharedPrefix((0, 1), 512)]
    plan = make_plan(step_of([5000, 6000], [1, 1]), Heads(1, 4), Resident(1, 1), 100, prefix)
    assert plan.decode[:, 3].min() > 4000
    assert plan.num_parts == 0


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ([SharedPrefix((0, 1), 48)], "48 tokens: it must be a multiple of 512 up to 640"),
        ([SharedPrefix((0, 1), 1024)], "1024 tokens: it must be a multiple of 512 up to 640"),
        ([SharedPrefix((0,), 512), SharedPrefix((1, 0), 512)], "in two shared prefixes"),
    ],
)
def test_prefixes_that_cannot_be(prefix: list[SharedPrefix], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(step_of([640, 650], [1, 1]), Heads(1, 1), H100, None, prefix)


def test_groups_larger_than_a_tile_are_refused() -> None:
    assert len(make_plan(step_of([5], [1]), Heads(1, 64), H100).append) == 1
    with pytest.raises(UnsupportedError, match="65 query heads"):
        make_plan(step_of([5], [1]), Heads(1, 65), H100)


def test_shared_prefixes_of_block_tables() -> None:
    tables = np.array(
        [[7, 8, 9, 1], [5, 6, 7, 8], [7, 8, 9, 2], [7, 8, 3, 4], [5, 1, 2, 3]], np.int32
    )
    past = np.array([1280, 1280, 1280, 1280, 700])
    found = find_shared_prefixes(tables, past, 256, min_tokens=16, min_members=2)
    assert found == [SharedPrefix((0, 2, 3), 512)], "whole parts: 256 tokens are none"
    assert find_shared_prefixes(tables, past, 256, min_tokens=512, min_members=4) == []
    assert find_shared_prefixes(tables[:0], past[:0], 256) == []


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("KvLayer", 64),
        ("AttendArgs", 200),
        ("CombineArgs", 64),
        ("WriteArgs", 208),
        ("NormArgs", 48),
        ("GateArgs", 64),
        ("MoveArgs", 24),
    ],
)
def test_structures_are_as_large_as_the_kernels_say(name: str, size: int) -> None:
    assert ctypes.sizeof(getattr(params, name)) == size


H100_BYTES, A100_BYTES, RTX_3090_BYTES = (232_448, 233_472), (166_912, 167_936), (101_376, 102_400)


@pytest.mark.parametrize(
    ("head_dim", "shared_bytes", "in_flight"),
    [
        (64, H100_BYTES, (8, 3, 2)),
        (128, H100_BYTES, (6, 2, 2)),
        (256, H100_BYTES, (6, 1, 2)),
        (64, A100_BYTES, (8, 2, 2)),
        (128, A100_BYTES, (4, 2, 2)),
        (256, A100_BYTES, (4, 1, 1)),
        (128, RTX_3090_BYTES, (5, 1, 1)),
    ],
)
def test_shared_memory_decides_what_is_in_flight(
    head_dim: int, shared_bytes: tuple[int, int], in_flight: tuple[int, int, int]
) -> None:
    sizes = sizes_for(head_dim, *shared_bytes)
    assert (sizes.stages, sizes.decode_blocks, sizes.append_blocks) == in_flight
    assert max(sizes.decode_bytes, sizes.append_bytes) <= shared_bytes[0]


def test_a_device_without_the_room_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="heads of 256 need 141824 bytes of shared memory"):
        sizes_for(256, *RTX_3090_BYTES)


def test_architectures() -> None:
    names = [architecture(*version) for version in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert names == ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
