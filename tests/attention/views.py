"""Views over one plain tensor: strided, interleaved and padded as the real ones are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from vmserve.attention.base import RaggedBatch
from vmserve.attention.rotary import Rotary
from vmserve.memory.views import ContiguousView, KindTables, KVView, PagedView

#: An entry for a block that was given up: kernels that look it up fail.
NO_BLOCK = 1 << 30


def _nothing(dtype: torch.dtype) -> float:
    """NaN; of bytes those of one."""
    return float("nan") if dtype.is_floating_point else torch.tensor(-1).to(dtype).item()


def dense_view(
    num_layers: int,
    slots: int,
    max_len: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
) -> ContiguousView:
    """Each token holds all layers' K and V side by side; every number in it is NaN. ``spare``: so
    many more tokens lie between slots."""
    shape = (slots, max_len + spare, num_layers, 2, kv_heads, head_dim)
    memory = torch.full(shape, _nothing(dtype), dtype=dtype)[:, :max_len]
    return ContiguousView(
        keys=tuple(memory[:, :, layer, 0] for layer in range(num_layers)),
        values=tuple(memory[:, :, layer, 1] for layer in range(num_layers)),
    )


def paged_view(
    dense: ContiguousView,
    tokens: Sequence[int],
    block_tokens: int,
    blocks_per_page: int,
    seed: int,
    padding: int = 48,
    spare_pages: int = 1,
) -> PagedView:
    """The first ``tokens[row]`` positions of each slot of ``dense``, in blocks placed at random.

    Pages are padded, every other number in them is NaN, and entries of the table that
    stand for nothing are garbage: ids outside the arena, or of somebody else's block.
    """
    rng = random.Random(seed)
    num_layers = len(dense.keys)
    _, max_len, kv_heads, head_dim = dense.keys[0].shape
    counts = [-(-count // block_tokens) for count in tokens]
    num_pages = -(-sum(counts) // blocks_per_page) + spare_pages
    num_blocks = num_pages * blocks_per_page
    token_floats = num_layers * 2 * kv_heads * head_dim
    page_floats = blocks_per_page * block_tokens * token_floats + padding
    dtype = dense.keys[0].dtype
    memory = torch.full((num_pages, page_floats), _nothing(dtype), dtype=dtype)
    shape = (num_pages, blocks_per_page * block_tokens, num_layers, 2, kv_heads, head_dim)
    strides = (page_floats, token_floats, 2 * kv_heads * head_dim, kv_heads * head_dim, head_dim, 1)
    arena = memory.as_strided(shape, strides)
    width = -(-max_len // block_tokens)
    garbage = [-1, num_blocks, 2**31 - 1, 0]
    tables = [[rng.choice(garbage) for _ in range(width)] for _ in tokens]
    blocks = rng.sample(range(num_blocks), sum(counts))
    for row, count in enumerate(counts):
        tables[row][:count] = [blocks.pop() for _ in range(count)]
        position = torch.arange(tokens[row])
        block = torch.tensor(tables[row])[position // block_tokens]
        page, part = block // blocks_per_page, block % blocks_per_page
        token = part * block_tokens + position % block_tokens
        for layer in range(num_layers):
            arena[page, token, layer, 0] = dense.keys[layer][row, position]
            arena[page, token, layer, 1] = dense.values[layer][row, position]
    return PagedView.of_one_kind(
        tuple(arena[:, :, layer, 0] for layer in range(num_layers)),
        tuple(arena[:, :, layer, 1] for layer in range(num_layers)),
        torch.tensor(tables, dtype=torch.int32),
        block_tokens,
    )


def with_kinds(
    first: PagedView, second: PagedView, window: int, batch: RaggedBatch, head_slack: int = 0
) -> PagedView:
    """Layer 0 of ``first``, and layer 1 of ``second`` as one with a window and pages of its own, of
    which those that ``batch`` does not see are given up, but for ``head_slack`` tokens."""
    tables = second.block_tables.clone()
    for place, past in zip(batch.places.tolist(), batch.num_past.tolist(), strict=True):
        behind = max(0, past + 1 - window - head_slack)
        tables[place, : behind // second.block_tokens] = NO_BLOCK
    return PagedView(
        keys=(first.keys[0], second.keys[1]),
        values=(first.values[0], second.values[1]),
        tables=(KindTables(None, (0,), first.block_tables), KindTables(window, (1,), tables)),
        block_tokens=first.block_tokens,
    )


def places_of(
    view: KVView, place: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a sequence's positions are in each of the view's tensors: their first two indices."""
    if isinstance(view, ContiguousView):
        return torch.full_like(positions, place), positions
    per_page = view.keys[0].shape[1] // view.block_tokens
    table = view.block_tables[place].to(positions.device, torch.int64)
    block = table[positions // view.block_tokens]
    token = block % per_page * view.block_tokens + positions % view.block_tokens
    return block // per_page, token


def of_layer(view: PagedView, layer: int) -> PagedView:
    """The layer alone, with its block tables."""
    [tables] = (kind.block_tables for kind in view.tables if layer in kind.layers)
    keys, values = (view.keys[layer],), (view.values[layer],)
    return PagedView.of_one_kind(keys, values, tables, view.block_tokens)


def fill_past(view: ContiguousView, batch: RaggedBatch, seed: int = 0) -> None:
    """Random numbers at every position before the batch; all others stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*view.keys, *view.values):
        for slot, past in zip(batch.places, batch.num_past, strict=True):
            numbers = torch.randn(past, *tensor.shape[2:], generator=generator)
            tensor[slot, :past] = numbers.to(tensor.dtype)


def attention_inputs(
    rows: int, q_heads: int, kv_heads: int, head_dim: int, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Rotary]:
    """Queries, keys, values and a rotation for each row."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randn(rows, 1, head_dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotary = Rotary(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    q, k, v = (
        torch.randn(rows, heads, head_dim, generator=generator)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    return q, k, v, rotary


def rotary_of(batch: RaggedBatch, dim: int, dtype: torch.dtype) -> Rotary:
    """The rotations of the batch's positions, as of a model."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.from_numpy(batch.positions)[:, None] * frequency
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return Rotary(
        cos=torch.cat([cos, cos], -1).unsqueeze(1),
        signed_sin=torch.cat([-sin, sin], -1).unsqueeze(1),
    )
