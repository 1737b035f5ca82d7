"""Libraries' attention for a processor, by what their documentation says, in float64.

The operators of torch are first called with tensors of the "meta" device, so that the real
operator's schema and shape function see the arguments.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.support.attention import attention
from vmserve.attention.flash import TorchFlash
from vmserve.attention.flashinfer import FlashInferBackend

__all__ = ["CudnnOp", "EmulatedFlash", "Kvcache", "Kvcache3", "emulated_flashinfer", "flash_op"]

FLASH: Any = torch.ops.aten._flash_attention_forward.default
CUDNN: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default


def given_to(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name."""
    names = [argument.name for argument in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def shapes_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The shapes of what the real operator would return."""

    def meta(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to("meta", torch.bfloat16 if value.is_floating_point() else value.dtype)

    found = op(*map(meta, args), **{name: meta(value) for name, value in kwargs.items()})
    return [each.shape for each in found if isinstance(each, Tensor)]


class EmulatedFlash(TorchFlash):
    """The backend's kernel over the emulation, in any dtype."""

    def __init__(self) -> None:
        super().__init__(flash_op)

    def refusal(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return None


def flash_op(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_forward``, of which only the output and the logarithms of the sums
    are meant: of sequence i the keys are ``seqused_k[i]`` tokens from ``cum_seq_k[i]`` on, and the
    queries are the last of them."""
    shapes, given = shapes_of(FLASH, args, kwargs), given_to(FLASH, args, kwargs)
    assert given["dropout_p"] == 0.0
    assert not given["return_debug_mask"]
    assert given.get("alibi_slopes") is None
    for name in ("cum_seq_q", "cum_seq_k", "seqused_k"):
        assert given[name].dtype == torch.int32, name
    for name in ("query", "key", "value"):
        assert given[name].stride(-1) == 1, name
    if not given["is_causal"]:
        assert given["window_size_right"] == -1
    names = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal")
    tensors = [given[name] for name in (*names, "scale", "window_size_left", "seqused_k")]
    output, lse = _attend(*tensors)
    assert [output.shape, lse.shape] == shapes[:2]
    return (output, lse, *(torch.empty(0) for _ in range(3)))


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
    seqused_k: Tensor,
) -> tuple[Tensor, Tensor]:
    """One operation, as on a device: a tape replays it without looking inside."""
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[1::-1], math.inf)
    starts_q, starts_k = cum_seq_q.tolist(), cum_seq_k.tolist()
    for i, length in enumerate(seqused_k.tolist()):
        rows, tokens = slice(*starts_q[i : i + 2]), slice(starts_k[i], starts_k[i] + length)
        assert rows.stop - rows.start <= max_q, "more queries than max_q"
        assert length <= max_k, "more keys than max_k"
        if length == 0 or rows.stop == rows.start:
            continue
        window = None if left < 0 else left + 1
        output[rows], lse[:, rows] = attention(
            query[rows], key[tokens], value[tokens], scale, window, causal=is_causal
        )
    return output, lse


class CudnnOp:
    """``aten::_scaled_dot_product_cudnn_attention``, the plain causal case.

    ``failing``: what it raises instead.
    """

    def __init__(self, failing: Exception | None = None) -> None:
        self.failing = failing
        #: Of each call: the address of the keys, and how many there are.
        self.calls: list[tuple[int, int]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        shapes, given = shapes_of(CUDNN, args, kwargs), given_to(CUDNN, args, kwargs)
        query, key, value = given["query"], given["key"], given["value"]
        self.calls.append((key.data_ptr(), key.shape[2]))
        if self.failing is not None:
            raise self.failing
        assert given["is_causal"]
        assert (given["attn_bias"], given["dropout_p"]) == (None, 0.0)
        assert not given["compute_log_sumexp"]
        assert not given["return_debug_mask"]
        assert query.shape[0] == 1
        assert query.shape[2] == key.shape[2] == value.shape[2]
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1
            assert all(stride % 8 == 0 for stride in tensor.stride()[1:3]), "16 bytes"
        output = torch.empty_like(query)
        rows = (each[0].transpose(0, 1) for each in (query, key, value))
        output[0] = attention(*rows, given["scale"])[0].transpose(0, 1)
        assert output.shape == shapes[0]
        return output, *[None] * 8


class Kvcache:
    """``flash_attn_with_kvcache`` of flash-attn."""

    def __init__(self) -> None:
        #: Tokens of the cache in each call.
        self.cache_tokens: list[int] = []

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        cache_batch_idx: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_softmax_lse: bool = False,
        **ragged: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.cache_tokens.append(k_cache.shape[1])
        assert cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
        assert causal or window_size == (-1, -1)
        starts = self.starts(q, len(cache_seqlens), **ragged)
        flat = q.reshape(-1, *q.shape[-2:])
        out, lse = torch.empty_like(flat), torch.empty(flat.shape[1::-1])
        window = None if window_size[0] < 0 else window_size[0] + 1
        sequences = zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)
        for i, (place, length) in enumerate(sequences):
            rows, cache = slice(*starts[i : i + 2]), (k_cache[place], v_cache[place])
            keys, values = (each[:length] for each in cache)
            out[rows], lse[:, rows] = attention(
                flat[rows], keys, values, softmax_scale, window, softcap or None, causal=causal
            )
        if q.ndim == 4:  # [heads, queries]; of equally many: [sequences, heads, queries]
            lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
        return (out.view(q.shape), lse) if return_softmax_lse else out.view(q.shape)

    def starts(self, q: Tensor, num_sequences: int) -> list[int]:
        """Where each sequence's queries begin, of which there are equally many."""
        batch, rows = q.shape[:2]
        assert batch == num_sequences
        return [rows * i for i in range(batch + 1)]


class Kvcache3(Kvcache):
    """The function of FlashAttention 3, which takes queries one after the other, too."""

    def starts(
        self,
        q: Tensor,
        num_sequences: int,
        *,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int = 0,
    ) -> list[int]:
        if cu_seqlens_q is None:
            return super().starts(q, num_sequences)
        assert (q.ndim, len(cu_seqlens_q)) == (3, num_sequences + 1)
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        return cu_seqlens_q.tolist()


class FlashInferWrapper:
    """``BatchPrefillWithPagedKVCacheWrapper``.

    ``causal``: of a sequence with n queries and m keys, query i sees the first m - n + i + 1.
    """

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str, *, backend: str):
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert float_workspace_buffer.dtype == torch.uint8
        self.num_plans = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self.num_plans += 1
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(table.dtype == torch.int32 for table in tables)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        assert q_data_type == kv_data_type
        self._tables = [table.tolist() for table in tables]
        self._shape = (page_size, num_kv_heads, head_dim_qk)
        self._heads = num_qo_heads
        window = None if window_left < 0 else window_left + 1
        self._numbers = (sm_scale, window, logits_soft_cap or None)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = paged_kv_cache
        assert keys.shape[1:] == values.shape[1:] == self._shape
        assert keys.stride() == values.stride()
        assert keys.stride(3) == 1
        assert q.is_contiguous()
        q_starts, starts, indices, last = self._tables
        assert q.shape == (q_starts[-1], self._heads, self._shape[2])
        out = torch.empty_like(q)
        for i in range(len(last)):
            pages = indices[starts[i] : starts[i + 1]]
            length = (len(pages) - 1) * self._shape[0] + last[i]
            rows = slice(q_starts[i], q_starts[i + 1])
            # A row past the length is not loaded, and what is masked counts for nothing.
            k, v = (torch.cat([t[page] for page in pages])[:length] for t in (keys, values))
            out[rows] = attention(q[rows], k, v, *self._numbers)[0]
        return out


def emulated_flashinfer() -> FlashInferBackend:
    return FlashInferBackend(SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=FlashInferWrapper))
