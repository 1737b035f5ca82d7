"""The attention kernels that can be had here, each called over slot views by one interface."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .common import Options

OVERREAD_TILE = 128
"""Rows to which the dry run's reckless kernel rounds its reads up."""


@dataclass(frozen=True)
class SlotBatch:
    """A batch of sequences in slots.

    ``queries`` is ``[batch, q_len, q_heads, head_dim]``; ``keys`` and ``values`` are
    ``[slots, max_len, kv_heads, head_dim]`` with any token stride; the queries are the last
    ``q_len`` of each sequence's ``lengths`` tokens.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    slot_ids: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.slot_ids)

    @property
    def q_len(self) -> int:
        """Query tokens per sequence."""
        return int(self.queries.shape[1])

    def _ints(self, values: list[int]) -> Tensor:
        if max(values) >= 2**31:
            raise ValueError(f"token index {max(values)} does not fit 32 bits: fewer slots")
        return torch.tensor(values, dtype=torch.int32, device=self.queries.device)

    @cached_property
    def lengths_tensor(self) -> Tensor:
        """Lengths on the device, int32 ``[batch]``; may be changed in place between calls."""
        return self._ints(list(self.lengths))

    @cached_property
    def slots_tensor(self) -> Tensor:
        """Slot indices on the device, int32 ``[batch]``."""
        return self._ints(list(self.slot_ids))

    @cached_property
    def key_starts(self) -> Tensor:
        """First token of each sequence's slot in the flat view, int32 ``[batch + 1]``."""
        max_len = int(self.keys.shape[1])
        starts = [slot * max_len for slot in self.slot_ids]
        return self._ints([*starts, starts[-1] + self.lengths[-1]])

    @cached_property
    def query_starts(self) -> Tensor:
        """First query row of each sequence, int32 ``[batch + 1]``."""
        return self._ints([index * self.q_len for index in range(self.batch + 1)])


class AttentionKernel(Protocol):
    """One way to compute attention over slot views."""

    name: str

    def refuses(self, batch: SlotBatch) -> str:
        """Why this kernel cannot take the batch; empty when it can."""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        """A call that returns ``[batch, q_len, q_heads, head_dim]``; its inputs stay alive."""


