"""The backend over our CUDA kernels: plan, write, attend, combine."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda.buffers import Counts, PlanBuffer
from vmserve.attention.cuda.launcher import CudaLauncher, Launcher
from vmserve.attention.cuda.params import AttendArgs, CombineArgs
from vmserve.attention.cuda.plan import (
    APPEND_PARTS,
    DECODE_PARTS,
    DECODE_ROWS,
    CudaPlan,
    Heads,
    SharedPrefix,
    Step,
    chunk_limit,
    find_shared_prefixes,
    item_limit,
    make_plan,
)
from vmserve.attention.cuda.tables import Tables
from vmserve.attention.cuda.variant import (
    PART_TOKENS,
    TILE_TOKENS,
    Variant,
    append_rows,
    append_scratch,
)
from vmserve.attention.cuda.view import DeviceView
from vmserve.attention.cuda.write import (
    KeyValueWriter,
    Places,
    check_inputs,
    check_queries,
)
from vmserve.attention.rotary import Rotary
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType
from vmserve.numbers.torch_dtypes import as_torch

__all__ = ["CapacityPlan", "CudaCall", "CudaPagedBackend"]

_LOG2E = math.log2(math.e)
_COMBINE_ROWS = 4  # of a block


class CudaPagedBackend:
    """Reads no position that is not written: ``read_slack_tokens`` is 0.

    ``launcher``: None is torch's current device, when first used. ``share_prefixes``: block tables
    of the paged view that start alike are found at ``bind``, and attended once (cascade); what is
    found depends on the host's block tables, so that they must be there.
    ``copy_tables``: copy the rows of the block tables to the device at ``bind`` even if they are
    on it.
    """

    name = "cuda"
    read_slack_tokens = 0
    #: The first tile of a window is loaded whole; tiles are counted from position 0.
    head_slack_tokens = TILE_TOKENS - 1
    windows = True
    softcap = True
    sinks = True
    latents = False
    kv_dtypes: frozenset[DType] = frozenset((DType.FP8,))
    plans_by_length = False
    views: tuple[type[KVView], ...] = (PagedView, ContiguousView)

    def __init__(
        self,
        launcher: Launcher | None = None,
        *,
        share_prefixes: bool = False,
        copy_tables: bool = False,
    ) -> None:
        self._given = launcher
        self._share_prefixes = share_prefixes
        self._copy_tables = copy_tables
        self._view: DeviceView | None = None
        self._workspace = _Workspace()

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        if self._given is None and not torch.cuda.is_available():
            return "torch sees no GPU here"
        refusal = Variant.refusal(head_dim, as_torch(dtype))
        if refusal is None and self._given is None:
            refusal = CudaLauncher().refusal(head_dim, fp8=kv_dtype is DType.FP8)
        return refusal

    @property
    def launcher(self) -> Launcher:
        if self._given is None:
            self._given = CudaLauncher()
        return self._given

    def check_view(self, view: KVView) -> None:
        """Raises :class:`~vmserve.errors.UnsupportedError` for one that the kernels cannot read."""
        self._device_view(view)

    def bind(
        self, view: KVView, batch: RaggedBatch, prefixes: Sequence[SharedPrefix] = ()
    ) -> CudaCall:
        """Lay out one step; the plan is made when the first layer passes the number of heads.

        Raises ``ValueError`` for a sequence that does not fit its place, and
        :class:`~vmserve.errors.UnsupportedError` for a view that the kernels cannot read.
        """
        device_view = self._device_view(view)
        device_view.check(batch)
        if self._share_prefixes and not prefixes and isinstance(view, PagedView):
            host = view.block_tables.cpu().numpy()[batch.places]
            prefixes = find_shared_prefixes(host, batch.num_past, view.block_tokens)
        plans = _EagerPlans(self.launcher, device_view, self._copy_tables, batch, prefixes)
        return CudaCall(plans)

    def plan_capacity(
        self,
        view: KVView,
        max_seqs: int,
        max_tokens: int,
        max_len: int,
        *,
        q_heads: int,
        max_new: int | None = None,
        windows: Sequence[int | None] = (None,),
        dtype: DType | None = None,
        shared_prefixes: bool = False,
    ) -> CapacityPlan:
        """Buffers and grids of a fixed size for CUDA graphs, as the package's docstring says.

        ``max_len``: tokens of a sequence. ``max_new``: new ones of a sequence (None: all).
        ``dtype``: of q, k and v (default: that of the KV cache, if it has no codes).
        ``shared_prefixes``: ``update`` may be given some. Raises as :meth:`bind` does.
        """
        device_view = self._device_view(view)
        if q_heads % device_view.kv_heads:
            raise ValueError(
                f"{q_heads} query heads are no multiple of {device_view.kv_heads} KV heads"
            )
        limits = _Limits(max_seqs, max_tokens, max_new or max_tokens, max_len, shared_prefixes)
        plans = _FixedPlans(
            self.launcher,
            device_view,
            self._copy_tables,
            q_heads,
            limits,
            windows,
            device_view.dtype if dtype is None else as_torch(dtype),
            self._workspace,
        )
        return CapacityPlan(plans)

    def _device_view(self, view: KVView) -> DeviceView:
        known = self._view
        if known is None or known.view is not view:
            # NOTE: another thread may bind in between: the one kept may be its view.
            known = self._view = DeviceView(view)
        device = self.launcher.device
        if known.device != device:
            raise ValueError(f"the KV cache is on {known.device}, the kernels on {device}")
        return known


class _Workspace:
    """Working memory that plans of a fixed size share, one at a time."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """``[size]``, or more. What captured steps were given before stays theirs."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (dtype, device):
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=device)
        return kept


