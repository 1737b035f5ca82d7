"""Types of the C++ core: page drivers, KV memory and CPU kernels.

Runs cross the boundary as tuples: ``(frame, count)``, ``(address, frame, count, access)``,
``(address, num_bytes)``, ``(address, num_bytes, access)``, ``(destination, source, num_bytes)``.
Misuse raises ``ValueError``, a refusal of the system ``vmserve.errors.DriverError`` or
``OutOfMemoryError``, a broken conservation law ``AssertionError``.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

class Access(enum.Enum):
    NONE = ...
    READ = ...
    READ_WRITE = ...

class Backing(enum.Enum):
    TRAP = ...
    ZEROS = ...

class ZeroPolicy(enum.Enum):
    ALWAYS = ...
    TENANT = ...
    NEVER = ...

class SystemLimits:
    def __init__(self, root: str = "") -> None: ...
    def max_map_count(self) -> int: ...
    def available_memory(self) -> tuple[int, str]: ...

class Capabilities:
    @property
    def unmap(self) -> bool: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def zeros_backing(self) -> bool: ...
    @property
    def host_memory(self) -> bool: ...
    @property
    def asynchronous(self) -> bool: ...
    @property
    def copy_stream(self) -> bool: ...

class DriverStats:
    @property
    def created_frames(self) -> int: ...
    @property
    def mapped_frames(self) -> int: ...
    @property
    def num_mappings(self) -> int: ...
    @property
    def max_mappings(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...

class PageDriver:
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def granularity(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def num_frames(self) -> int: ...
    def reserve(self, num_bytes: int, backing: Backing) -> int: ...
    def free_reservation(self, address: int) -> None: ...
    def create(self, runs: Sequence[tuple[int, int]]) -> None: ...
    def destroy(self, runs: Sequence[tuple[int, int]]) -> None: ...
    def map(
        self, runs: Sequence[tuple[int, int, int, Access]], *, prefault: bool = False
    ) -> None: ...
    def unmap(self, runs: Sequence[tuple[int, int]]) -> None: ...
    def set_access(self, runs: Sequence[tuple[int, int, Access]]) -> None: ...
    def zero(self, runs: Sequence[tuple[int, int]]) -> None: ...
    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_out(self, runs: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_in(self, runs: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_mark(self) -> int: ...
    def copy_reached(self, mark: int) -> bool: ...
    def fence(self) -> None: ...
    def mark(self) -> int: ...
    def reached(self, mark: int) -> bool: ...
    def alloc_host(self, num_bytes: int) -> int: ...
    def free_host(self, address: int) -> None: ...
    def query(self, address: int) -> tuple[int, Access]: ...
    def stats(self) -> DriverStats: ...

class HostDriver(PageDriver):
    def __init__(
        self,
        frame_bytes: int,
        num_frames: int,
        *,
        max_map_count: int = 0,
        limits: SystemLimits = ...,
    ) -> None: ...

class NullDriver(PageDriver):
    """Counts pages and touches nothing: for simulations. Its addresses lead nowhere."""

    def __init__(self, frame_bytes: int, num_frames: int) -> None: ...
    def work(self) -> tuple[int, int, int]:
        """Bytes zeroed, copied within the device, and copied to or from the host, so far."""

class CudaDriver(PageDriver):
    def __init__(
        self,
        frame_bytes: int,
        num_frames: int,
        *,
        device: int = 0,
        stream: int = 0,
        library: str = "libcuda.so.1",
        spare_bytes: int = ...,
        recommended_granularity: bool = False,
    ) -> None: ...

def cuda_granularity(device: int = 0, library: str = "libcuda.so.1") -> tuple[int, int]: ...

class FaultInjectingDriver(PageDriver):
    def __init__(
        self, inner: PageDriver, *, late_copies: bool = False, late_marks: bool = False
    ) -> None: ...
    def arm(
        self, call: int, *, forever: bool = False, code: int = ..., sticky: bool = False
    ) -> None: ...
    def disarm(self) -> None: ...
    def run_copies(self, count: int) -> int: ...
    def reach_marks(self, count: int) -> None: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def num_refused(self) -> dict[str, int]: ...

class GroupDriver(PageDriver):
    """Every call goes to all members, with the same frames at the same offsets.

    Addresses are those of member 0. If the members cannot be kept alike, every later call is
    refused.
    """

    def __init__(self, members: Sequence[PageDriver]) -> None: ...
    @property
    def num_members(self) -> int: ...
    def address_of(self, member: int, address: int) -> int:
        """The member's own address of what the group has at ``address``."""

