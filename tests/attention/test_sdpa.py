"""The SDPA backend against attention in float64, written out position by position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.views import dense_view, fill_past
from vmserve.attention import PREFERRED, create_backend, sdpa
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView

HEAD_DIM = 16


def reference(
    view: ContiguousView, batch: RaggedBatch, spec: LayerAttention, q: torch.Tensor
) -> torch.Tensor:
    """What each query row must get, from the cache's contents, in float64."""
    keys, values = view.keys[spec.layer].double(), view.values[spec.layer].double()
    group = q.shape[1] // keys.shape[2]
    rows = []
    for row in range(batch.num_tokens):
        slot, position = (
            int(torch.from_numpy(batch.token_places)[row]),
            int(torch.from_numpy(batch.positions)[row]),
        )
        first = 0 if spec.window is None else max(0, position + 1 - spec.window)
        k = keys[slot, first : position + 1].repeat_interleave(group, dim=1)
        v = values[slot, first : position + 1].repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[row].double(), k) * spec.scale
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
    return torch.stack(rows)


def random_qkv(
    tokens: int, q_heads: int, kv_heads: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return (2 * torch.randn(tokens, heads, HEAD_DIM, generator=generator)).to(dtype)

    return draw(q_heads), draw(kv_heads), draw(kv_heads)


def check(
    batch: RaggedBatch,
    kv_heads: int,
    group: int,
    windows: tuple[int | None, ...],
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
) -> None:
    max_len = max(p + n for p, n in zip(batch.num_past, batch.num_new, strict=True)) + 3
    view = dense_view(len(windows), max(batch.places) + 2, max_len, kv_heads, HEAD_DIM, dtype)
    fill_past(view, batch, seed=1)
    call = SdpaBackend().bind(view, batch)
    for layer, window in enumerate(windows):
        spec = LayerAttention(layer, scale=1 / math.sqrt(HEAD_DIM), window=window)
        q, k, v = random_qkv(batch.num_tokens, kv_heads * group, kv_heads, seed=layer, dtype=dtype)
        got = call(spec, q, k, v)
        assert got.shape == q.shape
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), reference(view, batch, spec, q), rtol=tolerance, atol=tolerance
        )
        written = view.keys[layer][
            torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions)
        ]
        assert torch.equal(written, k)
        assert torch.equal(
            view.values[layer][
                torch.from_numpy(batch.token_places), torch.from_numpy(batch.positions)
            ],
            v,
        )
    for tensor in (*view.keys, *view.values):
        expected = torch.zeros(tensor.shape[:2], dtype=torch.bool)
        for slot, past, new in zip(batch.places, batch.num_past, batch.num_new, strict=True):
            expected[slot, : past + new] = True
        assert torch.equal(~tensor.isnan().all(-1).all(-1), expected)


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    count = draw(st.integers(1, 5))
    slots = draw(st.permutations(range(count + 2)))[:count]
    past = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    new = draw(st.lists(st.integers(1, 20) | st.just(1), min_size=count, max_size=count))
    return RaggedBatch.build(list(slots), past, new)


@settings(max_examples=60, deadline=None)
@given(
    batch=batches(),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    windows=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3).map(tuple),
)
def test_ragged_batches_match_float64(
    batch: RaggedBatch, kv_heads: int, group: int, windows: tuple[int | None, ...]
) -> None:
    check(batch, kv_heads, group, windows)


def test_a_batch_of_64_decodes() -> None:
    lengths = [3 + 5 * i % 97 for i in range(64)]
    check(RaggedBatch.build(list(range(64)), lengths, [1] * 64), 2, 3, (None, 16))


@pytest.mark.parametrize("past", [0, 7, 300])
def test_chunks_longer_than_a_tile(past: int) -> None:
    rows = 2 * sdpa.TILE_ROWS + 5
    check(RaggedBatch.build([1, 0], [past, 4], [rows, 1]), 1, 2, (None, 50, 10_000))


def test_bfloat16_is_as_exact_as_its_mantissa() -> None:
    batch = RaggedBatch.build([2, 0, 1], [17, 0, 5], [1, 9, 4])
    check(batch, 2, 2, (None, 6), torch.bfloat16, tolerance=2**-6)


def test_a_new_view_is_noticed() -> None:
    backend = SdpaBackend()
    batch = RaggedBatch.build([0], [0], [2])
    spec = LayerAttention(0, scale=1.0)
    q, k, v = random_qkv(2, 2, 1, seed=0)
    outputs = [
        backend.bind(dense_view(1, 1, 4, 1, HEAD_DIM), batch)(spec, q, k, v) for _ in range(2)
    ]
    assert torch.equal(outputs[0], outputs[1])


def test_registry_knows_its_names() -> None:
    on_cpu = PREFERRED["cpu"]
    assert {name: create_backend(name).name for name in on_cpu} == {n: n for n in on_cpu}
    with pytest.raises(
        ConfigurationError, match="cuda has no kernels for the device cpu: use auto"
    ):
        create_backend("cuda", head_dim=128, dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"cuda cannot serve .*: torch sees no GPU here"):
        create_backend("cuda", head_dim=128, dtype=torch.bfloat16, device="cuda")
    assert create_backend("auto").read_slack_tokens == 0
    with pytest.raises(ConfigurationError, match=r"attention_backend: 'fa9' is not one of auto"):
        create_backend("fa9")


@pytest.mark.parametrize(
    ("name", "regime", "head_dim", "dtype", "chosen"),
    [
        ("auto", Regime.VIRTUAL, 64, torch.float32, "cpu"),
        ("auto", Regime.PAGED, 64, torch.bfloat16, "cpu"),
        ("auto", Regime.VIRTUAL, 12, torch.float32, "sdpa"),
        ("auto", Regime.PAGED, 12, torch.float32, "reference"),
        ("auto", Regime.VIRTUAL, 64, torch.float16, "sdpa"),
        ("sdpa", Regime.VIRTUAL, 64, torch.float32, "sdpa"),
        ("sdpa", Regime.PAGED, 64, torch.float32, "cpu"),
        ("sdpa", Regime.PAGED, 584, torch.float32, "reference"),
        ("reference", Regime.PAGED, 64, torch.float32, "reference"),
    ],
)
def test_who_serves_which_heads(
    name: str, regime: Regime, head_dim: int, dtype: torch.dtype, chosen: str
) -> None:
    assert create_backend(name, regime, head_dim, dtype).name == chosen


def test_scores_that_are_capped_need_a_backend_that_caps() -> None:
    layers = [LayerAttention(0, 1.0), LayerAttention(1, 1.0, softcap=30.0)]
    names = [create_backend("auto", Regime.VIRTUAL, dim, layers=layers).name for dim in (64, 12)]
    assert names == ["cpu", "reference"]
    with pytest.raises(UnsupportedError, match=r"1 layers .* at 30, which the sdpa backend"):
        create_backend("sdpa", Regime.VIRTUAL, 64, layers=layers)


def test_a_backend_that_was_asked_for_and_cannot_says_why() -> None:
    with pytest.raises(ConfigurationError, match=r"cpu cannot serve a head_dim of 12 .* use auto"):
        create_backend("cpu", Regime.VIRTUAL, 12)