FILLERS: dict[str, object] = {
    "dropout_p": 0.0,
    "return_debug_mask": False,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": False,
    "num_splits": 0,
    "sm_margin": 0,
    "attention_chunk": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Neutral values for operator arguments that the probe does not set itself."""


def arguments_for(schema: Any, values: dict[str, object]) -> dict[str, object]:
    """Keyword arguments for an operator: ``values`` by name, neutral fillers for the rest.

    Raises TypeError when the operator lacks a name in ``values``, or asks for something
    that has neither a default nor a neutral value.
    """
    known = {argument.name for argument in schema.arguments}
    absent = sorted(set(values) - known)
    if absent:
        raise TypeError(f"{schema.name} takes no {', '.join(absent)}")
    arguments = dict(values)
    for argument in schema.arguments:
        name = argument.name
        if name in arguments or argument.has_default_value():
            continue
        if isinstance(argument.type, torch.OptionalType):
            arguments[name] = None
        elif name in FILLERS:
            arguments[name] = FILLERS[name]
        else:
            raise TypeError(f"{schema.name} asks for {name}, which the probe does not know")
    return arguments


class AtenFlash:
    """torch's built-in FlashAttention over the flat view, by starts and used lengths."""

    name = "aten_flash"

    def __init__(self) -> None:
        self._op: Any = torch.ops.aten._flash_attention_forward.default
        names = {argument.name for argument in self._op._schema.arguments}
        if "seqused_k" not in names:
            raise TypeError("aten::_flash_attention_forward has no seqused_k: torch is too old")

    @property
    def schema(self) -> str:
        """The operator's schema as torch prints it."""
        return str(self._op._schema)

    def refuses(self, batch: SlotBatch) -> str:
        del batch
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        _, _, kv_heads, head_dim = batch.keys.shape
        values: dict[str, object] = {
            "query": batch.queries.flatten(0, 1),
            "key": batch.keys.view(-1, kv_heads, head_dim),
            "value": batch.values.view(-1, kv_heads, head_dim),
            "cum_seq_q": batch.query_starts,
            "cum_seq_k": batch.key_starts,
            "max_q": batch.q_len,
            "max_k": max(batch.lengths),
            "dropout_p": 0.0,
            "is_causal": batch.q_len > 1,
            "return_debug_mask": False,
            "seqused_k": batch.lengths_tensor,
        }
        arguments = arguments_for(self._op._schema, values)
        operator, shape = self._op, batch.queries.shape

        def call() -> Tensor:
            output: Tensor = operator(**arguments)[0]
            return output.view(shape)

        return call


def _of_one(batch: SlotBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a batch of one, ``[1, heads, tokens, head_dim]``."""
    slot, length = batch.slot_ids[0], batch.lengths[0]
    keys, values = (
        tensor[slot, :length].transpose(0, 1).unsqueeze(0) for tensor in (batch.keys, batch.values)
    )
    return batch.queries.transpose(1, 2), keys, values


class SdpaFlash:
    """``scaled_dot_product_attention``, flash backend, over one slot's view cut to its length."""

    name = "sdpa_flash"

    def refuses(self, batch: SlotBatch) -> str:
        if batch.batch != 1 or batch.q_len != 1:
            return "one sequence and one query only"
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        query, key, value = _of_one(batch)
        grouped = query.shape[1] != key.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                output = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, enable_gqa=grouped
                )
            return output.transpose(1, 2)

        return call


class SdpaWhole:
    """``scaled_dot_product_attention`` by one backend, cuDNN's, over a prompt in one chunk.

    Where the backend cannot group the queries' heads, those of K and V are repeated before:
    ``note`` then says so.
    """

    name = "sdpa_cudnn"

    def __init__(self, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> None:
        self._backend = backend
        self.note = ""

    def refuses(self, batch: SlotBatch) -> str:
        if batch.batch != 1 or batch.lengths != (batch.q_len,) or batch.q_len == 1:
            return "one prompt in one chunk only"
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        query, key, value = _of_one(batch)

        def attention(key: Tensor, value: Tensor) -> Callable[[], Tensor]:
            grouped = query.shape[1] != key.shape[1]

            def call() -> Tensor:
                with sdpa_kernel(self._backend):
                    output = torch.nn.functional.scaled_dot_product_attention(
                        query, key, value, is_causal=True, enable_gqa=grouped
                    )
                return output.transpose(1, 2)

            return call

        call = attention(key, value)
        try:
            call()
        except RuntimeError:
            times = query.shape[1] // key.shape[1]
            call = attention(*(each.repeat_interleave(times, 1) for each in (key, value)))
            self.note = "repeated heads"
        return call


class KvcacheFunction:
    """``flash_attn_with_kvcache`` of an installed flash-attn (2) or flash_attn_interface (3)."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._function: Any = importlib.import_module(module).flash_attn_with_kvcache

    def refuses(self, batch: SlotBatch) -> str:
        del batch
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        function, causal = self._function, batch.q_len > 1
        lengths, slots = batch.lengths_tensor, batch.slots_tensor

        def call() -> Tensor:
            output: Tensor = function(
                batch.queries,
                batch.keys,
                batch.values,
                cache_seqlens=lengths,
                cache_batch_idx=slots,
                causal=causal,
            )
            return output

        return call


class ForwardOperator:
    """A FlashAttention-3 ``fwd`` operator registered by a shared library of the user's."""

    name = "fa3_library"

    def __init__(self, library: str) -> None:
        operators: Any = torch.ops
        operators.load_library(library)
        namespace = Path(library).name.split(".")[0]
        self._op: Any = getattr(operators, namespace).fwd.default

    def refuses(self, batch: SlotBatch) -> str:
        del batch
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        values: dict[str, object] = {
            "q": batch.queries,
            "k": batch.keys,
            "v": batch.values,
            "seqused_k": batch.lengths_tensor,
            "kv_batch_idx": batch.slots_tensor,
            "softmax_scale": 1 / math.sqrt(batch.queries.shape[-1]),
            "is_causal": batch.q_len > 1,
        }
        arguments = arguments_for(self._op._schema, values)
        operator = self._op

        def call() -> Tensor:
            output: Tensor = operator(**arguments)[0]
            return output

        return call


class HostLoop:
    """Attention in plain torch on the host, one sequence after the other, for dry runs.

    ``tile`` rounds the rows read up to its multiple and masks the rest by weight zero, the way
    a kernel does that loads whole tiles: it faults, or spreads NaN, past the length.
    """

    def __init__(self, name: str, tile: int = 1) -> None:
        self.name = name
        self._tile = tile

    def refuses(self, batch: SlotBatch) -> str:
        del batch
        return ""

    def prepare(self, batch: SlotBatch) -> Callable[[], Tensor]:
        def call() -> Tensor:
            lengths = batch.lengths_tensor.tolist()
            rows = list(range(batch.q_len))
            outputs = [
                attend(batch, index, rows, lengths[index], self._tile)
                for index in range(batch.batch)
            ]
            return torch.stack(outputs).to(batch.queries.dtype)

        return call


def attend(batch: SlotBatch, sequence: int, rows: list[int], length: int, tile: int = 1) -> Tensor:
    """Attention of some query rows in float64, ``[rows, q_heads, head_dim]``."""
    slot = batch.slot_ids[sequence]
    read = min(-(-length // tile) * tile, batch.keys.shape[1])
    keys = batch.keys[slot, :read].to(torch.float64)
    values = batch.values[slot, :read].to(torch.float64)
    kv_heads, head_dim = keys.shape[1], keys.shape[2]
    queries = batch.queries[sequence, rows].to(torch.float64)
    queries = queries.view(len(rows), kv_heads, -1, head_dim)
    scores = torch.einsum("rhgd,thd->hgrt", queries, keys) / math.sqrt(head_dim)
    positions = torch.arange(read, device=keys.device)
    last = torch.tensor(rows, device=keys.device) + (length - batch.q_len)
    hidden = positions[None, :] > last[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    output = torch.einsum("hgrt,thd->rhgd", weights, values)
    return output.reshape(len(rows), -1, head_dim)


def relative_error(output: Tensor, reference: Tensor) -> float:
    """``||output - reference|| / ||reference||`` in float64; NaN when the output has one."""
    difference = output.to(torch.float64) - reference
    return float(difference.norm() / reference.norm())


def available_kernels(options: Options) -> tuple[list[AttentionKernel], dict[str, str]]:
    """The kernels that load here, and why each of the others does not."""
    if options.dry_run:
        return [HostLoop("host_exact"), HostLoop("host_tiled", OVERREAD_TILE)], {}
    makers: dict[str, Callable[[], AttentionKernel]] = {
        "aten_flash": AtenFlash,
        "sdpa_flash": SdpaFlash,
        "flash_attn_2": lambda: KvcacheFunction("flash_attn_2", "flash_attn"),
        "flash_attn_3": lambda: KvcacheFunction("flash_attn_3", "flash_attn_interface"),
    }
    if options.fa3_library:
        makers["fa3_library"] = lambda: ForwardOperator(options.fa3_library)
    kernels: list[AttentionKernel] = []
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            kernels.append(make())
        except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
            absent[name] = f"{type(error).__name__}: {error}"
    return kernels, absent