def make_ring(frame_bytes: int, num_frames: int) -> int:
    """A descriptor of memory that rank 0 and one rank share, for a driver of such frames.

    It has no name and is closed on exec; the caller passes it to the rank and closes it.
    """

def ring_frames(ring_fd: int) -> tuple[int, int]:
    """What the rank's driver has to have: bytes of a frame, and how many frames."""

class RemoteDriver(PageDriver):
    """A rank's driver, for rank 0. Addresses are the rank's own.

    Waits until the rank has its :class:`RankLoop`. A rank whose process (``rank_pid``, until the
    loop says it) ends, or that does not answer, makes every call a sticky ``DriverError``.
    """

    def __init__(
        self,
        ring_fd: int,
        *,
        rank_pid: int = 0,
        attach_timeout: float = 60.0,
        answer_timeout: float = 120.0,
    ) -> None: ...
    @property
    def failure(self) -> str:
        """Why the rank answers no more; empty while it does."""

class RankLoop:
    """Executes on ``driver``, in a thread of its own, what rank 0 asks for."""

    def __init__(self, ring_fd: int, driver: PageDriver) -> None: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why it ended; empty while it runs."""
    def buffer(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Memory in a reservation of rank 0's, which may be touched where frames are mapped."""
    def close(self) -> None:
        """End the loop; the memory is freed once no buffer is left."""

class RelayedRing:
    """Rank 0's ring of a rank on another host: its calls and their answers, as bytes."""

    def __init__(self, ring_fd: int) -> None: ...
    def serve(self, terms: bytes) -> None:
        """Let rank 0 begin. Raises ``ValueError`` for another build's terms, or other frames."""
    def take(self) -> bytes | None:
        """Wait for a call; None once rank 0 has closed its driver, or after :meth:`end`."""
    def answer(self, answer: bytes) -> None:
        """Raises ``ValueError`` for what is no answer."""
    def end(self, reason: str) -> None:
        """Make rank 0's calls fail from now on."""

class RelayEnd:
    """On the rank's host, beside the :class:`RankLoop` of the same ring."""

    def __init__(self, ring_fd: int) -> None: ...
    def terms(self) -> bytes: ...
    def execute(self, call: bytes) -> bytes:
        """Return the answer. Raises ``ValueError`` for what is no call, or if the loop ended."""

class PluginDriver(PageDriver):
    """A driver from a shared library: see drivers_ext/README.md.

    Raises ``ValueError`` when the library cannot be loaded or does not keep to the ABI.
    """

    def __init__(
        self, path: str, frame_bytes: int, num_frames: int, *, options: Mapping[str, str] = ...
    ) -> None: ...
    @property
    def plugin_name(self) -> str: ...

class View(enum.Enum):
    VIRTUAL = ...
    PAGED = ...

class OpKind(enum.Enum):
    ATTACH = ...
    FORK = ...
    CONVERT = ...
    SWAP_OUT = ...
    SWAP_IN = ...
    GROW = ...

class MapperMode(enum.Enum):
    OFF = ...
    MANUAL = ...
    THREAD = ...

class Health(enum.Enum):
    HEALTHY = ...
    DEGRADED = ...
    FAILED = ...

