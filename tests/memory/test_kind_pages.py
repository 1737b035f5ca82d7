"""What kinds of layers take of a pool: the arithmetic, and the core's own count."""

from __future__ import annotations

import pytest

from benchmarks.kinds.counted import counted_bytes, grow_to, kinds_memory
from vmserve import _core
from vmserve.cli.planning.report import PRESETS
from vmserve.memory.kind_pages import (
    KindPages,
    KindShape,
    equal_pages,
    held_bytes,
    kind_pages,
    needed_bytes,
)
from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY

GEMMA = PRESETS["gemma-3-27b"].kinds()
GPT_OSS = PRESETS["gpt-oss-20b"].kinds()
QWEN = PRESETS["qwen3-next-80b-a3b"].kinds()
DEEPSEEK = PRESETS["deepseek-v3"].kinds()


@pytest.mark.parametrize("granularity", [HOST_GRANULARITY, CUDA_GRANULARITY])
@pytest.mark.parametrize("shapes", [GEMMA, GPT_OSS, QWEN, DEEPSEEK])
def test_the_core_counts_what_the_arithmetic_says(
    shapes: list[KindShape], granularity: int
) -> None:
    kinds = kind_pages(shapes, granularity)
    blocks = [kind.in_blocks(16) for kind in kinds]
    for length in (1, 2, 12, 127, 128, 129, 200, 1000, 1024, 1025, 1040, 8000):
        assert counted_bytes(kinds, length, _core.View.VIRTUAL) == held_bytes(kinds, length)
        assert counted_bytes(kinds, length, _core.View.PAGED) == held_bytes(blocks, length)


@pytest.mark.parametrize("window", [1, 5, 8, 21])
@pytest.mark.parametrize("chunk", [1, 3, 8, 13])
def test_the_worst_step_takes_what_the_arithmetic_says(window: int, chunk: int) -> None:
    """Wherever the first chunk ends in a page, the core never takes more; once it takes all."""
    shapes = [KindShape(num_layers=1, token_bytes=512, window=each) for each in (None, window)]
    kinds = kind_pages(shapes, HOST_GRANULARITY, page_tokens=8, block_tokens=8)
    most = 0
    for first in range(1, chunk + 1):
        memory = kinds_memory(kinds, 80, block_tokens=8)
        seq = memory.open(0, _core.View.VIRTUAL)
        assert seq is not None
        for length in [*range(first, 80, chunk), 80]:
            grow_to(memory, seq, length)
            most = max(most, memory.kind_stats()[1].used_pages)
            memory.complete(memory.begun_epoch)
        memory.close()
    assert most == kinds[1].most_pages(80, chunk)


def test_blocks_waste_less_than_one_block_of_each_end() -> None:
    kinds = [kind.in_blocks(16) for kind in kind_pages(GEMMA, HOST_GRANULARITY)]
    whole, windowed = (kind.page_bytes // 16 for kind in kinds)
    for length in range(1, 3000):
        wasted = held_bytes(kinds, length) - needed_bytes(kinds, length)
        assert 0 <= wasted <= 15 * whole + 30 * windowed


def test_equal_pages_of_windows_are_padded_to_whole_groups() -> None:
    """Gemma 3 27B: one group of 10 layers that see all and six for the 52 others."""
    block = 10 * 16 * 8192
    pages = [(kind.page_bytes, kind.page_tokens) for kind in equal_pages(GEMMA)]
    assert pages == [(block, 16), (6 * block, 16)]
    # 12 and 12 layers: nothing is padded.
    kinds = kind_pages(GPT_OSS, HOST_GRANULARITY, page_tokens=16)
    assert [kind.page_bytes for kind in equal_pages(GPT_OSS)] == [k.page_bytes for k in kinds]
    # 12 and 13: groups of 13, not of 12.
    odd = [KindShape(num_layers=n, token_bytes=2048, window=w) for n, w in ((13, None), (12, 128))]
    assert {kind.page_bytes for kind in equal_pages(odd)} == {13 * 16 * 2048}


@pytest.mark.parametrize("chunk", [1, 5, 16, 33])
def test_a_window_is_held_beside_the_chunk_that_is_read(chunk: int) -> None:
    shape = KindShape(num_layers=1, token_bytes=1, window=20)
    for num_tokens in range(1, 120):
        held = [
            -(-min(num_tokens, first + chunk) // 16) - max(0, first - 19) // 16
            for first in range(num_tokens)
        ]
        most = KindPages(shape, 16, 16).most_pages(num_tokens, chunk)
        # The bound is reached where requests are long, whatever chunk comes first.
        assert max(held) <= most <= -(-num_tokens // 16)
        assert num_tokens < 80 or most == max(held)


@pytest.mark.parametrize(
    ("state", "token", "block"),
    [
        # Block sizes that vLLM logs: Qwen3.6-27B, Qwen3.5-0.8B, and Qwen3-Next with bfloat16 state.
        (48 * 128 * 128 * 4 + 10240 * 3 * 2, 4 * 256 * 2 * 2, 784),
        (16 * 128 * 128 * 4 + 6144 * 3 * 2, 2 * 256 * 2 * 2, 544),
        (32 * 128 * 128 * 2 + 8192 * 3 * 2, 2 * 256 * 2 * 2, 544),
    ],
)
def test_equal_pages_grow_until_a_state_fits(state: int, token: int, block: int) -> None:
    shapes = [
        KindShape(num_layers=16, token_bytes=token),
        KindShape(num_layers=48, state_bytes=state),
    ]
    attention, states = equal_pages(shapes)
    assert (attention.page_tokens, attention.page_bytes) == (block, 16 * block * token)
    assert (states.pages(1), states.held_bytes(10**6)) == (1, 48 * block * token)


def test_narrower_layers_get_longer_blocks_or_padding() -> None:
    wide, half, odd = (
        KindShape(num_layers=4, token_bytes=size, window=window)
        for size, window in ((4096, None), (2048, 64), (1536, 128))
    )
    pages = equal_pages([wide, half, odd])
    assert [kind.page_tokens for kind in pages] == [16, 32, 16]
    assert {kind.page_bytes for kind in pages} == {4 * 16 * 4096}


def test_a_state_takes_one_page_of_its_own_size() -> None:
    attention, state = kind_pages(QWEN, HOST_GRANULARITY)
    assert state.held_bytes(1) == state.held_bytes(10**6) == 36 * 2_146_304
    assert attention.page_tokens == 64
    frames = kind_pages(QWEN, CUDA_GRANULARITY)[1]
    assert frames.page_bytes == 37 * CUDA_GRANULARITY  # of all 36 layers together
