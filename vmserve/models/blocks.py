"""The pieces that a decoder is put together from; each holds weights and computes.

All of them take ``[tokens, features]`` and round where the implementation in ``transformers``
rounds, so that half-precision results differ by the order of sums only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional as F

from vmserve.models.decoder_config import ExpertsConfig

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Apart",
    "ClampedMlp",
    "ExpertRouter",
    "Experts",
    "Gate",
    "GateKernel",
    "GatedMlp",
    "GroupRouter",
    "Joined",
    "LatentProjections",
    "LayerKernels",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "Mlp",
    "Norm",
    "PlainMlp",
    "Products",
    "Projections",
    "RmsNorm",
    "RmsNormKernel",
    "StackedExperts",
    "add_and_norm",
    "gelu_new",
]

#: An activation, which may overwrite its argument.
Activation = Callable[[torch.Tensor], torch.Tensor]
#: q, k and v, and the gates, by whose sigmoid attention is multiplied.
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight`` ``[out, in]`` (any strides) and ``bias`` ``[out]``, as in ``torch.nn.Linear``."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Apart:
    """Several products of one input."""

    linears: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(linear(x) for linear in self.linears)


@dataclass(frozen=True, slots=True)
class Joined:
    """The same in one product, which gives ``sizes`` columns of each: fewer and larger launches."""

    linear: Linear
    sizes: tuple[int, ...]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.split_with_sizes(self.linear(x), self.sizes, dim=-1))


Products = Apart | Joined


# -- kernels that replace several of torch's operations -------------------------------------


class RmsNormKernel(Protocol):
    """:class:`vmserve.attention.cuda.layers.NormKernel`."""

    def takes(self, x: torch.Tensor) -> bool: ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...


class GateKernel(Protocol):
    """:class:`vmserve.attention.cuda.layers.GateKernel`."""

    def takes(self, gate: torch.Tensor, up: torch.Tensor) -> bool: ...

    def __call__(
        self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class LayerKernels(Protocol):
    """:class:`vmserve.attention.cuda.layers.LayerKernels`."""

    @property
    def norm(self) -> RmsNormKernel: ...

    def gate(self, activation: str) -> GateKernel | None: ...


# -- normalisation ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    In half precision the reference rounds twice: after the normalisation in float32, and
    after the weight; but once if weights are float32. ``kernel`` does the former in one launch.
    """

    weight: torch.Tensor
    eps: float
    kernel: RmsNormKernel | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel is not None and self.kernel.takes(x):
            return self.kernel(x, None, self.weight, self.eps)
        if self.weight.dtype == torch.float32:
            wide = x.to(torch.float32)
            return F.rms_norm(wide, self.weight.shape, self.weight, self.eps).to(x.dtype)
        normalised = F.rms_norm(x.to(torch.float32), self.weight.shape, None, self.eps)
        return normalised.to(x.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """LayerNorm (Ba et al. 2016) over the last dimension; without weights it only normalises."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


Norm = RmsNorm | LayerNorm


def add_and_norm(
    norm: Norm | None, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + residual`` in the memory of ``x``, and its norm; all ``[tokens, size]``."""
    if isinstance(norm, RmsNorm) and norm.kernel is not None and norm.kernel.takes(x):
        return x, norm.kernel(x, residual.contiguous(), norm.weight, norm.eps)
    x = x.add_(residual)
    return x, x if norm is None else norm(x)


# -- positions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A vector per position, added to the embedding; ``weight`` ``[offset + positions, hidden]``.

    OPT's table starts with ``offset`` = 2 rows that no position uses.
    """

    weight: torch.Tensor
    offset: int

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset if self.offset else positions, self.weight)


# -- queries, keys, values ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Projections:
    """``x`` to q, k and v, each ``[tokens, heads, head_dim]``.

    ``query_scale``: OPT scales (and rounds) the queries here, not the scores in attention.
    ``gated``: each head's query is followed by its gate.
    """

    qkv: Products
    q_heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    query_scale: float | None = None
    gated: bool = False

    def __call__(self, x: torch.Tensor) -> Heads:
        tokens, dim = x.shape[0], self.head_dim
        q, k, v = self.qkv(x)
        gate = None
        q = q.view(tokens, self.q_heads, -1)
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        k, v = k.view(tokens, self.kv_heads, dim), v.view(tokens, self.kv_heads, dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.query_scale is not None:
            q.mul_(self.query_scale)
        return q, k, v, gate


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """``x`` to q ``[tokens, heads, rotated + rank]`` and k ``[tokens, 1, rotated + rank]``, whose
    latents are v (DeepSeek-V2, 2024, section 2.1).

    ``q_down``: of the queries' latent, with its norm. ``key_up`` ``[heads, rank, plain]``: makes a
    product with a head's key one with the latent.
    """

    q_down: tuple[Linear, Norm] | None
    q: Linear
    kv_down: Linear
    kv_norm: Norm
    key_up: torch.Tensor
    rotated: int

    def __call__(self, x: torch.Tensor) -> Heads:
        heads, rank, plain = self.key_up.shape
        below = x
        if self.q_down is not None:
            down, norm = self.q_down
            below = norm(down(x))
        queries = self.q(below).view(len(x), heads, plain + self.rotated)
        q_plain, q_rotated = torch.split(queries, [plain, self.rotated], dim=-1)
        q = torch.cat((q_rotated, torch.einsum("thp,hrp->thr", q_plain, self.key_up)), dim=-1)
        latent, k_rotated = torch.split(self.kv_down(x), [rank, self.rotated], dim=-1)
        k = torch.cat((k_rotated, self.kv_norm(latent)), dim=-1).unsqueeze(1)
        return q, k, k[..., self.rotated :], None


# -- MLP ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gate:
    """The activation of one half, times the other. ``kernel`` does both in one launch."""

    activation: Activation
    kernel: GateKernel | None = None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """May overwrite ``gate``, whose memory the result may have."""
        if self.kernel is not None and self.kernel.takes(gate, up):
            return self.kernel(gate, up)
        return self.activation(gate).mul_(up)

    def contiguous(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The same, contiguous."""
        if self.kernel is not None and self.kernel.takes(gate, up):
            return self.kernel(gate, up, gate.new_empty(gate.shape))
        return self.activation(gate.contiguous()).mul_(up)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU (Shazeer 2020) and its relatives with another activation."""

    gate_up: Products
    down: Linear
    gate: Gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate(*self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class PlainMlp:
    up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True, slots=True)
class ClampedMlp:
    """An expert of gpt-oss: outputs of ``gate_up`` alternate between gate and up."""

    gate_up: Linear
    down: Linear
    alpha: float
    limit: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        gate = both[..., 0::2].clamp(max=self.limit)
        up = both[..., 1::2].clamp(min=-self.limit, max=self.limit)
        return self.down((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


@dataclass(frozen=True, slots=True)
class ExpertRouter:
    """Chooses experts for each row: those of its largest products with ``weight``.

    ``weight``: ``[experts, hidden]``; ``normalised``: weights of the chosen add up to 1.
    """

    weight: torch.Tensor
    chosen: int
    normalised: bool
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of the chosen, ``[tokens, chosen]``, largest first."""
        logits = F.linear(x, self.weight, self.bias)
        weights, ids = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), self.chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), ids


