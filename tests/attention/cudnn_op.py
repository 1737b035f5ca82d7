"""``aten::_scaled_dot_product_cudnn_attention`` for the CPU: the plain causal case.

As :mod:`tests.attention.flash_op`, it shows its arguments to the real operator's schema first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CudnnOp"]

REAL: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default


class CudnnOp:
    """``failing``: what it raises instead."""

    def __init__(self, failing: Exception | None = None) -> None:
        self.failing = failing
        #: Of each call: the address of the keys, and how many there are.
        self.calls: list[tuple[int, int]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        meta = [arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args]
        shape = REAL(*meta, **kwargs)[0].shape
        names = [argument.name for argument in REAL._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = given["query"], given["key"], given["value"]
        self.calls.append((key.data_ptr(), key.shape[2]))
        if self.failing is not None:
            raise self.failing
        assert given["is_causal"]
        assert (given["attn_bias"], given["dropout_p"]) == (None, 0.0)
        assert not given["compute_log_sumexp"]
        assert not given["return_debug_mask"]
        assert query.shape[2] == key.shape[2] == value.shape[2]
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in tensor.stride()[1:3]), "16 bytes"
        group = query.shape[1] // key.shape[1]
        keys, values = (each.double().repeat_interleave(group, 1) for each in (key, value))
        scores = query.double() @ keys.transpose(-1, -2) * given["scale"]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        output = torch.empty_like(query)
        output.copy_(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values)
        assert output.shape == shape
        return output, *[None] * 8
