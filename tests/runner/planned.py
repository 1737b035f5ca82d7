"""The processor's kernels as a device has them: one operation that a tape replays unseen.

``PlannedCpu`` plans ahead, so that whole steps of either regime can be captured on the CPU. What
it is called with stays in tensors; that nothing else is needed is what the tests show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip
from torch import Tensor

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.rotary import Rotary
from vmserve.memory.views import KVView
from vmserve.numbers.dtypes import DType

__all__ = ["PlannedCpu"]

_VIEWS: dict[int, tuple[CpuBackend, KVView]] = {}


@torch.library.custom_op("vmserve_tests::planned_attention", mutates_args=())
def _attend(
    plan: int,
    layer: int,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    columns: Tensor,
) -> Tensor:
    backend, view = _VIEWS[plan]
    count = int(columns[2, 0])
    places, past = columns[0, :count].numpy(), columns[1, :count].numpy()
    batch = RaggedBatch.build(places, past, np.ones(count, dtype=np.int64))
    n = slice(count)
    out = torch.full_like(q, 1e3)  # what means nothing may be anything
    spec = LayerAttention(layer, scale)
    out[n] = backend.bind(view, batch)(spec, q[n], k[n], v[n], Rotary(cos[n], sin[n]))
    return out


class PlannedCpu(CpuBackend):
    """``CpuBackend`` that plans ahead; ``num_updates`` counts the steps of all its plans."""

    plans_by_length = True

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0
        self.capacities: list[tuple[int, int]] = []

    def plan_capacity(
        self,
        view: KVView,
        *,
        max_seqs: int,
        max_tokens: int,
        max_new: int,
        max_len: int,
        q_heads: int,
        windows: Sequence[int | None],
        dtype: DType,
    ) -> _Plan:
        assert windows == (None,)
        assert max_new == 1
        assert max_seqs == max_tokens
        self.capacities.append((max_tokens, max_len))
        return _Plan(self, view, max_tokens, max_len)


class _Plan:
    def __init__(self, backend: PlannedCpu, view: KVView, max_tokens: int, max_len: int) -> None:
        self.backend = backend
        self.max_tokens, self.max_len = max_tokens, max_len
        self.columns = torch.zeros(3, max_tokens, dtype=torch.int64)
        self.key = len(_VIEWS)
        _VIEWS[self.key] = (backend, view)

    def update(self, batch: RaggedBatch) -> None:
        assert 0 < batch.num_tokens == batch.num_sequences <= self.max_tokens
        assert int(batch.num_past.max()) < self.max_len
        self.backend.num_updates += 1
        self.columns.fill_(-1)
        self.columns[0, : batch.num_tokens] = torch.from_numpy(batch.places)
        self.columns[1, : batch.num_tokens] = torch.from_numpy(batch.num_past)
        self.columns[2, 0] = batch.num_tokens

    def call(
        self,
        spec: LayerAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: Rotary | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert rotary is not None
        found: Tensor = _attend(
            self.key, spec.layer, spec.scale, q, k, v, rotary.cos, rotary.signed_sin, self.columns
        )
        return found if out is None else out.copy_(found)
