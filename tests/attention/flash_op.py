"""``aten::_flash_attention_forward`` for the CPU, by what its documentation says.

Each call is first made with tensors of the "meta" device, so that the real operator's schema and
shape function see the arguments. The rest is attention in float64: of sequence i the keys are
``seqused_k[i]`` tokens from ``cum_seq_k[i]`` on, and the queries are the last of them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vmserve.attention.flash import TorchFlash

__all__ = ["EmulatedFlash", "flash_op"]

REAL: Any = torch.ops.aten._flash_attention_forward.default


class EmulatedFlash(TorchFlash):
    """The backend's kernel over the emulation, in any dtype."""

    def __init__(self) -> None:
        super().__init__(flash_op)

    def refusal(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return None


def flash_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """As the operator; only the output and the logarithms of the sums are meant."""
    shapes = REAL(
        *(_meta(arg) for arg in args), **{name: _meta(arg) for name, arg in kwargs.items()}
    )
    names = [argument.name for argument in REAL._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    assert given["dropout_p"] == 0.0
    assert not given["return_debug_mask"]
    assert given.get("alibi_slopes") is None
    for name in ("cum_seq_q", "cum_seq_k", "seqused_k"):
        assert given[name].dtype == torch.int32, name
    for name in ("query", "key", "value"):
        assert given[name].stride(-1) == 1, name
    output, lse = _attend(
        given["query"],
        given["key"],
        given["value"],
        given["cum_seq_q"],
        given["cum_seq_k"],
        given["max_q"],
        given["max_k"],
        given["is_causal"],
        given["scale"],
        given["window_size_left"],
        0 if given["is_causal"] else given["window_size_right"],
        given["seqused_k"],
    )
    assert [each.shape for each in (output, lse)] == [each.shape for each in shapes[:2]]
    return (output, lse, *(torch.empty(0) for _ in range(3)))


def _meta(value: Any) -> Any:
    return (
        value.to("meta", torch.bfloat16 if value.is_floating_point() else value.dtype)
        if (isinstance(value, Tensor))
        else value
    )


@torch.library.custom_op("vmserve_tests::flash_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    scale: float,
    left: int,
    right: int,
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """One operation, as on a device: a tape replays it without looking inside."""
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[1::-1], math.inf)
    starts_q, starts_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    group = query.shape[1] // key.shape[1]
    for i, length in enumerate(seqused_k.tolist()):
        rows = slice(starts_q[i], starts_q[i + 1])
        num_rows = rows.stop - rows.start
        assert num_rows <= max_q, "more queries than max_q"
        assert length <= max_k, "more keys than max_k"
        if length == 0 or num_rows == 0:
            continue
        tokens = slice(starts_k[i], starts_k[i] + length)
        keys = key[tokens].double().repeat_interleave(group, dim=1)
        values = value[tokens].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys) * scale
        last = torch.arange(length - num_rows, length)[:, None]
        position = torch.arange(length)
        hidden = torch.zeros(num_rows, length, dtype=torch.bool)
        if right >= 0:
            hidden |= position > last + right
        if left >= 0:
            hidden |= position < last - left
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, rows] = scores.logsumexp(dim=-1).float()
        weights = scores.softmax(dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output, lse
