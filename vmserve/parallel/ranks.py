"""The other ranks of an engine: processes that rank 0 starts, sends each step to and watches."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from vmserve.config import EngineConfig, ResolvedConfig
from vmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    RankLostError,
    VmserveError,
)
from vmserve.memory.device import MemoryDevice
from vmserve.memory.manager import MemoryManager
from vmserve.memory.ranks import GroupMemory
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.native import RankGroup, native_asked
from vmserve.models.slices import refusal_of_ranks
from vmserve.options import rules
from vmserve.parallel.columns import board_bytes, encode
from vmserve.parallel.launched import Placement
from vmserve.parallel.link import RankOrders
from vmserve.parallel.processes import LaunchedRank, LocalRank, RankProcess
from vmserve.runner.computing import Computing
from vmserve.runner.model_runner import Alone, StepColumns
from vmserve.system.threads import keep_to, split_cpus

if TYPE_CHECKING:
    import torch

    from vmserve.models.collective import Collective

__all__ = ["OneRank", "Ranks", "for_ranks", "refuse", "share_of"]

logger = logging.getLogger(__name__)

#: Seconds that a lost rank may take to end, so that its status can be reported.
_END_SECONDS = 0.3


def share_of(model: ModelConfig, size: int) -> ModelConfig:
    """The model with the heads of one of ``size`` ranks."""
    network = model.network
    if size == 1 or not isinstance(network, DecoderConfig):
        return model
    kv_heads = max(1, network.kv_heads // size)
    network = replace(network, q_heads=network.q_heads // size, kv_heads=kv_heads)
    return replace(model, network=network, kv_heads=kv_heads)


def refuse(model: ModelConfig, size: int) -> None:
    """Raises :class:`~vmserve.errors.UnsupportedError` for a model that so many ranks cannot
    divide."""
    network = model.network
    reason: str | None = f"{model.architecture} is computed by transformers"
    if isinstance(network, DecoderConfig):
        reason = refusal_of_ranks(network, size)
    rules.check({"tensor_parallel_size": size, "ranks_refusal": reason})


def for_ranks(
    config: EngineConfig, resolved: ResolvedConfig, placed: Placement | None
) -> tuple[EngineConfig, ResolvedConfig]:
    """The options with which ranks compute.

    Raises :class:`~vmserve.errors.ConfigurationError` for those with which they do not.
    """
    if placed is not None:
        asked = native_asked(config.linear_backend, config.quantization)
        known = {"launched_rank": placed.rank, "native_asked": asked}
        rules.check({**config.facts, **known})
        config = replace(config, linear_backend="torch")
    return config, replace(resolved, async_scheduling=False, captures_graphs=False)


class OneRank(Alone):
    """An engine without other ranks."""

    size = 1
    group: RankGroup | None = None
    collective: Collective | None = None
    failure: str | None = None

    def memory(self, own: MemoryDevice) -> MemoryDevice:
        return own

    def wait_loaded(self) -> None:
        pass

    def begin(self, memory: MemoryManager) -> None:
        pass

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """None can be lost."""

    def check(self) -> None:
        """None has ended."""

    def memory_failed(self, error: Exception) -> None:
        """It is no other rank's."""

    def close(self) -> None:
        pass


