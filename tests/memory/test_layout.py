"""The planner: exact pages for real models, Table 8 of the vAttention paper, and its refusals."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from vmserve.cli.planning.report import PRESETS, block_size_table
from vmserve.errors import ConfigurationError
from vmserve.memory.layout import (
    CUDA_GRANULARITY,
    HOST_GRANULARITY,
    KVLayout,
    LayerKind,
    candidates,
    join_layouts,
    layer_places,
    layers_for_granularity,
    plan_layout,
)

KIB, MIB = 1 << 10, 1 << 20
QWEN = (28, 4, 128, "bfloat16")


def places(layout: KVLayout) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Group and byte of each layer's K, and of its V."""
    layers = range(layout.num_layers)
    keys = [layout.shape.key_location(layer) for layer in layers]
    return keys, [layout.shape.value_location(layer) for layer in layers]


def test_rows_of_8_bits_have_their_scale_behind_them() -> None:
    layout = plan_layout(4, 3, 64, "int8", HOST_GRANULARITY, layers_per_group=2)
    assert layout.shape.head_strides[0] == 64 + 4
    keys, values = places(layout)
    assert (keys[:3], values[3]) == ([(0, 0), (0, 2 * 204), (1, 0)], (1, 3 * 204))
    half = plan_layout(4, 3, 64, "bfloat16", HOST_GRANULARITY, layers_per_group=2)
    assert half.shape.token_stride / layout.shape.token_stride > 1.8


def test_scales_of_fp8_follow_the_codes_of_all_heads() -> None:
    layout = plan_layout(4, 3, 64, "fp8", HOST_GRANULARITY, layers_per_group=2)
    vector = 3 * 64 + 3 * 4 + 4  # padded to a multiple of 16
    assert (layout.shape.head_strides[0], layout.shape.token_bytes) == (64, 4 * vector)
    keys, values = places(layout)
    assert (keys[:3], values[3]) == ([(0, 0), (0, 2 * vector), (1, 0)], (1, 3 * vector))
    assert layout.shape.token_stride % 16 == 0
    ranks = {"layers_per_group": 4, "tensor_parallel": 8}
    of_ranks = plan_layout(4, 8, 128, "fp8", CUDA_GRANULARITY, **ranks)
    assert of_ranks.shape.token_bytes == 8 * (128 + 16)
    llama = dataclasses.replace(PRESETS["llama-3-8b"], dtype="fp8")
    assert [kind.token_bytes for kind in llama.kinds()] == [2 * 8 * (128 + 4)]


def test_all_layers_of_qwen_fit_256_tokens_exactly_in_14_mib() -> None:
    layout = plan_layout(*QWEN, CUDA_GRANULARITY, layers_per_group=28)
    assert (layout.shape.page_bytes, layout.page_tokens, layout.num_groups) == (14 * MIB, 256, 1)
    assert layout.padding_waste == 0
    assert (layout.shape.token_bytes, layout.shape.token_stride) == (56 * KIB, 56 * KIB)
    assert layout.map_calls_per_1k_tokens == 1000 / 256
    assert layout.worst_case_waste_bytes == 14 * MIB


