"""Plan a ragged batch as work items for the device's blocks. Pure numpy.

The query rows of a sequence (its new tokens times the query heads of one KV head) are cut into
*tiles* of one kernel, the keys that a tile sees into *chunks* so that the items fill the device.
Chunks are whole *parts*: the keys from one multiple of PART_TOKENS to the next, which the kernels
add up in their order. If the keys of a token lie in more than one chunk, a last kernel combines its
parts in the same order. So a plan decides nothing about a result. Items count for every KV head:
the kernels multiply.

A *shared prefix* is attended once for all its sequences: tiles of all their tokens over the
prefix, then each sequence's own tiles over what follows it. Hydragen (Juravsky et al. 2024) and
cascade inference (FlashInfer) do so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vmserve.attention.cuda.variant import PART_TOKENS, TILE_TOKENS
from vmserve.errors import UnsupportedError

__all__ = [
    "APPEND_ROWS",
    "DECODE_ROWS",
    "ITEM_FIELDS",
    "CudaPlan",
    "Heads",
    "Resident",
    "SharedPrefix",
    "Step",
    "find_shared_prefixes",
    "first_visible",
    "make_plan",
]

#: Query rows per item of the decode kernel, and the least of the append kernel (csrc/cuda).
DECODE_ROWS, APPEND_ROWS = 16, 64
#: Most items that splits make, for each block that runs at once; but see item_limit.
MAX_WAVES = 4
#: Most parts to combine, for each item that a split may make (chunk_limit). A decode may combine
#: the parts of 62 chunks of 512 keys per block. That is eight sequences of 131,072 tokens on an
#: H100, in 35 MB of sums (heads of 128, four to a KV head).
DECODE_PARTS, APPEND_PARTS = 16, 1

ITEM_FIELDS = (
    "row",
    "token",
    "num_tokens",
    "kv_begin",
    "kv_end",
    "part",
    "min_position",
    "max_position",
)

IntArray = NDArray[np.int64]


class Heads(NamedTuple):
    """``group``: query heads of one KV head. ``append_rows``: query rows of an append item."""

    kv_heads: int
    group: int
    append_rows: int = APPEND_ROWS


class Resident(NamedTuple):
    """Blocks of each kernel that run at once on the whole device."""

    decode: int
    append: int


class Step(NamedTuple):
    """A ragged batch: int64 ``[num_sequences]`` each. ``rows``: of the block tables, or slots."""

    rows: IntArray
    num_past: IntArray
    num_new: IntArray
    starts: IntArray


@dataclass(frozen=True)
class SharedPrefix:
    """Sequences (indices into the batch) whose first ``num_tokens`` positions are the same memory.

    ``num_tokens`` is a multiple of PART_TOKENS, and at most the smallest ``num_past`` of the
    members.
    """

    members: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True)
class CudaPlan:
    """The work items of a batch.

    ``decode`` and ``append``: int32 ``[items, 8]``, columns :data:`ITEM_FIELDS` (explained in
    params.h). ``lists``: tokens of items whose tokens are not consecutive. ``part_starts``: int32
    ``[tokens]``. ``split``: int32 ``[tokens with parts, 4]``: token, first part, parts, 0.
    ``needs_scratch``: whether an append item has several parts, which it adds up in scratch memory.
    """

    decode: NDArray[np.int32]
    append: NDArray[np.int32]
    lists: NDArray[np.int32]
    part_starts: NDArray[np.int32]
    split: NDArray[np.int32]
    num_parts: int
    needs_scratch: bool


class _Tiles(NamedTuple):
    """Tiles of one kernel; ``sequence`` is -1 - prefix for tiles of a shared prefix."""

    sequence: IntArray
    row: IntArray
    token: IntArray
    num_tokens: IntArray
    begin: IntArray
    end: IntArray
    min_position: IntArray
    max_position: IntArray

    @staticmethod
    def joined(parts: Sequence[_Tiles]) -> _Tiles:
        if len(parts) == 1:
            return parts[0]
        return _Tiles(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


_NO_TILES = _Tiles(*(np.zeros(0, np.int64) for _ in _Tiles._fields))


def chunk_limit(resident: int, kv_heads: int) -> int:
    """Return the number of items of a kernel, per KV head, above which nothing is split."""
    return max(1, MAX_WAVES * resident // kv_heads)


def item_limit(tiles: int, limit: int) -> int:
    """Return the most items per KV head of so many tiles, where ``limit`` is chunk_limit's."""
    return max(limit, tiles + limit // MAX_WAVES)


class Costs(NamedTuple):
    """What the choices are ranked by, in keys of a block: its time for each while all blocks run.

    ``fewer``: the same while hardly any run, half of them, and all. ``item``: of an item, besides
    its keys. ``split``: of another kernel that combines. ``in_order``: for each part of the token
    with most, which are added one after the other. ``moved``: to write and read a part's sums.
    ``remainder``: whether only what whole waves leave may be split.
    """

    parts_per_item: int
    fewer: tuple[float, float, float]
    item: float
    split: float
    in_order: float
    moved: float
    remainder: bool


#: Fitted to an H100 (3.03 TB/s) with heads of 128: 44 ns a key. Each of 264 blocks has 11.5 GB/s,
#: each of 128 some 20, each of 32 or 64 has 22 (pages) to 28. Combining takes 4 us. It took 0.17 to
#: 0.28 us a part when it waited for each.
DECODE_COSTS = Costs(DECODE_PARTS, (0.4, 0.6, 1.0), 32, 90, 2, 16, True)
#: Estimates, not measured on a device yet.
APPEND_COSTS = Costs(APPEND_PARTS, (1.0, 1.0, 1.0), 32, 64, 0, 0, False)


def choose_chunks(
    lengths: IntArray, parts: IntArray, kv_heads: int, resident: int, costs: Costs
) -> IntArray:
    """The parts in an item of each tile with which tiles of such lengths are done soonest.

    Tries the longest in 1 to 8, 10, 12, 14, 16, 20 ... chunks; items of other tiles have as many
    parts, if all are split, or all of their tile's, if only those are split that whole waves leave.
    """
    whole = np.maximum(parts, 1)
    longest = int(parts.max())
    if longest == 1:
        return whole
    powers = 1 << np.arange(longest.bit_length())
    counts = np.unique(np.concatenate([factor * powers for factor in (4, 5, 6, 7)]) // 4)
    sizes = np.unique(-(-longest // counts[(counts > 0) & (counts <= longest)]))[::-1]
    limit = chunk_limit(resident, kv_heads)
    wave = limit // MAX_WAVES
    tried = [(len(parts), limit)]
    if costs.remainder and wave and len(parts) > wave and len(parts) % wave:
        tried.append((len(parts) % wave, item_limit(len(parts), limit)))
    order = np.argsort(-lengths, kind="stable") if len(tried) > 1 else np.arange(len(parts))
    best, chosen, size = np.inf, len(parts), longest
    for num_split, most in tried:
        tiles = order[:num_split]
        left = int(lengths[order[num_split]]) if num_split < len(order) else 0
        times = _times(lengths, parts, tiles, sizes, kv_heads, resident, costs, most, left)
        index = int(np.argmin(times))
        if times[index] < best:
            best, chosen, size = float(times[index]), num_split, int(sizes[index])
    split = order[:chosen]
    whole[split] = np.minimum(whole[split], size)
    return whole


def _times(
    lengths: IntArray,
    parts: IntArray,
    tiles: IntArray,
    sizes: IntArray,
    kv_heads: int,
    resident: int,
    costs: Costs,
    most_items: int,
    longest_whole: int,
) -> NDArray[np.float64]:
    """Estimate, in keys, the time of all tiles with ``tiles`` in chunks, for each size of these.

    Items are done in waves: the blocks of the last one are faster if they are fewer, because they
    share the memory's rate. Infinite for what there is no room for.
    """
    of_tile, of_size = parts[tiles], sizes[:, None]
    num_full, rest = np.divmod(of_tile, of_size)
    num_chunks = (num_full + (rest > 0)).sum(1)
    to_combine = of_tile * (of_tile > of_size)
    num_combined = to_combine.sum(1)
    num_whole, keys = len(parts) - len(tiles), int(lengths[tiles].sum())
    longest = np.minimum(sizes * PART_TOKENS, lengths[tiles].max())
    # All of them, as long as their mean; and those that are as long as the longest.
    items = np.stack((num_chunks, num_full.sum(1)))
    waves, last = np.divmod(items * kv_heads, resident)
    fewer = np.interp(last / resident, (0, 0.5, 1), costs.fewer) * (last > 0)
    time = ((waves + fewer) * (np.stack((keys / num_chunks, longest)) + costs.item)).max(0)
    if num_whole:
        time += (int(lengths.sum()) - keys + num_whole * costs.item) * kv_heads / resident
        longest = np.maximum(longest, longest_whole)
    time = np.maximum(time, longest * costs.fewer[1] + costs.item)
    time += costs.split * (num_combined > 0) + costs.in_order * to_combine.max(1)
    time += costs.moved * num_combined * kv_heads / resident
    limit = chunk_limit(resident, kv_heads)
    fits = (num_whole + num_chunks <= most_items) & (num_combined <= costs.parts_per_item * limit)
    return np.where(fits | (num_combined == 0), time, np.inf)


def make_plan(
    step: Step,
    heads: Heads,
    resident: Resident,
    window: int | None = None,
    prefixes: Sequence[SharedPrefix] = (),
) -> CudaPlan:
    """Items that cover every pair of a new token and a key visible to it exactly once.

    Raises ``ValueError`` for a shared prefix that is not in all members' past.
    """
    shared = _shared_lengths(step, prefixes)
    few = step.num_new * heads.group <= DECODE_ROWS
    decode = [_sequence_tiles(step, np.flatnonzero(few), DECODE_ROWS, heads, window, shared)]
    most = heads.append_rows
    append = [_sequence_tiles(step, np.flatnonzero(~few), most, heads, window, shared)]
    lists: list[IntArray] = []
    for index, prefix in enumerate(prefixes):
        tokens, positions = _tokens_of(step, prefix.members)
        is_decode = len(tokens) * heads.group <= DECODE_ROWS
        rows = DECODE_ROWS if is_decode else most
        first = sum(map(len, lists))
        tiles = _prefix_tiles(step, prefix, index, positions, first, rows // heads.group, window)
        (decode if is_decode else append).append(tiles)
        lists.append(tokens)
    return _with_parts(
        step,
        _Tiles.joined(decode),
        _Tiles.joined(append),
        np.concatenate(lists) if lists else np.zeros(0, np.int64),
        prefixes,
        heads,
        resident,
    )


def _shared_lengths(step: Step, prefixes: Sequence[SharedPrefix]) -> IntArray:
    shared = np.zeros(len(step.rows), np.int64)
    for prefix in prefixes:
        members = np.array(prefix.members, np.int64)
        least = int(step.num_past[members].min())
        if prefix.num_tokens % PART_TOKENS or not 0 < prefix.num_tokens <= least:
            raise ValueError(
                f"a shared prefix of {prefix.num_tokens} tokens: it must be a multiple of "
                f"{PART_TOKENS} up to {least}, the least number of past tokens among its sequences"
            )
        if shared[members].any() or len(set(prefix.members)) != len(members):
            raise ValueError("a sequence is in two shared prefixes, or twice in one")
        shared[members] = prefix.num_tokens
    return shared


def first_visible(position: IntArray | int, window: int | None) -> IntArray:
    """Return the first visible key of a tile at ``position``, rounded down to a tile of keys."""
    if window is None:
        return np.zeros_like(position)
    first: IntArray = np.maximum(0, np.asarray(position) + 1 - window)
    return first // TILE_TOKENS * TILE_TOKENS


def _sequence_tiles(
    step: Step, chosen: IntArray, rows: int, heads: Heads, window: int | None, shared: IntArray
) -> _Tiles:
    if not len(chosen):
        return _NO_TILES
    per_tile = rows // heads.group
    if per_tile == 0:
        raise UnsupportedError(
            f"{heads.group} query heads for each KV head: the cuda backend has tiles for {rows}"
        )
    new = step.num_new[chosen]
    num_tiles = -(-new // per_tile)
    sequence = np.repeat(chosen, num_tiles)
    ends = np.cumsum(num_tiles)
    first = (np.arange(len(sequence)) - np.repeat(ends - num_tiles, num_tiles)) * per_tile
    count = np.minimum(per_tile, step.num_new[sequence] - first)
    position = step.num_past[sequence] + first
    return _Tiles(
        sequence=sequence,
        row=step.rows[sequence],
        token=step.starts[sequence] + first,
        num_tokens=count,
        begin=np.maximum(shared[sequence], first_visible(position, window)),
        end=position + count,
        min_position=position,
        max_position=position + count - 1,
    )


def _tokens_of(step: Step, members: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return the tokens of the given sequences, and their positions."""
    chosen = np.array(members, np.int64)
    new = step.num_new[chosen]
    within = np.arange(int(new.sum())) - np.repeat(np.cumsum(new) - new, new)
    tokens = np.repeat(step.starts[chosen], new) + within
    return tokens, np.repeat(step.num_past[chosen], new) + within


def _prefix_tiles(
    step: Step,
    prefix: SharedPrefix,
    index: int,
    positions: IntArray,
    first_list: int,
    per_tile: int,
    window: int | None,
) -> _Tiles:
    """Tiles over prefixes. All see the same keys, so every member has equally many prefix parts."""
    begin = int(first_visible(np.asarray(positions.min()), window))
    starts = np.arange(0, len(positions), per_tile)
    if begin >= prefix.num_tokens:
        starts = starts[:0]  # the window has moved past it
    ends = np.minimum(starts + per_tile, len(positions))
    one = np.ones(len(starts), np.int64)
    return _Tiles(
        sequence=one * (-1 - index),
        row=one * step.rows[prefix.members[0]],
        token=-1 - (first_list + starts),
        num_tokens=ends - starts,
        begin=one * begin,
        end=one * prefix.num_tokens,
        min_position=np.array(
            [positions[a:b].min() for a, b in zip(starts, ends, strict=True)], int
        ),
        max_position=np.array(
            [positions[a:b].max() for a, b in zip(starts, ends, strict=True)], int
        ),
    )


class _Chunks(NamedTuple):
    """Numbers of each tile: its items, the parts of each of them, and its parts in all."""

    counts: IntArray
    sizes: IntArray
    parts: IntArray

    @staticmethod
    def of(tiles: _Tiles, kv_heads: int, resident: int, costs: Costs) -> _Chunks:
        lengths = tiles.end - tiles.begin
        parts = -(-tiles.end // PART_TOKENS) - tiles.begin // PART_TOKENS
        if not len(parts):
            return _Chunks(parts, parts, parts)
        chunk = choose_chunks(lengths, parts, kv_heads, resident, costs)
        sizes = -(-parts // -(-parts // chunk))
        return _Chunks(-(-parts // sizes), sizes, parts)


def _with_parts(
    step: Step,
    decode: _Tiles,
    append: _Tiles,
    lists: IntArray,
    prefixes: Sequence[SharedPrefix],
    heads: Heads,
    resident: Resident,
) -> CudaPlan:
    num_tokens = int(step.num_new.sum())
    chunks = [
        _Chunks.of(tiles, heads.kv_heads, blocks, costs)
        for tiles, blocks, costs in zip(
            (decode, append), resident, (DECODE_COSTS, APPEND_COSTS), strict=True
        )
    ]
    # A prefix's parts come before a sequence's own; all tiles of a prefix have equally many.
    prefix_parts = np.zeros(len(prefixes) + 1, np.int64)  # the last one: of no prefix
    prefix_of = np.full(len(step.rows), len(prefixes))
    for index, prefix in enumerate(prefixes):
        prefix_of[list(prefix.members)] = index
    for tiles, of_tiles in zip((decode, append), chunks, strict=True):
        of_prefix = tiles.sequence < 0
        prefix_parts[-1 - tiles.sequence[of_prefix]] = of_tiles.parts[of_prefix]
    parts_before = prefix_parts[prefix_of]
    part_starts = np.full(num_tokens, -1, np.int32)
    if not prefixes and all((each.counts == 1).all() for each in chunks):
        split, num_parts = np.zeros((0, 4), np.int32), 0
    else:
        token_parts = _parts_of_tokens(num_tokens, (decode, append), chunks, parts_before)
        in_parts = np.flatnonzero(token_parts)
        of_token = token_parts[in_parts]
        first = np.cumsum(of_token) - of_token
        part_starts[in_parts] = first
        split = np.zeros((len(in_parts), 4), np.int32)
        split[:, 0], split[:, 1], split[:, 2] = in_parts, first, of_token
        num_parts = int(of_token.sum())
    return CudaPlan(
        decode=_items(decode, chunks[0], parts_before),
        append=_items(append, chunks[1], parts_before),
        lists=lists.astype(np.int32),
        part_starts=part_starts,
        split=split,
        num_parts=num_parts,
        needs_scratch=bool((chunks[1].sizes > 1).any()),
    )


def _parts_of_tokens(
    num_tokens: int,
    kernels: Sequence[_Tiles],
    chunks: Sequence[_Chunks],
    parts_before: IntArray,
) -> IntArray:
    """Count the parts of each token in more than one item: those of its prefix and its own."""
    token_parts = np.zeros(num_tokens, np.int64)
    for tiles, of_tiles in zip(kernels, chunks, strict=True):
        own = tiles.sequence >= 0
        before = parts_before[tiles.sequence[own]]
        parts = np.where((of_tiles.counts[own] > 1) | (before > 0), before + of_tiles.parts[own], 0)
        # The tiles of a kernel are in the order of their tokens.
        length = tiles.num_tokens[own]
        token = np.repeat(tiles.token[own] - (np.cumsum(length) - length), length)
        token_parts[token + np.arange(len(token))] = np.repeat(parts, length)
    return token_parts


def _items(tiles: _Tiles, chunks: _Chunks, parts_before: IntArray) -> NDArray[np.int32]:
    """The chunks of all tiles, the longest first, so that short ones run last."""
    counts = chunks.counts
    if not len(counts):
        return np.zeros((0, len(ITEM_FIELDS)), np.int32)
    tile = np.repeat(np.arange(len(counts)), counts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
    part *= chunks.sizes[tile]
    first = tiles.begin[tile] // PART_TOKENS + part
    begin = np.maximum(tiles.begin[tile], first * PART_TOKENS)
    end = np.minimum((first + chunks.sizes[tile]) * PART_TOKENS, tiles.end[tile])
    sequence = tiles.sequence[tile]
    before = np.where(sequence >= 0, parts_before[sequence], 0)
    items = np.empty((len(tile), len(ITEM_FIELDS)), np.int32)
    columns = (
        tiles.row[tile],
        tiles.token[tile],
        tiles.num_tokens[tile],
        begin,
        end,
        part + before,
        tiles.min_position[tile],
        tiles.max_position[tile],
    )
    for index, column in enumerate(columns):
        items[:, index] = column
    lengths = end - begin
    if len(lengths) and lengths.min() != lengths.max():
        items = items[np.argsort(-lengths, kind="stable")]
    return items


def find_shared_prefixes(
    tables: NDArray[np.int32],
    num_past: IntArray,
    block_tokens: int,
    min_tokens: int = 1024,
    min_members: int = 4,
) -> list[SharedPrefix]:
    """Groups of sequences whose block tables begin with the same blocks.

    Sequences with the same first block form a group, as far as all agree in whole parts, if that
    is at least ``min_tokens``. ``tables``: ``[sequences, blocks]``; entries past a sequence's
    blocks may be anything.
    """
    whole = num_past // block_tokens
    groups: list[SharedPrefix] = []
    if not len(tables):
        return groups
    keys = np.where(whole > 0, tables[:, 0].astype(np.int64), -1)
    order = np.argsort(keys, kind="stable")
    cuts = np.flatnonzero(np.diff(keys[order])) + 1
    for members in np.split(order, cuts):
        if len(members) < min_members or keys[members[0]] < 0:
            continue
        least = int(whole[members].min())
        block = tables[members, :least]
        differs = (block != block[0]).any(0)
        common = int(differs.argmax()) if differs.any() else least
        num_tokens = common * block_tokens // PART_TOKENS * PART_TOKENS
        if num_tokens >= min_tokens:
            chosen = tuple(int(i) for i in members)
            groups.append(SharedPrefix(chosen, num_tokens))
    return groups
