"""Stock FlashAttention (Dao et al.) over the slots of the virtual view, unmodified.

Every sequence is one contiguous range of its slot. So a kernel written for dense keys and values
reads it in place: no block table, no gather. :class:`StockKernel` is the one class with the one
call that differs between kernels; the rest (rotating, writing K and V, laying out the batch,
buffers for CUDA graphs) is common. ``docs/kernels.md`` adds a kernel as an example.

A backend may have several kernels (:mod:`vmserve.attention.phases`): each takes those tokens of a
step that it is best for, and K and V are written once for all of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import AttentionPlan, LayerAttention, RaggedBatch
from vmserve.attention.cuda.launcher import Launcher
from vmserve.attention.rotary import Rotary
from vmserve.attention.slots import SlotTensors, SlotWriter, slot_writer
from vmserve.attention.transfer import upload
from vmserve.errors import UnsupportedError
from vmserve.memory.views import ContiguousView, KVView
from vmserve.numbers.dtypes import DType

__all__ = [
    "HALF",
    "FlashAttn2",
    "FlashAttn3",
    "FlashBackend",
    "PartCall",
    "SlotKernel",
    "SlotPart",
    "Slots",
    "StockKernel",
    "TorchFlash",
    "activated",
    "flash_attn_2",
    "flash_attn_3",
    "torch_flash",
]

logger = logging.getLogger(__name__)
MAX_HEAD_DIM = 256
#: Tokens of the largest tile of keys in any FlashAttention.
LARGEST_TILE = 256
HALF = (DType.FLOAT16, DType.BFLOAT16)


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


class Slots(NamedTuple):
    """The slots, for the attention and for what comes before it."""

    tensors: SlotTensors
    write: SlotWriter
    #: The backend's kernels that can read the slots.
    kernels: tuple[SlotKernel, ...]


class Capacity(NamedTuple):
    """What a plan for decodes has room for; see ``PlansAhead.plan_capacity``."""

    max_tokens: int
    max_len: int
    q_heads: int
    windows: Sequence[int | None]
    dtype: DType | None


#: Attends q ``[rows, q_heads, head_dim]``, rotated and contiguous, in one layer; returns the same
#: shape. The sequences are those that it was made for. K and V of the new tokens are in the slots
#: already.
PartCall = Callable[[torch.Tensor, LayerAttention], torch.Tensor]


class SlotKernel(Protocol):
    """What differs between kernels. Stock ones have one call: :class:`StockKernel`."""

    name: str
    #: Tokens that it may read after a sequence's end and before its window; see
    #: ``AttentionBackend``.
    read_slack_tokens: int
    head_slack_tokens: int
    windows: bool
    softcap: bool
    sinks: bool
    #: See ``PlansAhead``.
    plans_by_length: bool
    #: Whether it is called for one sequence at a time.
    one_by_one: bool

    @property
    def launcher(self) -> Launcher | None:
        """Launcher of our own kernels, which write K and V too; None: a stock one."""
        ...

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        """Why it cannot serve such heads here; None if it can."""
        ...

    def unreadable(self, slots: SlotTensors) -> str | None:
        """Why it cannot read these slots; None if it can."""
        ...

    def takes(self, batch: RaggedBatch) -> NDArray[np.int64]:
        """How many of each sequence's new tokens it attends, the first ones.

        The rest goes to the next kernel, as new tokens after a longer past.
        """
        ...

    def bind(self, slots: SlotTensors, batch: RaggedBatch) -> PartCall:
        """Prepare a step for the sequences, or parts of some, that it took.

        They are one if it is called one by one; else either all have one token, or none has.
        """
        ...

    def plan(self, slots: Slots, capacity: Capacity) -> AttentionPlan:
        """A plan for decodes, if it takes them."""
        ...


class StockKernel(ABC):
    """A :class:`SlotKernel` that is one call, and serves whatever a step has."""

    name: str
    read_slack_tokens: int
    head_slack_tokens: int
    windows: bool
    softcap: bool
    sinks: bool
    plans_by_length = True
    one_by_one = False
    launcher: Launcher | None = None

    @abstractmethod
    def refusal(self, head_dim: int, dtype: DType) -> str | None: ...

    @abstractmethod
    def __call__(
        self, q: torch.Tensor, slots: SlotTensors, part: SlotPart, spec: LayerAttention
    ) -> torch.Tensor:
        """Attend q ``[rows, q_heads, head_dim]`` of the part's sequences; returns the same shape.

        K and V of the new tokens are in the slots already.
        """

    def unreadable(self, slots: SlotTensors) -> str | None:
        return None

    def takes(self, batch: RaggedBatch) -> NDArray[np.int64]:
        return batch.num_new

    def bind(self, slots: SlotTensors, batch: RaggedBatch) -> PartCall:
        part = _part(slots, batch)
        return lambda q, spec: self(q, slots, part, spec)

    def plan(self, slots: Slots, capacity: Capacity) -> AttentionPlan:
        return DecodePlan(self, slots, capacity.max_tokens, capacity.max_len)


def _window(spec: LayerAttention) -> tuple[int, int]:
    """(-1, -1) sees all. Any other pair turns off the kernels' split along the keys."""
    return (-1, -1) if spec.window is None else (spec.window - 1, 0)