def test_the_host_takes_64_tokens_of_one_layer() -> None:
    layout = plan_layout(32, 8, 128, torch.bfloat16, HOST_GRANULARITY)
    assert (layout.page_tokens, layout.shape.page_bytes) == (64, 256 * KIB)
    assert (layout.num_groups, layout.total_page_bytes) == (32, 8 * MIB)
    assert (layout.dtype, layout.itemsize, layout.blocks_per_page) == ("bfloat16", 2, 4)
    assert layout.num_pages(100 * MIB) == 12
    assert [layout.pages_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("shape", "granularity", "layers_per_group", "page_bytes", "page_tokens", "waste"),
    [
        # a token of 14 KiB: 16 KiB apart; 1,024 tokens would pad nothing, and take 14 MiB
        (QWEN, CUDA_GRANULARITY, 7, 2 * MIB, 128, 0.125),
        (QWEN, CUDA_GRANULARITY, 4, 2 * MIB, 256, 0),
        (QWEN, CUDA_GRANULARITY, 1, 2 * MIB, 1024, 0),
        # 3 heads of 80 in float32: 1,920 bytes fill 64-token pages of 30 granules
        ((2, 3, 80, "float32"), HOST_GRANULARITY, 1, 30 * 4096, 64, 0),
        # fewer tokens would pad by a quarter or more
        ((1, 1, 6, "bfloat16"), HOST_GRANULARITY, 1, 3 * 4096, 512, 0),
        ((60, 8, 128, "bfloat16"), CUDA_GRANULARITY, 3, 6 * MIB, 512, 0),
        ((1, 2, 64, "float8_e4m3fn"), HOST_GRANULARITY, 1, 16 * KIB, 64, 0),
        # 2 * 3 heads of 64 bytes and a scale of 4: 408, at a distance of 416
        ((30, 3, 64, "int8"), HOST_GRANULARITY, 1, 52 * KIB, 128, 8 / 416),
        ((32, 8, 128, "int8"), HOST_GRANULARITY, 1, 132 * KIB, 64, 0),
    ],
)
def test_the_planner_pads_as_little_as_it_can(
    shape: tuple[int, int, int, str],
    granularity: int,
    layers_per_group: int,
    page_bytes: int,
    page_tokens: int,
    waste: float,
) -> None:
    layout = plan_layout(*shape, granularity, layers_per_group=layers_per_group)
    assert (layout.shape.page_bytes, layout.page_tokens) == (page_bytes, page_tokens)
    assert layout.padding_waste == pytest.approx(waste)


def test_fixed_sizes_are_kept() -> None:
    by_bytes = plan_layout(*QWEN, HOST_GRANULARITY, page_bytes=96 * KIB)
    assert (by_bytes.page_tokens, by_bytes.shape.token_stride) == (48, 2048)
    by_tokens = plan_layout(*QWEN, HOST_GRANULARITY, page_tokens=16)
    assert (by_tokens.shape.page_bytes, by_tokens.blocks_per_page) == (32 * KIB, 1)
    both = plan_layout(*QWEN, HOST_GRANULARITY, page_bytes=64 * KIB, page_tokens=16)
    assert (both.shape.token_stride, both.padding_waste) == (4096, 0.5)
    padded = plan_layout(*QWEN, CUDA_GRANULARITY, layers_per_group=28, page_bytes=2 * MIB)
    assert (padded.page_tokens, padded.shape.token_stride) == (32, 64 * KIB)


@pytest.mark.parametrize(
    ("shape", "max_len", "page_tokens"),
    [
        ((30, 3, 64, "bfloat16"), 8192, 64),
        ((30, 3, 64, "bfloat16"), 32768, 64),
        (QWEN, 131072, 128),  # of 64 tokens it would need more than half of all
    ],
)
def test_host_pages_grow_until_the_longest_sequence_has_its_mappings(
    shape: tuple[int, int, int, str], max_len: int, page_tokens: int
) -> None:
    limits = {"max_len": max_len, "max_map_count": 65530}
    layout = plan_layout(*shape, HOST_GRANULARITY, **limits)
    assert layout.page_tokens == page_tokens
    assert layout.slot_mappings(max_len) == max_len // page_tokens * shape[0] < 65530 / 2
    small = plan_layout(*shape, HOST_GRANULARITY)
    assert small.page_tokens == 64
    assert plan_layout(*shape, HOST_GRANULARITY, page_tokens=64, **limits) == small  # on request


