"""Every backend that the device has, in both regimes, against attention written out in float64."""

from __future__ import annotations

import pytest

from tests.attention.views import places_of
from tests.support.attention import attention_of
from vmserve.attention import BACKENDS, PREFERRED, create_backend
from vmserve.attention.base import AttentionBackend, LayerAttention, PlansAhead, RaggedBatch
from vmserve.attention.flash import FlashBackend, SlotCall
from vmserve.attention.phases import LEAST_TOKENS, WHOLE_TOKENS, CudnnPrompts
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.layout import plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import contiguous_view, paged_view
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip

pytestmark = pytest.mark.gpu

KV_HEADS, DIM, MAX_LEN = 2, 64, 1024
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
PAST = [0, 3, 100, 700, 31, 512]
CHUNKS = {"decodes": [1] * 6, "chunks": [20, 7, 130, 64, 1, 33]}
#: Decodes around prompts, of which cuDNN takes the beginnings of two.
PHASES_PAST = [100, 0, 700, 0, 0, 31]
PHASES_NEW = [1, LEAST_TOKENS + 77, 40, LEAST_TOKENS + WHOLE_TOKENS, 300, 1]


def available(runtime: TorchRuntime, regime: Regime, dtype: torch.dtype) -> list[AttentionBackend]:
    """Each that can be named, and what auto makes of them where that is another."""
    view = ContiguousView if regime is Regime.VIRTUAL else PagedView
    made = [BACKENDS[name]() for name in PREFERRED[runtime.device.type] if name in BACKENDS]
    found = [b for b in made if view in b.views and b.refusal(DIM, DType.of(dtype)) is None]
    auto = automatic(runtime, regime, dtype)
    return found if auto.name in {b.name for b in found} else [*found, auto]


def automatic(
    runtime: TorchRuntime, regime: Regime, dtype: torch.dtype, window: int | None = None
) -> AttentionBackend:
    layers = [LayerAttention(0, DIM**-0.5, window=window)]
    return create_backend("auto", regime, DIM, dtype, layers, runtime.device.type)