class Plan:
    @property
    def needed_pages(self) -> int: ...
    @property
    def available_pages(self) -> int: ...
    @property
    def excess_pages(self) -> int: ...
    @property
    def waiting_pages(self) -> int: ...
    @property
    def missing_slots(self) -> int: ...
    @property
    def missing_swap_blocks(self) -> int: ...
    @property
    def lost_prefixes(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def needed_mappings(self) -> int: ...
    @property
    def available_mappings(self) -> int: ...
    @property
    def fits(self) -> bool: ...

class MemoryStats:
    """A snapshot. Pages are counted once, however many groups and aliases they have.

    committed = free + used + idle + waiting + held. What a field means: stats.def.
    """

    health: Final[Health]
    page_bytes: Final[int]
    page_tokens: Final[int]
    block_tokens: Final[int]
    blocks_per_page: Final[int]
    limit_pages: Final[int]
    committed_pages: Final[int]
    free_pages: Final[int]
    used_pages: Final[int]
    idle_pages: Final[int]
    waiting_pages: Final[int]
    held_pages: Final[int]
    quarantined_pages: Final[int]
    shared_pages: Final[int]
    split_pages: Final[int]
    used_blocks: Final[int]
    shared_blocks: Final[int]
    cached_blocks: Final[int]
    num_slots: Final[int]
    used_slots: Final[int]
    parked_slots: Final[int]
    parked_pages: Final[int]
    spare_pages: Final[int]
    num_seqs: Final[int]
    virtual_seqs: Final[int]
    paged_seqs: Final[int]
    swapped_seqs: Final[int]
    used_tokens: Final[int]
    tail_waste_bytes: Final[int]
    swap_blocks: Final[int]
    swap_capacity_blocks: Final[int]
    copying_blocks: Final[int]
    memfd_allocated_bytes: Final[int]
    num_mappings: Final[int]
    free_mappings: Final[int]
    pending_repairs: Final[int]
    persist_bytes: Final[int]
    persist_waiting_blocks: Final[int]
    pages_mapped_total: Final[int]
    pages_unmapped_total: Final[int]
    pages_committed_total: Final[int]
    pages_given_back_total: Final[int]
    pages_zeroed_total: Final[int]
    map_calls_total: Final[int]
    unmap_calls_total: Final[int]
    access_calls_total: Final[int]
    arena_map_calls_total: Final[int]
    unhidden_calls_total: Final[int]
    hidden_calls_total: Final[int]
    mapper_waits_total: Final[int]
    adopted_pages_total: Final[int]
    adopted_slots_total: Final[int]
    forks_total: Final[int]
    cow_blocks_total: Final[int]
    copied_blocks_total: Final[int]
    converted_to_virtual_total: Final[int]
    converted_to_paged_total: Final[int]
    converted_zero_copy_total: Final[int]
    prefix_query_blocks_total: Final[int]
    prefix_hit_blocks_total: Final[int]
    evicted_blocks_total: Final[int]
    published_blocks_total: Final[int]
    compactions_total: Final[int]
    compacted_blocks_total: Final[int]
    swapped_out_blocks_total: Final[int]
    swapped_in_blocks_total: Final[int]
    swap_copy_runs_total: Final[int]
    persist_written_blocks_total: Final[int]
    persist_written_bytes_total: Final[int]
    persist_read_bytes_total: Final[int]
    persist_restored_blocks_total: Final[int]
    persist_missed_blocks_total: Final[int]
    persist_broken_blocks_total: Final[int]
    persist_refused_blocks_total: Final[int]
    persist_evicted_blocks_total: Final[int]
    persist_hidden_seconds_total: Final[float]
    persist_wait_seconds_total: Final[float]
    map_seconds_total: Final[float]
    mapper_seconds_total: Final[float]
    mapper_wait_seconds_total: Final[float]
    def as_dict(self) -> dict[str, int | float]:
        """All but ``health``, by name."""

def sha256(data: bytes) -> bytes: ...

# -- blocks in files (csrc/store)

def checksum(data: Any, by_table: bool = False) -> bytes:
    """16 bytes: four CRC-32C over every fourth word."""

def verify_file(path: str) -> str:
    """What is wrong with the file of a block; empty if it is whole."""

class FileOps:
    def __init__(self) -> None: ...

class FaultFileOps(FileOps):
    num_changes: Final[int]
    def __init__(self) -> None: ...
    def kill_after(self, count: int) -> None:
        """Of all bytes written and other changes, the first ``count`` happen."""

    def refuse_writes(self, error: int) -> None: ...
    def refuse_reads(self, error: int) -> None: ...

class PageStore:
    def has(self, digest: bytes) -> bool: ...
    def put(self, digest: bytes, content: bytes) -> bool: ...
    def get(self, digest: bytes, num_bytes: int) -> bytes | None: ...
    def take_message(self) -> str: ...
    def stats(self) -> dict[str, int]: ...

class StoreDirectory:
    num_bytes: Final[int]
    def __init__(self, path: str, limit_bytes: int, ops: FileOps | None = None) -> None: ...
    def space(self, name: str, id: bytes) -> PageStore: ...

#: (kind, sequence, num_tokens, first_token, other sequence, view)
_Op = tuple[OpKind, int, int, int, int, View]

class KVMemory:
    """``kinds``: of each its ``driver`` and options of its own; others are common to all."""

    closed: Final[bool]
    def __init__(
        self,
        kinds: Sequence[dict[str, Any]],
        limit_pages: int,
        *,
        num_groups: int = ...,
        block_tokens: int = ...,
        blocks_per_page: int = ...,
        token_bytes: int = ...,
        max_seqs: int = ...,
        num_slots: int = ...,
        max_len: int = ...,
        max_pages: int = ...,
        window: int = 0,
        state_bytes: int = 0,
        checkpoint_tokens: int = 0,
        read_slack: int = 0,
        grow_pages: int = 1,
        ready_pages: int = 0,
        zero_policy: ZeroPolicy = ...,
        prefix_caching: bool = True,
        null_page: bool = False,
        deferred_reclamation: bool = True,
        seal_read_only: bool = True,
        access_under_readers: bool = True,
        swap_blocks: int = 0,
        mapper: MapperMode = ...,
        lookahead_tokens: int = 0,
        eager_slots: int = 0,
        eager_pages: int = 0,
        reclaim_share: float = 0.1,
    ) -> None: ...
    def open(
        self, tenant: int = 0, view: View = ..., salt: bytes = b"", tokens: Sequence[int] = ()
    ) -> int | None: ...
    def match(self, seq: int) -> int: ...
    def plan(self, ops: Sequence[_Op]) -> Plan: ...
    def apply(self, ops: Sequence[_Op], version: int) -> int: ...
    def plan_step(self, grows: NDArray[np.int64], ops: Sequence[_Op] = ()) -> Plan: ...
    def apply_step(
        self, grows: NDArray[np.int64], version: int, ops: Sequence[_Op] = ()
    ) -> int: ...
    def keep(
        self,
        seqs: Sequence[int] | NDArray[np.int64],
        lengths: Sequence[int] | NDArray[np.int64],
    ) -> None: ...
    def append_tokens(
        self,
        seqs: Sequence[int] | NDArray[np.int64],
        tokens: Sequence[int] | NDArray[np.int64],
    ) -> None: ...
    def open_seqs(self) -> list[int]: ...
    def release(self, seq: int) -> None: ...
    def complete(self, epoch: int) -> None: ...
    def abandon_epoch(self, epoch: int) -> None: ...
    def launched(self, epoch: int) -> None: ...
    def finish_copies(self) -> bool: ...
    def is_copying(self) -> bool: ...
    @property
    def begun_epoch(self) -> int: ...
    @property
    def completed_epoch(self) -> int: ...
    def restore(self, seq: int, attaching: Sequence[_Op] = ()) -> bool: ...
    def finish_restores(self) -> None: ...
    def write_when_idle(self) -> None: ...
    def flush(self, seconds: float) -> bool: ...
    def persist_message(self) -> str: ...
    def clear_cache(self) -> None: ...
    def trim(self, keep_pages: int = 0, drop_idle: bool = False) -> int: ...
    def set_limit(self, limit_pages: int) -> None: ...
    def settle_mapper(self) -> None: ...
    def stats(self) -> MemoryStats: ...
    def memory_map(
        self, max_cells: int
    ) -> tuple[int, int, bytes, list[int], NDArray[np.int32]]: ...
    def last_error(self) -> str: ...
    def check(self) -> None: ...
    def fingerprint(self) -> int: ...
    def require_usable(self) -> None: ...
    def close(self) -> None: ...
    def compact(self) -> int: ...
    def persist_to(self, stores: Sequence[PageStore], touch_seconds: float = 60) -> None: ...
    def run_mapper(self, max_commands: int) -> int: ...
    def run_store(self, max_jobs: int) -> int: ...
    def length(self, seq: int) -> int: ...
    def sealed(self, seq: int) -> int: ...
    def view(self, seq: int) -> View: ...
    def swapped(self, seq: int) -> bool: ...
    def slot(self, seq: int) -> int | None: ...
    def slots(self, seqs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]: ...
    def blocks(self, seq: int, kind: int = 0) -> NDArray[np.int32]: ...
    def slot_pages(self, slot: int, kind: int = 0) -> NDArray[np.int32]: ...
    def block_refs(self, block: int, kind: int = 0) -> int: ...
    def kind_stats(self) -> list[MemoryStats]: ...
    def block_tables(self, kind: int = 0) -> NDArray[np.int32]: ...
    def slots_buffer(self, group: int, kind: int = 0) -> NDArray[np.uint8]: ...
    def arena_buffer(self, group: int, kind: int = 0) -> NDArray[np.uint8]: ...
    def shadow_buffer(self, group: int, kind: int = 0) -> NDArray[np.uint8]: ...

#: (address, dtype, shape, strides in elements)
_TensorTuple = tuple[int, str, Sequence[int], Sequence[int]]

def step_columns(
    sequences: list[Any], num_new: list[int] | None = None, window: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64], bool, bool, bool]:
    """What a step needs to know of its sequences; ``num_new``: their shares, None for 1 of each.

    Rows as :class:`vmserve.scheduler.base.Columns` has them, int64 ``[6, sequences]``; growths
    int64 ``[sequences, 3]``; whether each share is all that its sequence has to compute; whether
    each is besides one token behind a prompt; whether any sequence starts in this step.
    """

