"""FlashAttention over slots: what it is called with, and what comes out of an emulated one."""

from __future__ import annotations

import functools
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.attention.flash_op import EmulatedFlash, flash_op
from tests.attention.views import attention_inputs, fill_past
from vmserve.attention import BACKENDS, PREFERRED, create_backend
from vmserve.attention.base import LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.flash import (
    LARGEST_TILE,
    FlashAttn2,
    FlashAttn3,
    FlashBackend,
    TorchFlash,
)
from vmserve.attention.reference import ReferenceBackend
from vmserve.attention.slots import SlotTensors
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView
from vmserve.numbers.dtypes import DType

SLOTS, MAX_LEN, TOKENS, KV_HEADS, DIM = 5, 40, 48, 2, 16


def slot_view(fill: float = float("nan"), layers: int = 2) -> ContiguousView:
    """Slots 48 tokens apart, of which 40 are theirs; K beside V, two layers for each token."""
    shape = (SLOTS, TOKENS, layers, 2, KV_HEADS, DIM)
    pool = torch.full(shape, fill)
    keys = tuple(pool[:, :MAX_LEN, layer, 0] for layer in range(layers))
    values = tuple(pool[:, :MAX_LEN, layer, 1] for layer in range(layers))
    return ContiguousView(keys, values)


#: Far below a row's scores, among them, and far above.
SINKS = torch.tensor([-30.0, -2.0, 0.0, 1.0, 3.0, 40.0])
inputs = functools.partial(attention_inputs, kv_heads=KV_HEADS, head_dim=DIM)


BATCHES = {
    "decodes": ([3, 0, 4], [7, 39, 0], [1, 1, 1]),
    "one prompt": ([2], [0], [21]),
    "a chunk behind a past": ([1], [17], [9]),
    "mixed": ([4, 1, 0, 2], [12, 30, 0, 5], [1, 8, 11, 1]),
}


@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize(("q_heads", "sinks"), [(2, None), (6, None), (6, SINKS)])
@pytest.mark.parametrize("name", BATCHES)
def test_the_same_as_the_reference(
    name: str, q_heads: int, sinks: torch.Tensor | None, window: int | None
) -> None:
    """What lies past a sequence's length is NaN throughout, and does not tell."""
    batch = RaggedBatch.build(*BATCHES[name])
    q, k, v, rotary = inputs(batch.num_tokens, q_heads)
    spec = LayerAttention(1, 0.3, window=window, sinks=sinks)
    results = []
    for backend in (FlashBackend(EmulatedFlash()), ReferenceBackend()):
        view = slot_view()
        fill_past(view, batch)
        out = backend.bind(view, batch)(spec, q.clone(), k.clone(), v.clone(), rotary)  # type: ignore[arg-type]
        results.append((out, view))
    (out, view), (expected, reference_view) = results
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(view.keys + view.values, reference_view.keys + reference_view.values,
                           strict=True):  # fmt: skip
        assert torch.equal(mine.isnan(), other.isnan())
        assert torch.allclose(mine.nan_to_num(), other.nan_to_num())


class Recording:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]
        self.calls.append(dict(zip(names, args, strict=False)) | kwargs)
        return flash_op(*args, **kwargs)


def test_decodes_go_apart_from_chunks_and_nothing_is_copied() -> None:
    """Kernels split decodes along the keys."""
    seen = Recording()
    batch = RaggedBatch.build(*BATCHES["mixed"])
    view = slot_view(0.0)
    call = FlashBackend(TorchFlash(seen)).bind(view, batch)
    q, k, v, _ = inputs(batch.num_tokens, 4)
    call(LayerAttention(0, 0.25), q, k, v)
    found = [(c["max_q"], c["is_causal"], c["seqused_k"].tolist()) for c in seen.calls]
    assert found == [(1, False, [13, 6]), (11, True, [38, 11])]
    assert {each["key"].data_ptr() for each in seen.calls} == {view.keys[0].data_ptr()}