def _with_sinks(output: torch.Tensor, lse: torch.Tensor, spec: LayerAttention) -> torch.Tensor:
    """One more term in each row's sum of exponentials, whose logarithm the kernel gives: ``[heads,
    rows]``, or of each sequence. Exact, but for rounding the output twice."""
    if spec.sinks is None:
        return output
    return output.mul_(torch.sigmoid(lse.transpose(-1, -2) - spec.sinks).unsqueeze(-1))


class TorchFlash(StockKernel):
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
        #: Rows after the length are predicated away. Later versions of FlashAttention, one of which
        #: may have been activated instead, load whole tiles.
        self.read_slack_tokens = 0 if activated() is None else LARGEST_TILE

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


def activated() -> str | None:
    """What stands in for torch's own FlashAttention, if anything."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


class FlashAttn2(StockKernel):
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
    """What a build of FlashAttention 3 leaves out: its set-up writes ``.._config.py`` next to
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
    if dtype not in HALF:
        return f"FlashAttention has no {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"FlashAttention wants a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


class FlashBackend:
    """Attention with one :class:`SlotKernel`, or with several.

    They are asked in turn which tokens of a step they take, the last one takes what is left.
    ``launcher``: of the kernel that writes K and V (default: that of our own among ``kernels``,
    else the device's, if it can run it).
    """

    views: tuple[type[KVView], ...] = (ContiguousView,)
    kv_dtypes: frozenset[DType] = frozenset()
    latents = False

    def __init__(self, *kernels: SlotKernel, launcher: Launcher | None = None) -> None:
        self.kernels = kernels
        self._launcher = launcher
        #: The kernels that serve, e.g. "cuda + torch-flash".
        self.name = " + ".join(kernel.name for kernel in kernels)
        self.read_slack_tokens = max(kernel.read_slack_tokens for kernel in kernels)
        self.head_slack_tokens = max(kernel.head_slack_tokens for kernel in kernels)
        self.windows = all(kernel.windows for kernel in kernels)
        self.softcap = all(kernel.softcap for kernel in kernels)
        self.sinks = all(kernel.sinks for kernel in kernels)
        self.plans_by_length = _for_decodes(kernels).plans_by_length
        self._slots: Slots | None = None

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        refusals = (kernel.refusal(head_dim, dtype) for kernel in self.kernels)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _slots_of(self, view: KVView) -> Slots:
        if not isinstance(view, ContiguousView):
            raise TypeError(f"the {self.name} backend reads the virtual view only")
        known = self._slots
        if known is None or known.tensors.view is not view:
            # NOTE: another thread may bind in between: the one kept may be its view.
            known = self._slots = self._new_slots(SlotTensors(view))
        return known

    def _new_slots(self, tensors: SlotTensors) -> Slots:
        kernels = []
        for kernel in self.kernels:
            refusal = kernel.unreadable(tensors)
            if refusal is None:
                kernels.append(kernel)
            else:
                logger.warning("attention goes on without %s: %s", kernel.name, refusal)
        launchers = (self._launcher, *(kernel.launcher for kernel in kernels))
        launcher = next((each for each in launchers if each is not None), None)
        return Slots(tensors, slot_writer(tensors, launcher), tuple(kernels))

    def bind(self, view: KVView, batch: RaggedBatch) -> SlotCall:
        return SlotCall(self._slots_of(view), batch)

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
    ) -> AttentionPlan:
        """A plan for steps that decode at most ``max_tokens`` sequences.

        Raises :class:`~vmserve.errors.UnsupportedError` for more than one token of a sequence.
        """
        if max_new > 1:
            raise UnsupportedError(
                f"the {self.name} backend plans one token of each sequence, not {max_new}"
            )
        slots = self._slots_of(view)
        capacity = Capacity(max_tokens, max_len, q_heads, windows, dtype)
        return _for_decodes(slots.kernels).plan(slots, capacity)