def test_values_that_are_a_slice_of_keys_take_no_memory() -> None:
    deepseek = (27, 1, 576, "bfloat16")
    layout = plan_layout(*deepseek, HOST_GRANULARITY, keys_only=True)
    assert (layout.shape.token_bytes, layout.shape.token_stride) == (1152, 1152)
    keys, values = places(layout)
    assert keys == values == [(layer, 0) for layer in range(27)]
    together = plan_layout(*deepseek, HOST_GRANULARITY, layers_per_group=3, keys_only=True)
    assert together.shape.key_location(5) == together.shape.value_location(5) == (1, 2 * 1152)
    # 1 MiB holds 910 tokens of K of one layer, and half as many of K and V.
    deeper = (60, *deepseek[1:], CUDA_GRANULARITY // 2)
    assert layers_for_granularity(*deeper) == 2
    assert layers_for_granularity(*deeper, keys_only=True) == 4
    with pytest.raises(ConfigurationError, match="split_kv"):
        plan_layout(*deepseek, HOST_GRANULARITY, split_kv=True, keys_only=True)


def test_where_k_and_v_lie() -> None:
    row = 2 * 8 * 2
    assert places(plan_layout(4, 2, 8, "float16", 4096, layers_per_group=2)) == (
        [(0, 0), (0, 2 * row), (1, 0), (1, 2 * row)],
        [(0, row), (0, 3 * row), (1, row), (1, 3 * row)],
    )
    assert places(plan_layout(4, 2, 8, "float16", 4096, layers_per_group=2, split_kv=True)) == (
        [(0, 0), (0, row), (2, 0), (2, row)],
        [(1, 0), (1, row), (3, 0), (3, row)],
    )


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers is 0: it must be 1 or more"),
    ({"block_tokens": 0}, "block_tokens is 0: it must be 1 or more"),
    ({"dtype": "int3"}, "dtype 'int3' is not one of float8_e4m3fn,"),
    ({"layers_per_group": 3}, "28 layers cannot be .* of 3: use one of 1, 2, 4, 7, 14, 28"),
    ({"tensor_parallel": 3}, "4 KV heads cannot be shared by 3 tensor-parallel ranks"),
    ({"page_bytes": 5000}, "a page of 5000 bytes is not a multiple .* 4096: use e.g. 8 KiB"),
    ({"page_tokens": 24}, "a page of 24 tokens is not whole blocks of 16: use e.g. 32 tokens"),
    ({"page_bytes": 16384}, "of 16 KiB holds 8 tokens of 2 KiB: .* use pages of 32 KiB or more"),
    (
        {"page_bytes": 32768, "page_tokens": 32},
        "32 tokens of 2 KiB need 64 KiB, the page has 32 KiB: lower page_tokens to 16 or less",
    ),
    (
        {"page_bytes": 13 * 32768, "page_tokens": 48},
        "does not place 48 tokens at an even, aligned distance",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refusals_carry_the_numbers(changes: dict[str, Any], message: str) -> None:
    names = ("num_layers", "kv_heads", "head_dim", "dtype", "granularity")
    arguments: dict[str, Any] = dict(zip(names, (*QWEN, 4096), strict=True))
    with pytest.raises(ConfigurationError, match=message):
        plan_layout(**(arguments | changes))


def test_every_candidate_is_sound() -> None:
    for granularity in (HOST_GRANULARITY, 64 * KIB, CUDA_GRANULARITY):
        for shape in PRESETS.values():
            sizes = (shape.num_layers, shape.kv_heads, shape.head_dim, shape.dtype)
            layouts = candidates(*sizes, granularity)
            assert [layout.shape.split_kv for layout in layouts].count(True) == len(layouts) // 2
            for layout in layouts:
                part = layout.shape
                assert part.page_bytes % granularity == 0
                assert part.token_stride * layout.page_tokens == part.page_bytes
                assert part.token_stride >= part.token_bytes
                assert part.token_stride % 16 == 0
                assert layout.page_tokens % layout.block_tokens == 0
                assert layout.page_tokens >= 64
                assert 0 <= layout.padding_waste <= 0.125
                row = part.kv_heads * part.head_dim * layout.itemsize
                last = part.value_location(layout.num_layers - 1)
                assert last == (layout.num_groups - 1, part.token_bytes - row)


def test_candidates_leave_out_groupings_that_a_fixed_page_cannot_hold() -> None:
    layouts = candidates(*QWEN, HOST_GRANULARITY, page_bytes=64 * KIB)
    groupings = [(x.shape.layers_per_group, x.shape.split_kv, x.page_tokens) for x in layouts]
    apart = [(1, True, 64), (2, True, 32), (4, True, 16)]
    assert groupings == [(1, False, 32), (2, False, 16), *apart]
    with pytest.raises(ConfigurationError, match="use pages of 32 KiB or more"):
        candidates(*QWEN, HOST_GRANULARITY, page_bytes=4096)


def test_to_dict_is_json_with_fields_and_what_follows_from_them() -> None:
    layout = plan_layout(*QWEN, CUDA_GRANULARITY, layers_per_group=28)
    values = json.loads(json.dumps(layout.to_dict()))
    fields = {*dataclasses.fields(KVLayout), *dataclasses.fields(layout.shape)}
    assert {field.name for field in fields} - {"parts"} < set(values)
    assert values["total_page_bytes"] == 14 * MIB
    assert values["padding_waste"] == 0


def test_layers_of_several_shapes_are_parts_of_one_layout() -> None:
    """Heads that differ by kind, and V of another width than K, in groups of unequal size."""
    all_seen = plan_layout(
        4, 2, 96, "float32", HOST_GRANULARITY, value_dim=64, page_tokens=64, state_bytes=5000
    )
    windows = plan_layout(6, 1, 32, "float32", HOST_GRANULARITY, layers_per_group=3, page_tokens=64)
    joined = join_layouts([all_seen, windows])
    assert (joined.num_layers, joined.num_groups, joined.state_bytes) == (10, 4 + 2, 8192)
    row, narrow = 4 * 2 * (96 + 64), 4 * 2 * 32
    assert [part.token_bytes for part in joined.parts] == [row, 3 * narrow]
    assert joined.total_page_bytes == 64 * (4 * row + 6 * narrow)
    assert joined.padding_waste == 0
    kinds = (LayerKind(tuple(range(5, 9)), None), LayerKind((0, 1, 2, 3, 4, 9), 40))
    of_layers = layer_places(joined, kinds)
    assert joined.of_kinds(kinds) is joined
    keys = [of_layers[layer].key for layer in (5, 8, 0, 9)]
    assert keys == [(0, 0), (3, 0), (4, 0), (5, 2 * narrow)]
    assert of_layers[6].value == (1, 4 * 2 * 96)
    assert of_layers[9].part.dims == (32, 32)
    with pytest.raises(ValueError, match="several shapes"):
        joined.shape  # noqa: B018
    with pytest.raises(ConfigurationError, match="page_tokens 64 and 128 are not one pool's"):
        join_layouts([all_seen, plan_layout(1, 1, 8, "float32", HOST_GRANULARITY, page_tokens=128)])
    with pytest.raises(ConfigurationError, match="drop split_kv"):
        plan_layout(2, 1, 8, "float32", HOST_GRANULARITY, value_dim=4, split_kv=True)


# vAttention, arXiv 2405.04437, Table 8, by page size: tokens per page of one layer's K or V,
# and worst-case waste per request in MiB.
TABLE_8 = {
    ("yi-6b", 1): {64: (64, 4), 128: (128, 8), 256: (256, 16), 2048: (2048, 128)},
    ("yi-6b", 2): {64: (128, 8), 128: (256, 16), 256: (512, 32), 2048: (4096, 256)},
    ("llama-3-8b", 1): {64: (32, 4), 128: (64, 8), 256: (128, 16), 2048: (1024, 128)},
    ("llama-3-8b", 2): {64: (64, 8), 128: (128, 16), 256: (256, 32), 2048: (2048, 256)},
    ("yi-34b", 1): {64: (32, 7.5), 128: (64, 15), 256: (128, 30), 2048: (1024, 240)},
    ("yi-34b", 2): {64: (64, 15), 128: (128, 30), 256: (256, 60), 2048: (2048, 480)},
}


def test_block_sizes_of_the_vattention_paper() -> None:
    rows = block_size_table([PRESETS[name] for name in ("yi-6b", "llama-3-8b", "yi-34b")])
    found: dict[tuple[str, int], dict[int, tuple[int, float]]] = {}
    for row in rows:
        cells = found.setdefault((row.model, row.tensor_parallel), {})
        cells[row.page_bytes // KIB] = (row.tokens_per_page, row.worst_case_waste_bytes / MIB)
    assert found == TABLE_8


@pytest.mark.parametrize(
    ("shape", "granularity", "layers"),
    [
        ((32, 8, 128, "bfloat16"), CUDA_GRANULARITY, 32),  # Llama-3-8B
        ((32, 8, 128, "bfloat16"), CUDA_GRANULARITY // 2, 1),  # 256 tokens of 4 KiB
        ((16, 8, 64, "bfloat16"), CUDA_GRANULARITY // 2, 2),  # Llama-3.2-1B
        ((4, 2, 64, "float32"), 64 * CUDA_GRANULARITY, 4),  # too few layers for so large a page
        ((32, 8, 128, "bfloat16"), HOST_GRANULARITY, 1),
    ],
)
def test_layers_are_grouped_for_pages_of_256_tokens_and_all_of_them_on_a_gpu(
    shape: tuple[int, int, int, str], granularity: int, layers: int
) -> None:
    assert layers_for_granularity(*shape, granularity) == layers
