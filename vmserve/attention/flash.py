"""Stock FlashAttention (Dao et al.) over the slots of the virtual view, unmodified.

Every sequence is one contiguous range of its slot. So a kernel written for dense keys and values
reads it in place: no block table, no gather. :class:`SlotKernel` is the one class with the one call
that differs between kernels; the rest (rotating, writing K and V, laying out the batch, buffers for
CUDA graphs) is common. ``docs/kernels.md`` adds a kernel as an example.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda.launcher import Launcher
from vmserve.attention.rotary import Rotary
from vmserve.attention.slots import SlotTensors, SlotWriter, slot_writer
from vmserve.attention.transfer import upload
from vmserve.dtypes import DType
from vmserve.errors import UnsupportedError
from vmserve.memory.views import ContiguousView, KVView

__all__ = [
    "FlashAttn2",
    "FlashAttn3",
    "FlashBackend",
    "SlotKernel",
    "SlotPart",
    "TorchFlash",
    "flash_attn_2",
    "flash_attn_3",
    "torch_flash",
]

MAX_HEAD_DIM = 256
#: Tokens of the largest tile of keys in any FlashAttention.
LARGEST_TILE = 256
_HALF = (DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True)
class SlotPart:
    """Some sequences of a batch, whose rows of q lie one after the other.

    On the device: ``q_starts``, int32 ``[sequences + 1]``, the first row of each and the end;
    ``k_starts``, int32 ``[sequences + 1]``, the first token of its slot in the flat view (the last
    entry means nothing); ``lengths``, int32 ``[sequences]``, its tokens with the new ones, the
    queries being the last of them; ``slots``, int32 ``[sequences]``. A length of 0 is no sequence.

    On the host: ``num_new``, the number of queries of each; ``max_len``, at least every length.
    """

    q_starts: torch.Tensor
    k_starts: torch.Tensor
    lengths: torch.Tensor
    slots: torch.Tensor
    num_new: tuple[int, ...]
    max_len: int

    @property
    def max_new(self) -> int:
        return max(self.num_new)

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence has one query, from which nothing is hidden."""
        return self.max_new == 1


class SlotKernel(Protocol):
    """A stock kernel: the one call that differs between kernels."""

    name: str
    #: How far past a sequence's length, and before its window, it may read; see
    #: ``AttentionBackend``.
    read_slack_tokens: int
    head_slack_tokens: int
    windows: bool
    softcap: bool
    sinks: bool

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        """Why it cannot serve such heads here; None if it can."""
        ...

    def __call__(
        self, q: torch.Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> torch.Tensor:
        """Attend q ``[rows, q_heads, head_dim]`` of the part's sequences; returns the same shape.

        K and V of the new tokens are in the slots already.
        """
        ...


def _window(spec: LayerAttention) -> tuple[int, int]:
    """(-1, -1) sees all. Any other pair turns off the kernels' split along the keys."""
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)


def _with_sinks(output: torch.Tensor, lse: torch.Tensor, spec: LayerAttention) -> torch.Tensor:
    """One more term in each row's sum of exponentials, whose logarithm the kernel gives: ``[heads,
    rows]``, or of each sequence. Exact, but for rounding the output twice."""
    if spec.sinks is None:
        return output
    return output.mul_(torch.sigmoid(lse.transpose(-1, -2) - spec.sinks).unsqueeze(-1))