class Ranks:
    """Ranks 1 and up of an engine whose rank 0 is this process.

    They end with this process and with :meth:`close`; if one ends before, all do. From here on this
    thread computes on the first part of the CPUs, until :meth:`close`. ``device``: torch's, None
    for the native decoder.

    Raises :class:`~vmserve.errors.ConfigurationError` for fewer cores than ranks.
    """

    def __init__(
        self,
        size: int,
        computing: Computing,
        resolved: ResolvedConfig,
        *,
        kv_driver: str,
        attention_backend: str,
        device: torch.device | None,
        placed: Placement | None,
    ) -> None:
        self.size = size
        self._failure: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._members: list[RankProcess] = []
        #: Memory in which ranks of one host meet; None if a launcher has started them.
        self.group: RankGroup | None = None
        #: Sums of torch's ranks; None with the native decoder, whose group adds nothing up.
        self.collective: Collective | None = None
        self._store_port = 0
        self._store: Any = None
        self._restore: Callable[[], None] = lambda: None
        board = board_bytes(
            resolved.max_num_batched_tokens,
            resolved.max_num_seqs,
            resolved.max_model_len,
            resolved.block_tokens,
            len(set(computing.model.windows)),
        )
        common = RankOrders(
            rank=0,
            size=self.size,
            parent_pid=os.getpid(),
            cpus=(),
            log_level=logging.getLogger("vmserve").getEffectiveLevel(),
            path=str(computing.path),
            dtype=computing.dtype,
            kv_dtype=computing.kv_dtype,
            max_model_len=computing.max_model_len,
            native=computing.native,
            store_port=0,
            quantization=computing.quantization,
            device="cpu" if device is None else device.type,
            kv_driver=kv_driver,
            attention_backend=attention_backend,
            board_bytes=board,
        )
        try:
            if placed is None:
                rows = _rows_bytes(computing.model, resolved) if computing.native else 1 << 13
                self._start(common, rows, device)
            else:
                assert device is not None, "torch computes what a launcher has started"
                self._meet(common, placed, device)
        except BaseException:
            self.close()
            raise
        # One that nobody closes ends with what uses it.
        self._finalizer = weakref.finalize(self, _end, self.group, self._members)

    def _start(self, common: RankOrders, rows_bytes: int, device: torch.device | None) -> None:
        cpus: list[tuple[int, ...]] = [()] * self.size
        if common.device == "cpu":
            cpus = split_cpus(self.size, "tensor_parallel_size: {} ranks")
            self._restore = keep_to(cpus[0])
        else:
            num_gpus = _num_gpus()
            missing = {"num_gpus": num_gpus, "missing_gpus": self.size - num_gpus}
            rules.check({"tensor_parallel_size": self.size, **missing})
        if not common.native:
            # Imported late: the native decoder does without torch.
            from vmserve.parallel.meeting import local_store  # noqa: PLC0415

            self._store, port = local_store()
            common = msgspec.structs.replace(common, store_port=port)
        notify = weakref.WeakMethod(self._ended)
        descriptor = os.memfd_create("vmserve-ranks")
        try:
            os.ftruncate(descriptor, 2 * common.board_bytes + (1 << 13) + rows_bytes)
            self.group = RankGroup(descriptor, 0, self.size, common.board_bytes)
            for rank in range(1, self.size):
                orders = msgspec.structs.replace(common, rank=rank, cpus=cpus[rank])
                self._members.append(LocalRank(orders, descriptor, notify))
        finally:
            os.close(descriptor)
        if device is not None and not common.native:
            self._join(self._store, device)

    def _meet(self, common: RankOrders, placed: Placement, device: torch.device) -> None:
        from vmserve.parallel.meeting import Host  # noqa: PLC0415 - as above

        common = msgspec.structs.replace(common, parent_pid=0)
        self._store = host = Host(placed)
        notify = weakref.WeakMethod(self._ended)
        for rank in range(1, self.size):
            orders = msgspec.structs.replace(common, rank=rank)
            link = host.accept("orders", rank)
            self._members.append(LaunchedRank(orders, link, host.accept, notify))
        self._join(host.store, device, host.address)

    def _join(self, store: Any, device: torch.device, host: str = "127.0.0.1") -> None:
        from vmserve.models.torch_collective import TorchCollective  # noqa: PLC0415 - as above

        self.collective = TorchCollective(store, 0, self.size, device=device, host=host)

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    # -- loading --------------------------------------------------------------------------

    def memory(self, own: MemoryDevice) -> GroupMemory:
        return GroupMemory(own, self._members)

    def wait_loaded(self) -> None:
        """Wait until all have their weights. Raises what refuses these."""
        for member in self._members:
            self._answer(member, "loaded")

    def begin(self, memory: MemoryManager) -> None:
        """Wait until all are ready to compute with this memory, which is of :meth:`memory`."""
        device = memory.device
        assert isinstance(device, GroupMemory)
        for number, member in enumerate(self._members, start=1):
            member.link.send(device.describe(memory, number))
        for member in self._members:
            self._answer(member, "ready")
            logger.info("rank %d: process %d, CPUs %s", member.rank, member.pid, member.cpus)
        self._tables = [memory.block_tables(kind) for kind in range(len(memory.token_kinds))]
        self._block_tokens = memory.layout.block_tokens

    def _answer(self, member: RankProcess, expected: str) -> None:
        try:
            message, _ = member.link.receive()
        except EngineDeadError as error:
            raise self.lost(error) from error
        except ConfigurationError as error:
            raise type(error)(f"rank {member.rank} of {self.size}: {error}") from error
        assert message == expected

    # -- steps ----------------------------------------------------------------------------

    def computing(self, columns: StepColumns) -> AbstractContextManager[None]:
        """See :class:`~vmserve.runner.model_runner.OtherRanks`."""
        return self._computing(encode(columns, self._tables, self._block_tokens))

    @contextlib.contextmanager
    def _computing(self, step: bytes) -> Iterator[None]:
        try:
            if self.group is not None:
                self.group.publish(step)
            else:
                for member in self._members:
                    member.link.send(step)
            yield
        except Exception as error:
            raise self.lost(error) from error

    # -- death ----------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why the group has ended; None while it computes."""
        return self._failure

    def on_lost(self, listener: Callable[[str], None]) -> None:
        """Have it called with the reason when a rank ends, in any thread."""
        self._listeners.append(listener)

    def check(self) -> None:
        """Raises :class:`~vmserve.errors.RankLostError` if a rank has ended."""
        if self._failure is not None:
            raise RankLostError(self._failure)

    def memory_failed(self, error: Exception) -> None:
        """Raises :class:`~vmserve.errors.RankLostError`: the memories of ranks may differ now."""
        raise self.lost(error) from error

    def lost(self, error: Exception) -> RankLostError:
        """End the group because of an error in a step or in a call of a rank's memory."""
        if isinstance(error, EngineDeadError | OSError):
            # The system says how a rank ended, which is more.
            for member in self._members:
                member.ended.wait(_END_SECONDS / len(self._members))
        self._fail(f"{error}" if isinstance(error, VmserveError) else f"rank 0 failed: {error}")
        assert self._failure is not None
        return RankLostError(self._failure)

    def _ended(self, member: RankProcess, how: str) -> None:
        if self.group is not None:
            self.group.lose(member.rank)
        self._fail(f"rank {member.rank} of {self.size} {how}, and the engine with it")

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        if self.group is not None:
            self.group.fail()
        for listener in self._listeners:
            listener(reason)

    def close(self) -> None:
        """End them, and let this thread use all CPUs again."""
        with self._lock:
            failed, self._failure = self._failure is not None, self._failure or "it is closed"
        for member in self._members:
            if failed:
                member.kill()  # it may be stopped
            else:
                with contextlib.suppress(OSError):
                    member.link.send("end")
        _end(self.group, self._members)
        self._restore()


def _end(group: RankGroup | None, members: Sequence[RankProcess]) -> None:
    if group is not None:
        group.fail()
    for member in members:
        member.link.close()  # which ends it, wherever it is
    for member in members:
        member.reap()


def _num_gpus() -> int:
    import torch  # noqa: PLC0415 - the native decoder does without

    return torch.cuda.device_count()


def _rows_bytes(model: ModelConfig, resolved: ResolvedConfig) -> int:
    """Room for what ranks share of a step, of which only what is written takes memory."""
    network = model.network
    assert isinstance(network, DecoderConfig)
    experts = network.experts
    mlp = network.mlp_size
    if experts is not None:
        mlp = max(mlp, (experts.chosen + 1) * max(experts.size, experts.shared_size))
    rows = 2 * resolved.max_num_batched_tokens + resolved.max_num_seqs
    width = 2 * network.hidden_size + network.q_heads * network.head_dim + mlp + model.vocab_size
    return 4 * rows * width + (1 << 20)
