"""Stock kernels over slots: what they are called with. What comes out: test_stock.py."""

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

from tests.attention.stand_ins import (
    FLASH,
    EmulatedFlash,
    Kvcache,
    Kvcache3,
    emulated_flashinfer,
    flash_op,
    given_to,
)
from tests.attention.views import attention_inputs, dense_view, fill_past
from tests.support.attention import attention, attention_of, sequences_of
from vmserve.attention import BACKENDS, PREFERRED, create_backend
from vmserve.attention.base import LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.flash import LARGEST_TILE, FlashAttn2, FlashAttn3, FlashBackend, TorchFlash
from vmserve.attention.rotary import rotate
from vmserve.attention.slots import SlotTensors
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.base import Regime
from vmserve.memory.views import ContiguousView, PagedView
from vmserve.numbers.dtypes import DType

KV_HEADS, DIM, MAX_LEN = 2, 16, 40
inputs = functools.partial(attention_inputs, kv_heads=KV_HEADS, head_dim=DIM)
BATCHES = {
    "decodes": ([3, 0, 4], [7, 39, 0], [1, 1, 1]),
    "one prompt": ([2], [0], [21]),
    "a chunk after a past": ([1], [17], [9]),
    "mixed": ([4, 1, 0, 2], [12, 30, 0, 5], [1, 8, 11, 1]),
}


def slot_view() -> ContiguousView:
    return dense_view(2, 5, MAX_LEN, KV_HEADS, DIM, spare=8)


def test_decodes_go_apart_from_chunks_and_nothing_is_copied() -> None:
    """Kernels split decodes along the keys."""
    calls: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(given_to(FLASH, args, kwargs))
        return flash_op(*args, **kwargs)

    batch, view = RaggedBatch.build(*BATCHES["mixed"]), slot_view()
    fill_past(view, batch)
    q, k, v, _ = inputs(batch.num_tokens, 4)
    FlashBackend(TorchFlash(recorded)).bind(view, batch)(LayerAttention(0, 0.25), q, k, v)
    found = [(c["max_q"], c["is_causal"], c["seqused_k"].tolist()) for c in calls]
    assert found == [(1, False, [13, 6]), (11, True, [38, 11])]
    assert {each["key"].data_ptr() for each in calls} == {view.keys[0].data_ptr()}


@pytest.mark.parametrize(
    ("name", "by_2", "by_3"),
    [
        ("decodes", [40], [40]),
        ("one prompt", [21], [21]),
        ("a chunk after a past", [26], [26]),
        ("mixed", [13, 38, 38], [13, 38]),
    ],
)
def test_the_kvcache_functions_are_called_as_seldom_as_they_can(
    name: str, by_2: list[int], by_3: list[int]
) -> None:
    """One call for all decodes; chunks of unequal length one after the other where they must be.
    The cache ends with the longest sequence of the call: by it kernels split along the keys."""
    batch = RaggedBatch.build(*BATCHES[name])
    q, k, v, _ = inputs(batch.num_tokens, 4)
    view = slot_view()
    fill_past(view, batch)
    for kernel, calls in ((FlashAttn2(Kvcache()), by_2), (FlashAttn3(Kvcache3()), by_3)):
        FlashBackend(kernel).bind(view, batch)(LayerAttention(0, 0.3), q, k, v)
        assert kernel._function.cache_tokens == calls  # type: ignore[union-attr]


def test_a_plan_serves_batches_of_other_widths_and_writes_nothing_else() -> None:
    """Rows of the padding: never a page that is not the batch's, whatever they hold."""
    backend = FlashBackend(EmulatedFlash())
    assert isinstance(backend, PlansAhead)
    view, expected = slot_view(), slot_view()
    plan = backend.plan_capacity(
        view, max_seqs=4, max_tokens=4, max_new=1, max_len=MAX_LEN, q_heads=4, windows=(None,)
    )
    spec = LayerAttention(0, 0.3)
    for step, (places, past) in enumerate(
        [([1, 3, 0, 2], [3, 8, 0, 39]), ([3], [9]), ([4, 1], [0, 4])]
    ):
        batch, n = RaggedBatch.build(places, past, [1] * len(places)), len(places)
        for each in (view, expected):
            fill_past(each, batch, step)
        q, k, v, rotary = inputs(4, 4, seed=step)
        plan.update(batch)
        out = plan.call(spec, q, k, v, rotary)
        expected.keys[0][places, past] = rotate(k, rotary)[:n]
        expected.values[0][places, past] = v[:n]
        sequences = sequences_of(expected, batch, 0)
        truth, _ = attention_of(batch, sequences, rotate(q, rotary)[:n], spec)
        torch.testing.assert_close(out[:n].double(), truth, rtol=1e-5, atol=1e-5)
        assert not out.isnan().any()
        for part in ("keys", "values"):
            mine, wanted = getattr(view, part), getattr(expected, part)
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
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

    flash_attn_2 = FlashBackend(FlashAttn2(Kvcache()))
    with monkeypatch.context() as patch:
        patch.setitem(BACKENDS, "flash-attn", lambda: flash_attn_2)  # type: ignore[arg-type]
        assert chosen(torch.bfloat16) == "flash-attn"
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