class _PlanInUse:
    """One plan on the device, with memory for its parts and the launch parameters."""

    def __init__(
        self,
        buffer: PlanBuffer,
        tables: Tables,
        num_parts: int,
        q_heads: int,
        blocks: tuple[int, int, int],
        needs_scratch: bool,
        device: torch.device,
        workspace: _Workspace,
    ) -> None:
        self.buffer = buffer
        self.blocks = dict(zip(("vms_decode", "vms_append", "vms_combine"), blocks, strict=True))
        head_dim = tables.view.head_dim
        scratch = blocks[1] * append_scratch(head_dim) if needs_scratch else 0
        self.parts, self.part_sums, self.scratch = (
            workspace.of(name, size, torch.float32, device)
            for name, size in (
                ("parts", num_parts * q_heads * head_dim),
                ("part sums", num_parts * q_heads * 2),
                ("scratch", scratch),
            )
        )
        self.table, self.table_width = tables.place(buffer)


class _Plans(ABC):
    """Plans by window. Subclasses decide when they are made and how large they are.

    ``dtype``: of q, k and v; None: of those that :meth:`use` gets first.
    """

    def __init__(
        self, launcher: Launcher, view: DeviceView, copy_tables: bool, dtype: torch.dtype | None
    ) -> None:
        self.launcher = launcher
        self.view = view
        self._variant = None if dtype is None else view.variant(dtype)
        self._copy_tables = copy_tables
        self._tables: dict[int | None, Tables] = {}
        self._by_window: dict[int | None, _PlanInUse] = {}
        self._rotated: torch.Tensor | None = None

    @property
    def variant(self) -> Variant:
        if self._variant is None:
            raise ValueError("a KV cache of codes: its plans need the dtype of q, k and v")
        return self._variant

    def use(self, dtype: torch.dtype) -> None:
        if self._variant is None:
            self._variant = self.view.variant(dtype)

    @abstractmethod
    def of(self, window: int | None, q_heads: int) -> _PlanInUse: ...

    @abstractmethod
    def check_tokens(self, num_tokens: int) -> None: ...

    def tables(self, window: int | None) -> Tables:
        if window not in self._tables:
            self._tables[window] = Tables(
                self.view, window, self.launcher.device, self._copy_tables
            )
        return self._tables[window]

    def rotated(self, q: torch.Tensor) -> torch.Tensor:
        """The buffer for rotated queries, which all layers share."""
        if self._rotated is None or self._rotated.shape != q.shape:
            self._rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._rotated

    def _plan(
        self,
        batch: RaggedBatch,
        window: int | None,
        q_heads: int,
        prefixes: Sequence[SharedPrefix],
    ) -> CudaPlan:
        tables = self.tables(window)
        if tables.is_own:
            prefixes = ()  # one that begins alike has been given up by some, perhaps
        step = Step(tables.rows(batch), batch.num_past, batch.num_new, batch.starts)
        kv_heads = self.view.kv_heads
        resident = self.launcher.resident(self.variant)
        heads = Heads(kv_heads, q_heads // kv_heads, append_rows(self.view.head_dim))
        return make_plan(step, heads, resident, window, prefixes)

    def _fill(self, buffer: PlanBuffer, batch: RaggedBatch, plan: CudaPlan, tables: Tables) -> None:
        rows = np.repeat(tables.rows(batch), batch.num_new)
        buffer.fill(plan, rows, batch.positions, tables.copy(batch))


class _EagerPlans(_Plans):
    """Plans for one batch, made at first use."""

    def __init__(
        self,
        launcher: Launcher,
        view: DeviceView,
        copy_tables: bool,
        batch: RaggedBatch,
        prefixes: Sequence[SharedPrefix],
    ) -> None:
        super().__init__(launcher, view, copy_tables, view.dtype)
        self._batch = batch
        self._prefixes = prefixes

    def check_tokens(self, num_tokens: int) -> None:
        if num_tokens != self._batch.num_tokens:
            raise ValueError(f"q has {num_tokens} rows, the batch {self._batch.num_tokens} tokens")

    def of(self, window: int | None, q_heads: int) -> _PlanInUse:
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = self._make(window, q_heads)
        return found

    def _make(self, window: int | None, q_heads: int) -> _PlanInUse:
        batch, device = self._batch, self.launcher.device
        plan = self._plan(batch, window, q_heads, self._prefixes)
        tables = self.tables(window)
        table = tables.copy(batch)
        shape = (0, 0) if table is None else (table.shape[0], table.shape[1])
        buffer = PlanBuffer(Counts.of(plan, batch.num_tokens, shape), device)
        self._fill(buffer, batch, plan, tables)
        append = len(plan.append) * self.view.kv_heads
        if plan.needs_scratch:  # of each block
            append = min(append, self.launcher.resident(self.variant).append)
        blocks = (
            len(plan.decode) * self.view.kv_heads,
            append,
            -(-len(plan.split) * q_heads // _COMBINE_ROWS),
        )
        room = _Workspace()  # the step before may still run
        return _PlanInUse(
            buffer, tables, plan.num_parts, q_heads, blocks, plan.needs_scratch, device, room
        )


class _Limits:
    """The capacity of a plan of a fixed size."""

    def __init__(
        self, max_seqs: int, max_tokens: int, max_new: int, max_len: int, shared_prefixes: bool
    ) -> None:
        self.seqs, self.tokens, self.new, self.len = max_seqs, max_tokens, max_new, max_len
        self.shared_prefixes = shared_prefixes

    def may_append(self, group: int) -> bool:
        """Whether any item is the append kernel's: more rows than a decode has, or a prefix's."""
        return self.shared_prefixes or self.new * group > DECODE_ROWS

    def counts(self, tables: Tables, group: int, limits: tuple[int, int]) -> Counts:
        """``limits``: up to how many items each kernel splits (plan.chunk_limit)."""
        # Every tile has one token or more, of its sequence or (once more) of a shared prefix.
        tiles = self.tokens * (2 if self.shared_prefixes else 1)
        table_rows, table_width = tables.capacity(self.seqs, self.new, self.len)
        return Counts(
            tokens=self.tokens,
            decode=item_limit(tiles, limits[0]),
            append=item_limit(tiles, limits[1]) if self.may_append(group) else 0,
            split=self.tokens,
            lists=self.tokens if self.shared_prefixes else 0,
            table_rows=table_rows,
            table_width=table_width,
        )

    def parts(self, group: int, head_dim: int, limits: tuple[int, int]) -> int:
        """Tokens times parts: what is split has no more parts than the limits say."""
        all_parts = self.tokens * -(-self.len // PART_TOKENS)
        if self.shared_prefixes:
            return all_parts
        of_tile = min(self.tokens, self.new)
        split = DECODE_PARTS * limits[0] * min(of_tile, max(1, DECODE_ROWS // group))
        if self.may_append(group):
            most = max(1, append_rows(head_dim) // group)
            split += APPEND_PARTS * limits[1] * min(of_tile, most)
        return min(all_parts, split)

    def check(self, batch: RaggedBatch, prefixes: Sequence[SharedPrefix]) -> None:
        longest = int((batch.num_past + batch.num_new).max()) if batch.num_sequences else 0
        most_new = int(batch.num_new.max()) if batch.num_sequences else 0
        for what, number, room in (
            ("sequences", batch.num_sequences, self.seqs),
            ("tokens", batch.num_tokens, self.tokens),
            ("new tokens of a sequence", most_new, self.new),
            ("tokens in one sequence", longest, self.len),
        ):
            if number > room:
                raise ValueError(f"a batch of {number} {what}: the plan has room for {room}")
        if prefixes and not self.shared_prefixes:
            raise ValueError("the plan was made without shared_prefixes=True")


class _FixedPlans(_Plans):
    """Plans for any batch within limits, made once and refilled."""

    def __init__(
        self,
        launcher: Launcher,
        view: DeviceView,
        copy_tables: bool,
        q_heads: int,
        limits: _Limits,
        windows: Sequence[int | None],
        dtype: torch.dtype | None,
        workspace: _Workspace,
    ) -> None:
        super().__init__(launcher, view, copy_tables, dtype)
        self._limits = limits
        self.q_heads = q_heads
        resident = launcher.resident(self.variant)
        items = (
            chunk_limit(resident.decode, view.kv_heads),
            chunk_limit(resident.append, view.kv_heads),
        )
        group = q_heads // view.kv_heads
        counts = {window: limits.counts(self.tables(window), group, items) for window in windows}
        of_all = next(iter(counts.values()))  # which differ in their tables alone
        num_parts = self._num_parts = limits.parts(group, view.head_dim, items)
        combine = -(-limits.tokens * q_heads // _COMBINE_ROWS)
        blocks = (
            min(resident.decode, of_all.decode * view.kv_heads),
            min(resident.append, of_all.append * view.kv_heads),
            min(combine, 2 * resident.decode),
        )
        device = launcher.device
        scratch = limits.len > PART_TOKENS
        for window in windows:
            buffer = PlanBuffer(counts[window], device)
            plan = _PlanInUse(
                buffer,
                self.tables(window),
                num_parts,
                q_heads,
                blocks,
                scratch,
                device,
                workspace,
            )
            self._by_window[window] = plan
        size = limits.tokens * q_heads * view.head_dim
        kept = workspace.of("rotated", size, self.variant.dtype, device)
        self._rotated = kept[:size].view(limits.tokens, q_heads, view.head_dim)

    def rotated(self, q: torch.Tensor) -> torch.Tensor:
        assert self._rotated is not None
        return self._rotated[: q.shape[0]]

    def check_tokens(self, num_tokens: int) -> None:
        if num_tokens > self._limits.tokens:
            raise ValueError(f"q has {num_tokens} rows, the plan room for {self._limits.tokens}")

    def of(self, window: int | None, q_heads: int) -> _PlanInUse:
        if q_heads != self.q_heads:
            raise ValueError(f"{q_heads} query heads: the plan was made for {self.q_heads}")
        found = self._by_window.get(window)
        if found is None:
            raise ValueError(f"a window of {window}: the plan was made for {list(self._by_window)}")
        return found

    def update(self, batch: RaggedBatch, prefixes: Sequence[SharedPrefix]) -> None:
        self._limits.check(batch, prefixes)
        self.view.check(batch)
        plans = {
            window: self._plan(batch, window, self.q_heads, prefixes) for window in self._by_window
        }
        for window, plan in plans.items():
            found = self._by_window[window]
            assert plan.num_parts <= self._num_parts, "plan.chunk_limit bounds them"
            self._fill(found.buffer, batch, plan, self.tables(window))


class CapacityPlan:
    """Bind :meth:`CudaPagedBackend.plan_capacity`. ``call``: once per layer, in a capture too."""

    def __init__(self, plans: _FixedPlans) -> None:
        self._plans = plans
        self.call = CudaCall(plans)

    def update(self, batch: RaggedBatch, prefixes: Sequence[SharedPrefix] = ()) -> None:
        """Put another batch in place, in the order of the current stream.

        Raises ``ValueError``, with the numbers, for one that does not fit; the plan is then as it
        was.
        """
        self._plans.update(batch, prefixes)


class CudaCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`."""

    def __init__(self, plans: _Plans) -> None:
        self._plans = plans
        self._attend, self._combine = AttendArgs(), CombineArgs()
        self._write = KeyValueWriter(plans.launcher, plans.view)

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend, as the protocol says.

        ``out``: contiguous, as q in shape and dtype. ``lse``: float32
        ``[tokens, q_heads]``, contiguous, to be filled with the natural logarithm of the sum of the
        exponentials of each row's scores, without its sink.

        Raises ``ValueError`` for shapes or strides that do not agree, before anything is launched.
        """
        plans, view = self._plans, self._plans.view
        plans.check_tokens(q.shape[0])
        plans.use(q.dtype)
        check_inputs(view, plans.variant.dtype, q, k, v, rotary)
        _check_spec(spec, q.shape[1])
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        _check_contiguous(out, "out", q.dtype, q.shape)
        if lse is not None:
            _check_contiguous(lse, "lse", torch.float32, q.shape[:2])
        if not q.shape[0]:
            return out
        plan = plans.of(spec.window, q.shape[1])
        view.fill(self._attend.kv, spec.layer, plan.table, plan.table_width)
        rows, positions = plan.buffer.address("rows"), plan.buffer.address("positions")
        places = Places(rows, positions, plan.table, plan.table_width)
        rotated = None if rotary is None else plans.rotated(q)
        q = self._write(plans.variant, spec.layer, places, q, k, v, rotary, rotated)
        self._launch_attention(plan, spec, q, out, lse)
        return out

    def attend(self, spec: LayerAttention, q: torch.Tensor) -> torch.Tensor:
        """Attend alone: q is rotated, and K and V of the new tokens are in the cache already.

        Raises as a call does.
        """
        plans, view = self._plans, self._plans.view
        plans.check_tokens(q.shape[0])
        plans.use(q.dtype)
        check_queries(view, plans.variant.dtype, q)
        _check_spec(spec, q.shape[1])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.shape[0]:
            plan = plans.of(spec.window, q.shape[1])
            view.fill(self._attend.kv, spec.layer, plan.table, plan.table_width)
            self._launch_attention(plan, spec, q, out, None)
        return out

    def _launch_attention(
        self,
        plan: _PlanInUse,
        spec: LayerAttention,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        args, buffer, kv_heads = self._attend, plan.buffer, self._plans.view.kv_heads
        args.q, args.out = q.data_ptr(), out.data_ptr()
        args.lse = 0 if lse is None else lse.data_ptr()
        args.parts, args.part_sums = plan.parts.data_ptr(), plan.part_sums.data_ptr()
        args.scratch = plan.scratch.data_ptr()
        for name in ("lists", "positions", "part_starts"):
            setattr(args, name, buffer.address(name))
        args.q_token_stride = q.stride(0) * q.element_size()
        args.q_head_stride = q.stride(1) * q.element_size()
        args.scale, args.softcap = spec.scale * _LOG2E, 0.0
        if spec.softcap is not None:
            args.scale, args.softcap = 2 * args.scale / spec.softcap, spec.softcap * _LOG2E
        args.sinks = 0 if spec.sinks is None else spec.sinks.data_ptr()
        args.window = spec.window or 0
        args.kv_heads, args.group = kv_heads, q.shape[1] // kv_heads
        for kernel, items in (("vms_decode", "decode"), ("vms_append", "append")):
            if plan.blocks[kernel]:
                args.items, args.num_items = buffer.address(items), buffer.address(f"num_{items}")
                self._launch(plan, kernel, args)
        if plan.blocks["vms_combine"]:
            combine = self._combine
            combine.parts, combine.part_sums = args.parts, args.part_sums
            combine.out, combine.lse, combine.sinks = args.out, args.lse, args.sinks
            combine.split, combine.num_split = buffer.address("split"), buffer.address("num_split")
            combine.q_heads = q.shape[1]
            self._launch(plan, "vms_combine", combine)

    def _launch(self, plan: _PlanInUse, kernel: str, args: AttendArgs | CombineArgs) -> None:
        plans = self._plans
        plans.launcher.launch(plans.variant, kernel, plan.blocks[kernel], args)


def _check_spec(spec: LayerAttention, q_heads: int) -> None:
    if not spec.scale > 0 or (spec.softcap is not None and not spec.softcap > 0):
        raise ValueError(f"scale {spec.scale} and softcap {spec.softcap} must be positive")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"a window of {spec.window} positions")
    if spec.sinks is not None:
        _check_contiguous(spec.sinks, "sinks", torch.float32, (q_heads,))


def _check_contiguous(
    tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: Sequence[int]
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {list(shape)}")