def take_unpublished(
    sequences: list[Any], memory_ids: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens that became known since the last call: whose they are, and which; ``[tokens]`` each.

    Sequences whose ``memory_id`` is not the given one any more have ended: nothing of them.
    """

def cpu_isas() -> list[str]: ...
def row_weights(
    values: NDArray[np.float32], temperature: float, shift: float, isa: str = ""
) -> NDArray[np.float32]:
    """``exp(values / temperature - shift)``, as the sampler's kernels have it."""

def untrack(tokens: list[int]) -> None: ...
def uniform_of(seed: int, index: int, position: int) -> float: ...

class RowSampler:
    num_threads: int
    def __init__(
        self, vocab_size: int, greedy_below: float, num_threads: int = 1, isa: str = ""
    ) -> None: ...
    def sample(
        self, logits: _TensorTuple | NDArray[np.float32], rows: Sequence[Any]
    ) -> tuple[list[int], list[float], list[dict[int, tuple[float, int]] | None], int]:
        """Of each ``SamplingRow`` its token, log-probability and what it asked for besides.

        Last, how many rows were repaired.
        """

    def score(
        self, logits: _TensorTuple | NDArray[np.float32], targets: Sequence[int], num_likeliest: int
    ) -> tuple[list[int], list[float], list[dict[int, tuple[float, int]] | None], int]:
        """The same of tokens that are given; -1 likeliest tokens are the whole vocabulary."""

class PromptDrafter:
    num_bytes: int
    credit: float
    def __init__(self, policy: Any) -> None:
        """``policy``: with the attributes of vmserve.speculation.policy.DraftPolicy."""

    def __len__(self) -> int: ...
    def open(self, number: int, before: Sequence[int], num_prompt: int, most_tokens: int) -> None:
        """Index a text: ``before``, which no match crosses, and then what is proposed for. It ends
        with ``most_tokens`` tokens."""

    def close(self, number: int) -> None: ...
    def propose(
        self, numbers: Sequence[int], token_lists: Sequence[list[int]], num_prompt_rows: int
    ) -> list[list[int]] | None:
        """The drafts of a step of these sequences. A negative number: no draft of that one. None:
        no drafts."""

    def accepted(self, number: int, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of a draft of the last step proposed for."""

    def learn(self, seconds: float, attention: float) -> None:
        """Take how long that step took."""

    def may_pay(self, num_decoding: int) -> bool:
        """Whether a step of so many sequences may get drafts."""

class DraftLengths:
    """How long the drafts of a draft model are."""

    credit: float
    def __init__(self, policy: Any) -> None:
        """``policy``: with the attributes of vmserve.speculation.policy.DraftPolicy."""

    def open(self, number: int) -> None: ...
    def close(self, number: int) -> None: ...
    def choose(
        self, sequences: Sequence[tuple[int, int, int, int, int]], num_prompt_rows: int
    ) -> list[int]:
        """The lengths of a step's drafts. Each sequence: its number (negative: no draft), tokens,
        tokens that are to be read first, most tokens of a draft, and of the rest of its answer."""

    def ran(self, num_rows: int, num_sequences: int, seconds: float) -> None:
        """Take how long a step of the draft model took."""

    def accepted(self, number: int, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of a draft of the last step chosen for."""

    def learn(self, seconds: float, attention: float) -> None:
        """Take how long that step took."""

    def may_pay(self, num_decoding: int) -> bool:
        """Whether a step of so many sequences may get drafts."""

class CpuKvView:
    @overload
    def __init__(self, keys: Sequence[_TensorTuple], values: Sequence[_TensorTuple]) -> None: ...
    @overload
    def __init__(
        self,
        keys: Sequence[_TensorTuple],
        values: Sequence[_TensorTuple],
        block_tables: NDArray[np.int32],
        block_tokens: int,
    ) -> None: ...
    @overload
    def __init__(
        self,
        keys: Sequence[_TensorTuple],
        values: Sequence[_TensorTuple],
        block_tables: Sequence[NDArray[np.int32]],
        block_tokens: int,
        layer_tables: Sequence[int],
    ) -> None:
        """Layer ``i`` is read through ``block_tables[layer_tables[i]]``."""

    def set_states(self, pages: _TensorTuple, table: NDArray[np.int32]) -> None:
        """``pages``: float32 ``[pages, floats]``, the states of a sequence in each; ``table``:
        ``[sequences, blocks]``, of which the first block is a sequence's page."""

class CpuBatch:
    def __init__(
        self,
        view: CpuKvView,
        places: Sequence[int] | NDArray[np.int64],
        num_past: Sequence[int] | NDArray[np.int64],
        num_new: Sequence[int] | NDArray[np.int64],
        state_places: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> None:
        """``state_places``: rows of the table of states; None: ``places``."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def last_position(self) -> int:
        """The highest position of a new token; -1 without any."""

def unpack_codes(type: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of quantized blocks of a GGUF file, one to a byte: ``[rows, bytes of a row]`` to
    ``[rows, columns]``; 0 to 15 of 4 bits, the bits of int8 of others."""

class GroupedWeights:
    """Integer codes ``[outputs, inputs]`` with a scale, and perhaps a minimum, for each output and
    ``group`` inputs: a weight is ``scale * code + minimum``.

    bits: 4 (codes 0 .. 15, one to a byte) or 8 (the bits of int8); scales, minima: ``[outputs,
    groups]``, minima None: ``-8 * scale`` with 4 bits, 0 with 8; scale_steps, minimum_steps:
    ``[outputs, steps]`` numbers of half precision that the scales of ``groups / steps`` successive
    groups are whole multiples of, if that is so: packed weights are smaller with them.
    """

    def __init__(
        self,
        *,
        codes: NDArray[np.uint8],
        bits: int,
        group: int,
        scales: NDArray[np.float32],
        minima: NDArray[np.float32] | None = None,
        scale_steps: NDArray[np.float32] | None = None,
        minimum_steps: NDArray[np.float32] | None = None,
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...

class CpuLinear:
    """A linear layer by itself, for tests and benchmarks."""

    def __init__(
        self,
        weights: _TensorTuple | GroupedWeights,
        *,
        quantization: str = "none",
        bf16_rows: bool = False,
        num_threads: int = 1,
        isa: str = "",
    ) -> None: ...
    def multiply(self, rows: NDArray[np.float32]) -> NDArray[np.float32]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def row_type(self) -> str: ...

class RankGroup:
    def __init__(self, descriptor: int, rank: int, size: int, board_bytes: int = 0) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def wait(self) -> None: ...
    def fail(self) -> None: ...
    def lose(self, rank: int) -> None: ...
    def publish(self, step: bytes) -> None: ...
    def receive(self) -> bytes: ...
    def slice(self, count: int) -> tuple[int, int]: ...

class DeltaShape:
    def __init__(
        self,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        tiled: bool,
    ) -> None: ...

class LatentShape:
    def __init__(self, *, q_rank: int, rank: int, plain: int, rotated: int, value: int) -> None: ...

class CpuDecoder:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        norm_eps: float,
        embedding_scale: float = 1.0,
        logits_softcap: float = 0.0,
        delta: DeltaShape | None = None,
        latent: LatentShape | None = None,
        row_dtype: str,
        quantization: str,
        num_threads: int,
        isa: str = "",
        group: RankGroup | None = None,
    ) -> None: ...
    def add_layer(
        self,
        *,
        attention_norm: _TensorTuple,
        q: _TensorTuple | GroupedWeights,
        k: _TensorTuple | GroupedWeights,
        v: _TensorTuple | GroupedWeights,
        output: _TensorTuple | GroupedWeights,
        mlp_norm: _TensorTuple,
        q_bias: _TensorTuple | None,
        k_bias: _TensorTuple | None,
        v_bias: _TensorTuple | None,
        output_bias: _TensorTuple | None = None,
        sinks: _TensorTuple | None = None,
        q_norm: _TensorTuple | None,
        k_norm: _TensorTuple | None,
        attention_out_norm: _TensorTuple | None = None,
        mlp_out_norm: _TensorTuple | None = None,
        head_dim: int,
        rotation: int,
        scale: float,
        window: int,
        softcap: float,
        gated: bool = False,
    ) -> None: ...
    def add_latent(
        self,
        *,
        attention_norm: _TensorTuple,
        q_down: _TensorTuple | GroupedWeights | None,
        q_norm: _TensorTuple | None,
        q: _TensorTuple | GroupedWeights,
        kv_down: _TensorTuple | GroupedWeights,
        kv_norm: _TensorTuple,
        key_up: Sequence[_TensorTuple | GroupedWeights],
        value_up: Sequence[_TensorTuple | GroupedWeights],
        output: _TensorTuple | GroupedWeights,
        mlp_norm: _TensorTuple,
        norm_eps: float,
        rotation: int,
        scale: float,
    ) -> None: ...
    def add_delta(
        self,
        *,
        attention_norm: _TensorTuple,
        qkv: _TensorTuple | GroupedWeights,
        z: _TensorTuple | GroupedWeights,
        gates: _TensorTuple | GroupedWeights,
        output: _TensorTuple | GroupedWeights,
        mlp_norm: _TensorTuple,
        taps: NDArray[np.float32],
        decay_rate: NDArray[np.float32],
        bias: NDArray[np.float32],
        norm: NDArray[np.float32],
    ) -> None: ...
    def add_mlp(
        self,
        *,
        gate: _TensorTuple | GroupedWeights,
        up: _TensorTuple | GroupedWeights,
        down: _TensorTuple | GroupedWeights,
        gate_bias: _TensorTuple | None = None,
        up_bias: _TensorTuple | None = None,
        down_bias: _TensorTuple | None = None,
        activation: str = "silu",
        clamp: tuple[float, float] | None = None,
    ) -> None: ...
    def add_router(
        self,
        *,
        weights: _TensorTuple,
        count: int,
        chosen: int,
        normalised: bool,
        bias: _TensorTuple | None = None,
        sigmoid: bool = False,
        correction: _TensorTuple | None = None,
        groups: int = 1,
        chosen_groups: int = 1,
        group_best: int = 1,
        scale: float = 1.0,
        shared: bool = False,
        shared_gate: _TensorTuple | None = None,
    ) -> None: ...
    def set_ends(
        self,
        embedding: tuple[int, int, str] | None,
        final_norm: _TensorTuple,
        head: _TensorTuple | GroupedWeights,
    ) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def row_weight_bytes(self) -> int: ...
    @property
    def expert_reads(self) -> int: ...
    @property
    def expert_rows(self) -> int: ...
    @property
    def delta_seconds(self) -> float: ...
    @property
    def row_type(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    num_threads: int
    @property
    def num_positions(self) -> int: ...
    def set_rotations(self, tables: list[tuple[_TensorTuple, _TensorTuple]]) -> None: ...
    def forward(
        self,
        token_ids: NDArray[np.int64],
        batches: list[CpuBatch],
        wanted: NDArray[np.int64] | None,
        num_hidden: int = 0,
        embedded: NDArray[np.float32] | None = None,
    ) -> tuple[NDArray[np.float32], list[float], NDArray[np.float32]]: ...

class CpuAttention:
    def __init__(self, num_threads: int, isa: str = "") -> None: ...
    @property
    def isa(self) -> str: ...
    num_threads: int
    def run(
        self,
        batch: CpuBatch,
        layer: int,
        q: _TensorTuple,
        k: _TensorTuple,
        v: _TensorTuple,
        rotary: tuple[_TensorTuple, _TensorTuple] | None,
        out: _TensorTuple,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        lse: int = 0,
        sinks: _TensorTuple | None = None,
    ) -> None: ...
    def fold(self, data: int, bytes: int) -> int: ...

def write_reference(
    batch: CpuBatch,
    layer: int,
    q: _TensorTuple,
    k: _TensorTuple,
    v: _TensorTuple,
    rotary: tuple[_TensorTuple, _TensorTuple] | None,
    q_out: int,
) -> None: ...
def attend_reference(
    batch: CpuBatch,
    layer: int,
    q: _TensorTuple,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: _TensorTuple | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]: ...