def test_flashinfer_does_not_look_before_the_window_of_a_slot() -> None:
    """Its pages are given up: a slot shows nothing there."""
    batch = RaggedBatch.build([1, 2], [70, 50], [1, 20])
    q, k, v, _ = inputs(batch.num_tokens, 4)
    spec = LayerAttention(0, 0.3, window=20)
    view = dense_view(1, 5, 96, KV_HEADS, DIM)
    fill_past(view, batch)
    whole = ContiguousView((view.keys[0].clone(),), (view.values[0].clone(),))
    for tensor in (*view.keys, *view.values):
        tensor[1, : (70 - 19) // 16 * 16] = float("nan")
        tensor[2, : (50 - 19) // 16 * 16] = float("nan")
    out = emulated_flashinfer().bind(view, batch)(spec, q, k, v)
    for slot, past, rows in ((1, 70, slice(0, 1)), (2, 50, slice(1, 21))):
        whole.keys[0][slot, past : past + len(k[rows])] = k[rows]
        whole.values[0][slot, past : past + len(k[rows])] = v[rows]
    truth, _ = attention_of(batch, sequences_of(whole, batch, 0), q, spec)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)


def test_flashinfer_has_one_plan_for_each_kind_of_layer_and_two_sets_of_plans() -> None:
    """The step after the one that runs must not write over its plan."""
    backend = emulated_flashinfer()
    batch = RaggedBatch.build([0, 1], [5, 9], [1, 1])
    view = dense_view(2, 5, 96, KV_HEADS, DIM)
    fill_past(view, batch)
    q, k, v, _ = inputs(2, 4)
    for step in range(1, 5):
        call = backend.bind(view, batch)
        for _ in range(3):
            call(LayerAttention(0, 0.25), q, k, v)
            call(LayerAttention(1, 0.25, window=8), q, k, v)
        wrappers = [w for turn in backend._wrappers for w in turn.values()]
        assert len(wrappers) == min(2 * step, 4)
        assert sum(wrapper.num_plans for wrapper in wrappers) == 2 * step
    assert {wrapper.num_plans for wrapper in wrappers} == {2}
    assert not isinstance(backend, PlansAhead)
    assert backend.read_slack_tokens == 0


def test_flashinfer_refuses_blocks_at_unequal_distances() -> None:
    batch = RaggedBatch.build([0], [3], [1])
    slots = torch.zeros(2, 40, KV_HEADS, DIM)
    with pytest.raises(UnsupportedError, match="not whole blocks of 16 tokens"):
        emulated_flashinfer().bind(ContiguousView((slots,), (slots,)), batch)
    pages = torch.zeros(4, 24, KV_HEADS, DIM)[:, :16]
    tables = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="use another attention backend"):
        emulated_flashinfer().bind(PagedView.of_one_kind((pages,), (pages,), tables, 8), batch)


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
        rows = zip(q, places.tolist(), lengths.tolist(), strict=True)
        return torch.cat(
            [attention(r[None], keys[p, :n], values[p, :n], scale)[0].to(q) for r, p, n in rows]
        )

    exec(source, {"my_kernels": SimpleNamespace(decode=decode)})
    chosen = create_backend("auto", Regime.VIRTUAL, 128, torch.bfloat16, device="cuda")
    assert chosen.name == "mine"
    assert create_backend("auto", Regime.VIRTUAL, 64, torch.bfloat16, device="cuda").name != "mine"
    batch, view = RaggedBatch.build([3, 1], [4, 30], [1, 1]), slot_view()
    fill_past(view, batch)
    q, k, v, _ = inputs(2, 4)
    spec = LayerAttention(0, 0.3)
    out = chosen.bind(view, batch)(spec, q, k, v)
    truth, _ = attention_of(batch, sequences_of(view, batch, 0), q, spec)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