@dataclass(frozen=True, slots=True)
class GroupRouter:
    """Chooses experts of the best groups, as ``ExpertsConfig`` has it; scores are float32.

    ``correction``: ``[experts]`` in float32, of scores that choose.
    """

    weight: torch.Tensor
    rule: ExpertsConfig
    correction: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`ExpertRouter.__call__`."""
        rule = self.rule
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if rule.sigmoid else logits.softmax(-1)
        choosing = scores if self.correction is None else scores + self.correction
        if rule.groups > 1:
            by_group = choosing.view(len(x), rule.groups, rule.count // rule.groups)
            best = by_group.topk(rule.group_best).values.sum(-1).topk(rule.chosen_groups).indices
            others = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(
                1, best, value=False
            )
            choosing = by_group.masked_fill(others.unsqueeze(-1), -math.inf).view_as(scores)
        ids = choosing.topk(rule.chosen).indices
        weights = scores.gather(1, ids)
        if rule.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * rule.scale).to(x.dtype), ids


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs that compute the rows that chose them, one after the other."""

    router: ExpertRouter | GroupRouter
    mlps: tuple[GatedMlp | ClampedMlp, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        out = x.new_empty(*ids.shape, x.shape[1])
        for expert in torch.unique(ids).tolist():
            rows, ranks = torch.where(ids == expert)
            out[rows, ranks] = self.mlps[expert](x[rows])
        return out.mul_(weights[:, :, None]).sum(1)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The same in three launches for all experts, without waiting for the router.

    ``gate_up``: ``[experts, 2 * size, hidden]``; ``down``: ``[experts, hidden, size]``.
    """

    router: ExpertRouter | GroupRouter
    gate_up: torch.Tensor
    down: torch.Tensor
    gate: Gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x)
        experts, order = ids.flatten().sort(stable=True)
        numbers = torch.arange(len(self.gate_up), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        rows = x[order // ids.shape[1]]
        gate, up = F.grouped_mm(rows, self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        gated = self.gate.contiguous(gate, up)
        out = torch.empty_like(rows)
        out[order] = F.grouped_mm(gated, self.down.mT, offs=ends)
        return out.view(*ids.shape, -1).mul_(weights[:, :, None]).sum(1)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Experts, and one more that computes every row; ``gate``: the sigmoid of its product weighs
    that."""

    experts: Experts | StackedExperts
    shared: GatedMlp
    gate: Linear | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.shared(x)
        if self.gate is not None:
            shared = torch.sigmoid(self.gate(x)) * shared
        return self.experts(x).add_(shared)


Mlp = GatedMlp | PlainMlp | Experts | StackedExperts | SharedExpert


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU by a tanh (Hendrycks and Gimpel 2016), as GPT-2 has it.

    The reference computes it operation by operation, and each one rounds; in float32 that
    is within a few units in the last place of torch's own, which is a single pass.
    """
    if x.dtype == torch.float32:
        return F.gelu(x, approximate="tanh")
    inner = x.pow(3.0).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return x.mul_(0.5).mul_(inner.tanh_().add_(1.0))


#: Activations by the name in config.json.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu_,
    "silu": partial(F.silu, inplace=True),
    "swish": partial(F.silu, inplace=True),
    "tanh": torch.tanh_,
}