class TorchFlash:
    """FlashAttention 2 as built into torch.

    ``seqused_k`` ends each sequence, so only the starts of ``cum_seq_k`` are read, and slots may
    come in any order. Decoding is split along the keys only with fewer heads of K than of Q, and
    without a window and causal masking: so decodes ask for neither.

    ``op``: replaces ``aten::_flash_attention_forward``, for tests.
    """

    name = "torch-flash"
    #: The first tile of a window is loaded whole; tiles are counted from position 0.
    head_slack_tokens = LARGEST_TILE
    windows = True
    softcap = False
    sinks = True

    def __init__(self, op: Callable[..., Any] | None = None) -> None:
        self._op: Callable[..., Any] = op or torch.ops.aten._flash_attention_forward.default
        #: Rows past the length are predicated away; later FlashAttention, which may have been
        #: activated in its place, loads whole tiles.
        self.read_slack_tokens = 0 if _activated() is None else LARGEST_TILE

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        names = [a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments]
        if "seqused_k" not in names:
            return f"torch {torch.__version__} is too old for it: 2.11 is needed"
        return _half_refusal(head_dim, dtype)

    def __call__(
        self, q: torch.Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> torch.Tensor:
        left, right = _window(spec)
        output, lse = self._op(
            q,
            slots.flat_keys[spec.layer],
            slots.flat_values[spec.layer],
            part.q_starts,
            part.k_starts,
            part.max_new,
            part.max_len,
            0.0,  # dropout_p
            not (part.only_decodes and spec.window is None),  # is_causal
            False,  # return_debug_mask
            scale=spec.scale,
            window_size_left=left,
            window_size_right=right,
            seqused_k=part.lengths,
        )[:2]
        return _with_sinks(output, lse, spec)


def _activated() -> str | None:
    """What stands in for torch's own FlashAttention, if anything."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


class FlashAttn2:
    """``flash_attn_with_kvcache`` of the flash-attn package: slots by ``cache_batch_idx``."""

    name = "flash-attn"
    read_slack_tokens = 0
    head_slack_tokens = LARGEST_TILE
    windows = True
    softcap = True
    sinks = True
    module = "flash_attn"

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function
        self._unusable: str | None = None
        if function is not None:
            return
        if importlib.util.find_spec(self.module) is None:
            self._unusable = f"the package {self.module} is not installed"
            return
        try:
            self._function = importlib.import_module(self.module).flash_attn_with_kvcache
        except (ImportError, OSError, AttributeError) as error:  # built for another torch, say
            self._unusable = f"the package {self.module} does not load: {error}".splitlines()[0]

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        return self._unusable or _half_refusal(head_dim, dtype)

    def __call__(
        self, q: torch.Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> torch.Tensor:
        equal = len(set(part.num_new)) == 1
        if equal:
            return self._attend_equal(q, slots, part, spec, slice(None), part.max_new)
        # It takes equally many queries of each sequence; otherwise call it for one after the other.
        outputs, row = [], 0
        for i, rows in enumerate(part.num_new):
            chunk = q[row : row + rows]
            outputs.append(self._attend_equal(chunk, slots, part, spec, slice(i, i + 1), rows))
            row += rows
        return torch.cat(outputs)

    def _attend_equal(
        self,
        q: torch.Tensor,
        slots: SlotTensors,
        part: SlotPart,
        spec: LayerAttention,
        some: slice,
        num_new: int,
    ) -> torch.Tensor:
        """``num_new`` queries of each of ``some`` sequences."""
        by_sequence = q.view(-1, num_new, *q.shape[1:])
        return self._attend(by_sequence, slots, part, spec, some, num_new).reshape(q.shape)

    def _attend(
        self,
        q: torch.Tensor,
        slots: SlotTensors,
        part: SlotPart,
        spec: LayerAttention,
        some: slice,
        num_new: int,
        **options: Any,
    ) -> torch.Tensor:
        assert self._function is not None, "refusal() comes first"
        # The kernels split the keys by the length of the cache, not by those of the sequences.
        keys, values = (
            tensors[spec.layer][:, : part.max_len]
            for tensors in (slots.view.keys, slots.view.values)
        )
        if spec.sinks is not None:
            options["return_softmax_lse"] = True
        found = self._function(
            q,
            keys,
            values,
            cache_seqlens=part.lengths[some],
            cache_batch_idx=part.slots[some],
            softmax_scale=spec.scale,
            causal=num_new > 1 or spec.window is not None,
            window_size=_window(spec),
            softcap=0.0 if spec.softcap is None else spec.softcap,
            **options,
        )
        output: torch.Tensor = (
            found if spec.sinks is None else _with_sinks(found[0], found[1], spec)
        )
        return output


class FlashAttn3(FlashAttn2):
    """FlashAttention 3 (Shah et al.), for Hopper; the same call from ``flash_attn_interface``.

    Its loads are whole tiles: up to 224 rows past the length are read, and so must be mapped and
    hold finite numbers. Sequences with unequally many queries are one call. Builds may lack what
    others have: so they say.
    """

    name = "flash-attn-3"
    read_slack_tokens = LARGEST_TILE
    module = "flash_attn_interface"

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__(function)
        self._lacks = _left_out(self._function)
        self.windows = "LOCAL" not in self._lacks
        self.softcap = "SOFTCAP" not in self._lacks

    def __call__(
        self, q: torch.Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> torch.Tensor:
        if part.only_decodes:
            return self._attend_equal(q, slots, part, spec, slice(None), 1)
        rows = {"cu_seqlens_q": part.q_starts, "max_seqlen_q": part.max_new}
        return self._attend(q, slots, part, spec, slice(None), part.max_new, **rows)

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        refusal = super().refusal(head_dim, dtype)
        if refusal is not None:
            return refusal
        if torch.cuda.is_available():
            major, _ = torch.cuda.get_device_capability()
            if major != 9:
                return f"it is for GPUs of compute capability 9, this one has {major}"
        if "VARLEN" in self._lacks:
            return "this build takes no lengths of sequences"
        if dtype is DType.FLOAT16 and "FP16" in self._lacks:
            return "this build has no float16"
        # Smaller heads are padded to a size that there is.
        if head_dim > max((n for n in _HEAD_DIMS_3 if f"HDIM{n}" not in self._lacks), default=0):
            return f"this build has no heads of {head_dim}"
        return None


#: The sizes of heads that FlashAttention 3 has kernels for.
_HEAD_DIMS_3 = (64, 96, 128, 192, 256)


def _left_out(function: Callable[..., Any] | None) -> frozenset[str]:
    """What a build of FlashAttention 3 leaves out: its set-up writes ``.._config.py`` beside
    ``.._interface.py``. Empty if it did not."""
    module = getattr(function, "__module__", "")
    try:
        config = importlib.import_module(module.replace("_interface", "_config"))
        flags = config.CONFIG["build_flags"]
    except (ImportError, AttributeError, KeyError, ValueError):
        return frozenset()
    prefix = "FLASHATTENTION_DISABLE_"
    return frozenset(name.removeprefix(prefix) for name, is_out in flags.items() if is_out)


def _half_refusal(head_dim: int, dtype: DType) -> str | None:
    if dtype not in _HALF:
        return f"FlashAttention has no {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"FlashAttention wants a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


class FlashBackend:
    """Attention with a :class:`SlotKernel`.

    ``launcher``: of the kernel that writes K and V (default: the device's, if it can run it).
    """

    views: tuple[type[KVView], ...] = (ContiguousView,)
    plans_by_length = True
    kv_dtypes: frozenset[DType] = frozenset()

    def __init__(self, kernel: SlotKernel, launcher: Launcher | None = None) -> None:
        self.kernel = kernel
        self._launcher = launcher
        self.name = kernel.name
        self.read_slack_tokens = kernel.read_slack_tokens
        self.head_slack_tokens = kernel.head_slack_tokens
        self.windows = kernel.windows
        self.softcap = kernel.softcap
        self.sinks = kernel.sinks
        self.latents = False
        self._slots: _Slots | None = None

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        return self.kernel.refusal(head_dim, dtype)

    def _slots_of(self, view: KVView) -> _Slots:
        if not isinstance(view, ContiguousView):
            raise TypeError(f"the {self.name} backend reads the virtual view only")
        known = self._slots
        if known is None or known.tensors.view is not view:
            tensors = SlotTensors(view)
            # NOTE: another thread may bind in between: the one kept may be its view.
            known = self._slots = _Slots(tensors, slot_writer(tensors, self._launcher))
        return known

    def bind(self, view: KVView, batch: RaggedBatch) -> SlotCall:
        return SlotCall(self.kernel, self._slots_of(view), batch)

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
        dtype: DType | None = None,
    ) -> DecodePlan:
        """A plan for steps that decode at most ``max_tokens`` sequences.

        Raises :class:`~vmserve.errors.UnsupportedError` for more than one token of a sequence.
        """
        if max_new > 1:
            raise UnsupportedError(
                f"the {self.name} backend plans one token of each sequence, not {max_new}"
            )
        return DecodePlan(self.kernel, self._slots_of(view), max_tokens, max_len)


def flash_attn_2() -> FlashBackend:
    return FlashBackend(FlashAttn2())


def flash_attn_3() -> FlashBackend:
    return FlashBackend(FlashAttn3())


def torch_flash() -> FlashBackend:
    return FlashBackend(TorchFlash())


class _Slots(NamedTuple):
    """The slots, for the attention and for what comes before it."""

    tensors: SlotTensors
    write: SlotWriter


class SlotCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`.

    Sequences with one new token are attended by a separate call, for which the kernels are faster.
    """

    def __init__(self, kernel: SlotKernel, slots: _Slots, batch: RaggedBatch) -> None:
        self._kernel = kernel
        self._slots = slots
        device = slots.tensors.view.keys[0].device
        self._places = upload(slots.write.places(batch), device)
        few = batch.num_new == 1
        split = []
        for chosen in (few, ~few):
            rows = np.flatnonzero(np.repeat(chosen, batch.num_new))
            if len(rows):
                split.append((rows, _part(slots.tensors, batch, chosen, device)))
        split.sort(key=lambda each: int(each[0][0]))
        self._parts = [part for _, part in split]
        self._num_rows = [len(rows) for rows, _ in split]
        #: The rows of the parts, one after the other; None: as they come.
        self._order: torch.Tensor | None = None
        if len(split) > 1:
            order = np.concatenate([rows for rows, _ in split])
            if (np.diff(order) != 1).any():
                self._order = upload(order, device)

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        tensors, order = self._slots.tensors, self._order
        q = self._slots.write(spec.layer, self._places, q, k, v, rotary)
        if len(self._parts) == 1:
            return self._kernel(q, tensors, self._parts[0], spec)
        if not self._parts:
            return torch.empty_like(q)
        if order is not None:
            q = q.index_select(0, order)
        attended = torch.cat(
            [
                self._kernel(rows, tensors, part, spec)
                for rows, part in zip(q.split_with_sizes(self._num_rows), self._parts, strict=True)
            ]
        )
        if order is None:
            return attended
        return torch.empty_like(attended).index_copy_(0, order, attended)


def _part(
    slots: SlotTensors, batch: RaggedBatch, chosen: NDArray[np.bool_], device: torch.device
) -> SlotPart:
    num_new = batch.num_new[chosen]
    lengths = batch.num_past[chosen] + num_new
    places = batch.places[chosen]
    n = len(num_new)
    columns = np.zeros((4, n + 1), dtype=np.int32)  # one copy to the device for all of them
    columns[0, 1:] = np.cumsum(num_new)
    columns[1, :n] = places * slots.slot_tokens
    columns[2, :n] = lengths
    columns[3, :n] = places
    q_starts, k_starts, used, indices = upload(columns, device)
    return SlotPart(
        q_starts, k_starts, used[:n], indices[:n], tuple(num_new.tolist()), int(lengths.max())
    )


class DecodePlan:
    """A decoding step over buffers that stay where they are, for CUDA graphs.

    Rows past the batch's are no sequences (length 0), and change nothing in the slots.
    """

    def __init__(self, kernel: SlotKernel, slots: _Slots, num_rows: int, max_len: int) -> None:
        self._kernel = kernel
        self._slots = slots
        device = slots.tensors.view.keys[0].device
        self._places = torch.zeros(2, num_rows, dtype=slots.write.dtype, device=device)
        self._columns = torch.zeros(3, num_rows + 1, dtype=torch.int32, device=device)
        starts, lengths, places = self._columns
        self._part = SlotPart(
            q_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            k_starts=starts,
            lengths=lengths[:num_rows],
            slots=places[:num_rows],
            num_new=(1,) * num_rows,
            max_len=max_len,
        )

    def update(self, batch: RaggedBatch) -> None:
        """Put the next step's sequences, one new token each, into the buffers. Does not wait.

        Raises ``ValueError`` for a batch that does not fit.
        """
        num_rows, n = self._places.shape[1], batch.num_tokens
        lengths = batch.num_past + 1
        if n > num_rows or n != batch.num_sequences or int(lengths.max()) > self._part.max_len:
            raise ValueError(
                f"{n} tokens of {batch.num_sequences} sequences up to {int(lengths.max())} long do "
                f"not fit a plan for {num_rows} sequences of {self._part.max_len}"
            )
        columns = np.zeros((3, num_rows + 1), dtype=np.int32)
        columns[0, :n] = batch.places * self._slots.tensors.slot_tokens
        columns[1, :n], columns[2, :n] = lengths, batch.places
        upload(self._slots.write.places(batch, num_rows), self._places.device, self._places)
        upload(columns, self._columns.device, self._columns)

    def call(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``AttentionCall``. Copies the result to ``out`` if given."""
        q = self._slots.write(spec.layer, self._places, q, k, v, rotary)
        attended = self._kernel(q, self._slots.tensors, self._part, spec)
        return attended if out is None else out.copy_(attended)