class RecordingKvcache:
    """``flash_attn_with_kvcache`` as flash-attn documents it, by way of the emulation."""

    def __init__(self) -> None:
        #: Tokens of the cache in each call.
        self.cache_tokens: list[int] = []

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        cache_batch_idx: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_softmax_lse: bool = False,
        **ragged: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        self.cache_tokens.append(k_cache.shape[1])
        assert softcap == 0.0
        q_starts, rows = self.queries(q, len(cache_seqlens), **ragged)
        tensors = SlotTensors(ContiguousView((k_cache,), (v_cache,)))
        out = flash_op(
            q.reshape(-1, *q.shape[-2:]),
            tensors.flat_keys[0],
            tensors.flat_values[0],
            q_starts,
            torch.cat((cache_batch_idx * tensors.slot_tokens, cache_batch_idx[:1])),
            rows,
            int(cache_seqlens.max()),
            0.0,
            causal,
            False,
            scale=softmax_scale,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
            seqused_k=cache_seqlens,
        )
        if not return_softmax_lse:
            return out[0].view(q.shape)
        lse = out[
            1
        ]  # [heads, queries]; of equally many of each sequence [sequences, heads, queries]
        if q.ndim == 4:
            lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return out[0].view(q.shape), lse

    def queries(self, q: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, int]:
        """Equally many of each sequence: where each one's begin, and how many."""
        batch, rows = q.shape[:2]
        assert batch == num_sequences
        return torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32), rows


class RecordingKvcache3(RecordingKvcache):
    """The function of FlashAttention 3, which takes queries one after the other, too."""

    def queries(
        self,
        q: torch.Tensor,
        num_sequences: int,
        *,
        cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int = 0,
    ) -> tuple[torch.Tensor, int]:
        if cu_seqlens_q is None:
            return super().queries(q, num_sequences)
        assert (q.ndim, len(cu_seqlens_q)) == (3, num_sequences + 1)
        return cu_seqlens_q, max_seqlen_q