class Rig:
    """Sequences with random pasts in both regimes, and the same numbers dense, in float64."""

    def __init__(
        self,
        runtime: TorchRuntime,
        num_new: list[int],
        dtype: torch.dtype,
        past: list[int] = PAST,
        max_len: int = MAX_LEN,
    ) -> None:
        self.past = past
        pages = runtime.memory()
        layout = plan_layout(
            2, KV_HEADS, DIM, dtype, pages.granularity, layers_per_group=2, block_tokens=16
        )
        slots = 2 * len(past)
        self.memory = MemoryManager(
            layout,
            num_slots=slots,
            max_len=max_len,
            limit_bytes=slots * layout.pages_for(max_len + 256) * layout.total_page_bytes,
            # The pasts are written after their pages are there, and again for each backend.
            options=MemoryOptions(driver=pages, read_slack_tokens=256, seal_read_only=False),
        )
        self.views: dict[Regime, KVView] = {
            Regime.VIRTUAL: contiguous_view(self.memory),
            Regime.PAGED: paged_view(self.memory),
        }
        self.batches = {regime: self._batch(regime, num_new) for regime in Regime}
        self.device, self.dtype = runtime.device, dtype

    def _batch(self, regime: Regime, num_new: list[int]) -> RaggedBatch:
        seqs = []
        for past, new in zip(self.past, num_new, strict=True):
            seq = self.memory.open(regime=regime)
            assert seq is not None
            plan = self.memory.plan([Growth(seq, past + new)])
            assert isinstance(plan, MemoryPlan)
            self.memory.launched(self.memory.apply(plan))
            seqs.append(seq)
        places = seqs if regime is Regime.PAGED else self.memory.slots(seqs).tolist()
        return RaggedBatch.build(places, self.past, num_new)

    def random(self, *shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def inputs(self, batch: RaggedBatch, q_heads: int) -> tuple[torch.Tensor, ...]:
        sizes = enumerate((q_heads, KV_HEADS, KV_HEADS))
        return tuple(self.random(batch.num_tokens, n, DIM, seed=100 + i) for i, n in sizes)

    def fill(self, regime: Regime, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Random pasts in the memory; what they are."""
        view, batch = self.views[regime], self.batches[regime]
        pasts = []
        for index, (place, past) in enumerate(zip(batch.places.tolist(), self.past, strict=True)):
            pair = tuple(
                self.random(past, KV_HEADS, DIM, seed=10 * index + which) for which in (0, 1)
            )
            where = tuple(x.to(self.device) for x in places_of(view, place, torch.arange(past)))
            for tensors, numbers in zip((view.keys, view.values), pair, strict=True):
                tensors[layer][where] = numbers
            pasts.append(pair)
        return pasts  # type: ignore[return-value]


def expected(
    pasts: list[tuple[torch.Tensor, torch.Tensor]],
    batch: RaggedBatch,
    qkv: tuple[torch.Tensor, ...],
    spec: LayerAttention,
) -> torch.Tensor:
    q, *fresh = qkv
    parts = zip(*(each.split(batch.num_new.tolist()) for each in fresh), strict=True)
    sequences = [
        (torch.cat((past[0], new[0])), torch.cat((past[1], new[1])))
        for past, new in zip(pasts, parts, strict=True)
    ]
    return attention_of(batch, sequences, q, spec)[0]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("q_heads", [2, 8])
@pytest.mark.parametrize("shape", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(
    active: TorchRuntime, dtype: torch.dtype, shape: str, q_heads: int, window: int | None
) -> None:
    rig = Rig(active, CHUNKS[shape], dtype)
    spec = LayerAttention(1, DIM**-0.5, window=window)
    for regime in Regime:
        batch, view = rig.batches[regime], rig.views[regime]
        backends = available(active, regime, dtype)
        backends = [b for b in backends if b.windows or window is None]
        assert backends
        for backend in backends:
            pasts = rig.fill(regime, spec.layer)
            q, k, v = rig.inputs(batch, q_heads)
            truth = expected(pasts, batch, (q, k, v), spec)
            out = backend.bind(view, batch)(spec, q.clone(), k.clone(), v.clone())
            check(out, truth, dtype, backend.name)
            if shape == "decodes" and isinstance(backend, PlansAhead):
                sizes = {"max_seqs": 8, "max_tokens": 8, "max_new": 1, "max_len": MAX_LEN}
                plan = backend.plan_capacity(view, **sizes, q_heads=q_heads, windows=(window,))
                plan.update(batch)
                padded = [torch.cat((tensor, tensor[:2])) for tensor in (q, k, v)]
                planned = plan.call(spec, *padded)
                check(planned[: batch.num_tokens], truth, dtype, f"{backend.name}, planned")
    active.synchronize()
    rig.memory.close()


def check(out: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    error = float((out.double() - truth).norm() / truth.norm())
    assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def test_the_gpu_has_stock_flash_attention(active: TorchRuntime) -> None:
    names = {b.name for b in available(active, Regime.VIRTUAL, torch.bfloat16)}
    assert "torch-flash" in names or active.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_part_of_a_step_by_its_kernel(active: TorchRuntime, dtype: torch.dtype) -> None:
    """auto over slots: who serves what, and that all of it is right, twice."""
    backend = automatic(active, Regime.VIRTUAL, dtype)
    on_gpu = active.device.type == "cuda"
    if on_gpu:
        assert isinstance(backend, FlashBackend)
        assert backend.name.startswith("cuda + ")
        windowed = automatic(active, Regime.VIRTUAL, dtype, window=50)
        assert windowed.name.startswith("cuda + ")
        assert "cudnn" not in windowed.name
    rig = Rig(active, PHASES_NEW, dtype, PHASES_PAST, max_len=LEAST_TOKENS + 2 * WHOLE_TOKENS)
    batch, view = rig.batches[Regime.VIRTUAL], rig.views[Regime.VIRTUAL]
    for layer, q_heads in ((0, 8), (1, 2)):
        spec = LayerAttention(layer, DIM**-0.5)
        pasts = rig.fill(Regime.VIRTUAL, layer)
        q, k, v = rig.inputs(batch, q_heads)
        call = backend.bind(view, batch)
        truth = expected(pasts, batch, (q, k, v), spec)
        check(call(spec, q.clone(), k.clone(), v.clone()), truth, dtype, backend.name)
        if not on_gpu:
            continue
        assert isinstance(call, SlotCall)
        served = dict(call.served)
        assert served["cuda"] == 2
        if torch.cuda.get_device_capability()[0] == 9 and "flash-attn-3" not in backend.name:
            assert served["cudnn"] == LEAST_TOKENS + WHOLE_TOKENS
    for kernel in backend.kernels if isinstance(backend, FlashBackend) else ():
        if isinstance(kernel, CudnnPrompts):
            assert kernel.takes(RaggedBatch.build([0], [0], [LEAST_TOKENS]))[0], "it has failed"
    active.synchronize()
    rig.memory.close()