def flash_attn_2() -> FlashBackend:
    return FlashBackend(FlashAttn2())


def flash_attn_3() -> FlashBackend:
    return FlashBackend(FlashAttn3())


def torch_flash() -> FlashBackend:
    return FlashBackend(TorchFlash())


def _for_decodes(kernels: Sequence[SlotKernel]) -> SlotKernel:
    decode = RaggedBatch.build([0], [1], [1])
    return next(kernel for kernel in kernels if kernel.takes(decode)[0])


class _Piece(NamedTuple):
    """Rows of a step that one call of a kernel attends."""

    kernel: SlotKernel
    #: Rows of q, ascending.
    rows: NDArray[np.int64]
    batch: RaggedBatch

    @property
    def is_range(self) -> bool:
        return int(self.rows[-1]) - int(self.rows[0]) == len(self.rows) - 1


def _pieces(kernels: Sequence[SlotKernel], batch: RaggedBatch) -> Iterator[_Piece]:
    rest, starts = batch, batch.starts
    for kernel in kernels:
        taken = kernel.takes(rest)
        # Sequences with one token go apart from the others: for them kernels are faster.
        groups = (
            [np.array([index]) for index in np.flatnonzero(taken)]
            if kernel.one_by_one
            else [np.flatnonzero(taken == 1), np.flatnonzero(taken > 1)]
        )
        for chosen in groups:
            if len(chosen):
                new = taken[chosen]
                part = RaggedBatch.build(rest.places[chosen], rest.num_past[chosen], new)
                rows = np.arange(part.num_tokens) + np.repeat(starts[chosen] - part.starts, new)
                yield _Piece(kernel, rows, part)
        left = rest.num_new - taken
        some = left > 0
        if not some.any():
            return
        rest = RaggedBatch.build(rest.places[some], (rest.num_past + taken)[some], left[some])
        starts = (starts + taken)[some]
    raise AssertionError("the last kernel takes what is left")


class _Bound(NamedTuple):
    """``first``, ``num_rows``: the piece's rows of q. ``scattered``: which they are, on the device,
    if there are others between them."""

    attend: PartCall
    first: int
    num_rows: int
    scattered: torch.Tensor | None


class SlotCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`."""

    def __init__(self, slots: Slots, batch: RaggedBatch) -> None:
        self._slots = slots
        device = slots.tensors.view.keys[0].device
        self._places = upload(slots.write.places(batch), device)
        pieces = sorted(_pieces(slots.kernels, batch), key=lambda piece: int(piece.rows[0]))
        #: Names of the kernels, and the rows that each of their calls attends.
        self.served = tuple((piece.kernel.name, len(piece.rows)) for piece in pieces)
        self._pieces = [
            _Bound(
                piece.kernel.bind(slots.tensors, piece.batch),
                int(piece.rows[0]),
                len(piece.rows),
                None if piece.is_range else upload(piece.rows, device),
            )
            for piece in pieces
        ]
        #: Whether the rows of the pieces, one piece after the other, are those of q.
        self._in_order = all(piece.scattered is None for piece in self._pieces)

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        pieces = self._pieces
        q = self._slots.write(spec.layer, self._places, q, k, v, rotary)
        if len(pieces) == 1:
            return pieces[0].attend(q, spec)
        if not pieces:
            return torch.empty_like(q)
        if self._in_order:
            parts = q.split_with_sizes([piece.num_rows for piece in pieces])
            return torch.cat(
                [piece.attend(rows, spec) for piece, rows in zip(pieces, parts, strict=True)]
            )
        out = torch.empty_like(q)
        for attend, first, num_rows, scattered in pieces:
            if scattered is None:
                rows = slice(first, first + num_rows)
                out[rows].copy_(attend(q[rows], spec))
            else:
                out.index_copy_(0, scattered, attend(q.index_select(0, scattered), spec))
        return out


def _part(slots: SlotTensors, batch: RaggedBatch) -> SlotPart:
    device = slots.view.keys[0].device
    num_new, places = batch.num_new, batch.places
    lengths = batch.num_past + num_new
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

    def __init__(self, kernel: StockKernel, slots: Slots, num_rows: int, max_len: int) -> None:
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