@pytest.mark.parametrize(
    ("kind", "function"),
    [(FlashAttn2, RecordingKvcache()), (FlashAttn3, RecordingKvcache3())],
    ids=["flash-attn", "flash-attn-3"],
)
@pytest.mark.parametrize("sinks", [None, SINKS[1:5]], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", BATCHES)
def test_the_kvcache_functions(
    name: str, sinks: torch.Tensor | None, kind: type[FlashAttn2], function: RecordingKvcache
) -> None:
    function.cache_tokens.clear()
    batch = RaggedBatch.build(*BATCHES[name])
    q, k, v, rotary = inputs(batch.num_tokens, 4)
    spec = LayerAttention(0, 0.3, sinks=sinks)
    views = [slot_view(), slot_view()]
    for view in views:
        fill_past(view, batch)
    out = FlashBackend(kind(function)).bind(views[0], batch)(spec, q, k, v, rotary)  # type: ignore[arg-type]
    expected = ReferenceBackend().bind(views[1], batch)(spec, q, k, v, rotary)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # One call for all decodes; chunks of unequal length one after the other where they must be. The
    # cache ends with the longest sequence of the call: by it kernels split along the keys.
    assert (
        function.cache_tokens
        == {
            "decodes": [40],
            "one prompt": [21],
            "a chunk behind a past": [26],
            "mixed": [13, 38] if kind is FlashAttn3 else [13, 38, 38],
        }[name]
    )


def test_a_plan_serves_batches_of_other_widths_and_writes_nothing_else() -> None:
    """Rows of the padding: never a page that is not the batch's, whatever they hold."""
    backend = FlashBackend(EmulatedFlash())
    assert isinstance(backend, PlansAhead)
    view, expected_view = slot_view(), slot_view()
    plan = backend.plan_capacity(
        view, max_seqs=4, max_tokens=4, max_new=1, max_len=MAX_LEN, q_heads=4, windows=(None,)
    )
    spec = LayerAttention(0, 0.3)
    for step, (places, past) in enumerate(
        [([1, 3, 0, 2], [3, 8, 0, 39]), ([3], [9]), ([4, 1], [0, 4])]
    ):
        batch = RaggedBatch.build(places, past, [1] * len(places))
        for each in (view, expected_view):
            fill_past(each, batch, step)
        q, k, v, rotary = inputs(4, 4, seed=step)
        plan.update(batch)
        out = plan.call(spec, q, k, v, rotary)  # type: ignore[arg-type]
        n = len(places)
        expected = ReferenceBackend().bind(expected_view, batch)(
            spec,
            q[:n],
            k[:n],
            v[:n],
            rotary.rows(0, n),  # type: ignore[attr-defined]
        )
        torch.testing.assert_close(out[:n], expected, rtol=1e-5, atol=1e-5)
        assert not out.isnan().any()
        for mine, other in zip(view.keys + view.values, expected_view.keys + expected_view.values,
                               strict=True):  # fmt: skip
            assert torch.equal(mine.isnan(), other.isnan())
            assert torch.allclose(mine.nan_to_num(), other.nan_to_num())
    out = torch.full((4, 4, DIM), 7.0)
    assert plan.call(spec, q, k, v, None, out=out) is out


def test_a_batch_that_does_not_fit_its_plan_is_refused() -> None:
    backend, view = FlashBackend(EmulatedFlash()), slot_view()
    sizes: dict[str, Any] = {"max_len": 20, "q_heads": 2, "windows": (None,)}
    plan = backend.plan_capacity(view, max_seqs=2, max_tokens=2, max_new=1, **sizes)
    for batch in (([0, 1, 2], [1, 1, 1], [1, 1, 1]), ([0], [20], [1]), ([0], [0], [2])):
        with pytest.raises(ValueError, match="do not fit a plan for 2 sequences of 20"):
            plan.update(RaggedBatch.build(*batch))
    with pytest.raises(UnsupportedError, match="one token of each sequence, not 4"):
        backend.plan_capacity(view, max_seqs=2, max_tokens=8, max_new=4, **sizes)


def test_more_tokens_than_32_bits_count_are_refused() -> None:
    like = torch.empty(0)
    tensor = like.new_empty(1, 1, 1, 8).as_strided((1, 1, 1, 8), (2**31 * 8, 8, 8, 1))
    with pytest.raises(ConfigurationError, match="2,147,483,648, and kernels address less than"):
        SlotTensors(ContiguousView((tensor,), (tensor,)))


@pytest.mark.parametrize(
    ("kernel", "dim", "dtype", "why"),
    [
        (TorchFlash(), 64, DType.FLOAT32, "has no float32"),
        (TorchFlash(), 20, DType.BFLOAT16, "multiple of 8 up to 256"),
        (TorchFlash(), 264, DType.FLOAT16, "multiple of 8 up to 256"),
        (FlashAttn2(), 64, DType.FLOAT16, "flash_attn is not installed"),
        (FlashAttn3(), 64, DType.FLOAT16, "flash_attn_interface is not installed"),
    ],
)
def test_refusals(kernel: Any, dim: int, dtype: DType, why: str) -> None:
    assert why in (FlashBackend(kernel).refusal(dim, dtype) or "")
    assert TorchFlash().refusal(128, DType.BFLOAT16) is None


def test_whole_tiles_are_read_where_another_flash_attention_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def active(name: str | None) -> FlashBackend:
        current = {"current_flash_attention_impl": lambda: name}
        monkeypatch.setattr("torch.nn.attention", SimpleNamespace(**current))
        return FlashBackend(TorchFlash())

    assert active(None).read_slack_tokens == 0
    assert active("FA3").read_slack_tokens == LARGEST_TILE
    monkeypatch.setattr("torch.nn.attention", SimpleNamespace())  # torch before it could
    assert FlashBackend(TorchFlash()).read_slack_tokens == 0


def installed(monkeypatch: pytest.MonkeyPatch, *left_out: str, by: str = "flash_attn") -> None:
    """A build of FlashAttention 3 by another name, behind the name that is looked for."""

    def flash_attn_with_kvcache() -> None: ...

    flash_attn_with_kvcache.__module__ = f"{by}_interface"
    interface = ModuleType("flash_attn_interface")
    interface.__spec__ = ModuleSpec("flash_attn_interface", None)
    interface.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    config = ModuleType(f"{by}_config")
    every = ("FP16", "LOCAL", "SOFTCAP", "VARLEN", "PAGEDKV", "HDIM64", "HDIM192", "HDIM256")
    flags = {f"FLASHATTENTION_DISABLE_{name}": name in left_out for name in every}
    config.CONFIG = {"build_flags": flags | {"FLASHATTENTION_ENABLE_VCOLMAJOR": True}}  # type: ignore[attr-defined]
    for module in (interface, config):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_builds_of_flash_attention_3_tell_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    windowed = [LayerAttention(0, 0.1, window=8)]

    def chosen(dtype: torch.dtype, dim: int = 128, layers: Any = ()) -> str:
        return create_backend("auto", Regime.VIRTUAL, dim, dtype, layers, device="cuda").name

    installed(monkeypatch)
    assert chosen(torch.float16, 256, windowed) == "flash-attn-3"
    installed(monkeypatch, "FP16", "LOCAL", "PAGEDKV", "HDIM64", by="fa3_fwd")
    assert chosen(torch.bfloat16) == chosen(torch.bfloat16, 64) == "flash-attn-3"
    assert chosen(torch.bfloat16, 256) == "flash-attn-3"
    assert chosen(torch.float16) == "torch-flash"
    assert chosen(torch.bfloat16, layers=windowed) == "torch-flash"
    with pytest.raises(UnsupportedError, match="a window of positions, which the flash-attn-3"):
        create_backend("flash-attn-3", Regime.VIRTUAL, 128, torch.bfloat16, windowed, "cuda")
    installed(monkeypatch, "HDIM192", "HDIM256", "SOFTCAP")
    assert FlashAttn3().refusal(192, DType.BFLOAT16) == "this build has no heads of 192"
    assert FlashAttn3().refusal(128, DType.FLOAT16) is None
    assert not FlashBackend(FlashAttn3()).softcap
    installed(monkeypatch, "VARLEN")
    assert "no lengths" in (FlashAttn3().refusal(128, DType.BFLOAT16) or "")


def test_a_package_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError(f"{name}: undefined symbol\nand more")

    installed(monkeypatch)
    monkeypatch.setattr("importlib.import_module", broken)
    refusal = FlashAttn3().refusal(128, DType.BFLOAT16)
    assert refusal == (
        "the package flash_attn_interface does not load: flash_attn_interface: undefined symbol"
    )


def test_auto_chooses_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(regime: Regime, dtype: torch.dtype, dim: int = 64) -> str:
        return create_backend("auto", regime, dim, dtype, device="cuda").name

    assert chosen(Regime.VIRTUAL, torch.bfloat16) == "torch-flash"
    assert chosen(Regime.VIRTUAL, torch.float32) == "sdpa"
    assert chosen(Regime.VIRTUAL, torch.bfloat16, 20) == "sdpa"
    installed = FlashBackend(FlashAttn2(RecordingKvcache()))
    monkeypatch.setitem(BACKENDS, "flash-attn", lambda: installed)  # type: ignore[arg-type]
    assert chosen(Regime.VIRTUAL, torch.bfloat16) == "flash-attn"
    with pytest.raises(ConfigurationError, match="torch-flash has no kernels for the device cpu"):
        create_backend("torch-flash")
    with pytest.raises(ConfigurationError, match="cpu has no kernels for the device cuda"):
        create_backend("cpu", device="cuda")
    with pytest.raises(ConfigurationError, match="64 in float32: FlashAttention has no float32"):
        create_backend("torch-flash", device="cuda")


def test_the_example_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/kernels.md: a kernel of one's own, registered and chosen."""
    text = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    source = text.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr("vmserve.attention.BACKENDS", dict(BACKENDS))
    monkeypatch.setattr("vmserve.attention.PREFERRED", dict(PREFERRED))

    def decode(
        q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *args: Any
    ) -> torch.Tensor:
        places, lengths, scale = args
        function = RecordingKvcache()
        out = function(
            q[:, None], keys, values, cache_seqlens=lengths, cache_batch_idx=places,
            softmax_scale=scale, causal=False, window_size=(-1, -1), softcap=0.0,
        )  # fmt: skip
        return out[:, 0]

    exec(source, {"my_kernels": SimpleNamespace(decode=decode)})
    chosen = create_backend("auto", Regime.VIRTUAL, 128, torch.bfloat16, device="cuda")
    assert chosen.name == "mine"
    assert create_backend("auto", Regime.VIRTUAL, 64, torch.bfloat16, device="cuda").name != "mine"
    batch, view, expected_view = (
        RaggedBatch.build([3, 1], [4, 30], [1, 1]),
        slot_view(),
        slot_view(),
    )
    for each in (view, expected_view):
        fill_past(each, batch)
    q, k, v, _ = inputs(2, 4)
    spec = LayerAttention(0, 0.3)
    expected = ReferenceBackend().bind(expected_view, batch)(spec, q, k, v)
    torch.testing.assert_close(chosen.bind(view, batch)(spec, q, k, v), expected)
