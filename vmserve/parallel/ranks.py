"""The other ranks of an engine: processes that rank 0 starts, tells of each step and watches."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from vmserve import _core
from vmserve.config import EngineConfig, ResolvedConfig
from vmserve.dtypes import DType
from vmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    RankLostError,
    UnsupportedError,
    VmserveError,
)
from vmserve.memory.device import MemoryDevice
from vmserve.memory.manager import MemoryManager
from vmserve.memory.ranks import GroupMemory
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.slices import refusal_of_ranks
from vmserve.parallel.columns import board_bytes, encode
from vmserve.parallel.link import Link, RankOrders
from vmserve.processes import child_environment, describe_end
from vmserve.runner.model_runner import StepColumns
from vmserve.threads import keep_to, split_cpus

__all__ = ["Ranks", "refuse", "share_of"]

logger = logging.getLogger(__name__)

_PROGRAM = "vmserve.parallel.rank_main"
#: How long a rank that was lost may take to end, so that its status can be told.
_END_SECONDS = 0.5
#: The same for ranks that are ended.
_CLOSE_SECONDS = 5.0


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
    if reason is not None:
        raise UnsupportedError(
            f"tensor_parallel_size: {size} ranks cannot divide this model: {reason}"
        )


class Ranks:
    """Ranks 1 and up of an engine whose rank 0 is this process.

    They end with this process and with :meth:`close`; if one ends before, all do. From here on this
    thread computes on the first part of the CPUs, until :meth:`close`.

    Raises :class:`~vmserve.errors.ConfigurationError` for fewer cores than ranks.
    """

    def __init__(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        model: ModelConfig,
        path: Path,
        dtype: DType,
        num_kinds: int,
    ) -> None:
        self.size = config.tensor_parallel_size
        first, *others = split_cpus(self.size, "tensor_parallel_size: {} ranks")
        board = board_bytes(
            resolved.max_num_batched_tokens,
            resolved.max_num_seqs,
            resolved.max_model_len,
            resolved.block_tokens,
            num_kinds,
        )
        descriptor = os.memfd_create("vmserve-ranks")
        self._failure: str | None = None
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._members: list[_Member] = []
        self._restore = keep_to(first)
        try:
            os.ftruncate(descriptor, 2 * board + _rows_bytes(model, resolved))
            #: Where they meet.
            self.group = _core.RankGroup(descriptor, 0, self.size, board)
            told = weakref.WeakMethod(self._ended)
            for rank, cpus in enumerate(others, start=1):
                orders = RankOrders(
                    rank=rank,
                    size=self.size,
                    parent_pid=os.getpid(),
                    cpus=cpus,
                    log_level=logging.getLogger("vmserve").getEffectiveLevel(),
                    path=str(path),
                    dtype=dtype,
                    max_model_len=resolved.max_model_len,
                    native=True,
                    quantization=config.quantization,
                    device="cpu",
                    kv_driver=config.kv_driver,
                    attention_backend=config.attention_backend,
                    board_bytes=board,
                )
                self._members.append(_Member(orders, descriptor, told))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)
        # One that nobody closes ends with what uses it.
        self._finalizer = weakref.finalize(self, _end, self.group, self._members)

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
        self._tables = [memory.block_tables(kind) for kind in range(memory.num_token_kinds)]
        self._block_tokens = memory.layout.block_tokens

    def _answer(self, member: _Member, expected: str) -> None:
        try:
            message, _ = member.link.receive()
        except EngineDeadError as error:
            raise self.lost(error) from error
        except ConfigurationError as error:
            raise type(error)(f"rank {member.rank} of {self.size}: {error}") from error
        assert message == expected

    # -- steps ----------------------------------------------------------------------------

    def computing(self, columns: StepColumns) -> AbstractContextManager[None]:
        return self._computing(encode(columns, self._tables, self._block_tokens))

    @contextlib.contextmanager
    def _computing(self, told: bytes) -> Iterator[None]:
        try:
            self.group.publish(told)
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

    def lost(self, error: Exception) -> RankLostError:
        """End the group because of an error in a step or in a call of a rank's memory."""
        if isinstance(error, EngineDeadError | OSError):
            # The system tells how a rank ended, which says more.
            for member in self._members:
                member.ended.wait(_END_SECONDS / len(self._members))
        self._fail(f"{error}" if isinstance(error, VmserveError) else f"rank 0 failed: {error}")
        assert self._failure is not None
        return RankLostError(self._failure)

    def _ended(self, member: _Member, status: int) -> None:
        self.group.lose(member.rank)
        self._fail(
            f"rank {member.rank} of {self.size} (process {member.pid}) has ended "
            f"({describe_end(status)}), and the engine with it"
        )

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = reason
        self.group.fail()
        for listener in self._listeners:
            listener(reason)

    def close(self) -> None:
        """End them, and let this thread use all CPUs again."""
        with self._lock:
            failed, self._failure = self._failure is not None, self._failure or "it is closed"
        if failed:
            for member in self._members:  # one may be stopped
                member.kill()
        _end(getattr(self, "group", None), self._members)
        self._restore()


def _end(group: _core.RankGroup | None, members: Sequence[_Member]) -> None:
    if group is not None:
        group.fail()
    for member in members:
        member.link.close()  # which ends it, wherever it is
    for member in members:
        member.reap()


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


_Told = Callable[["_Member", int], None]


class _Member:
    """A rank's process. A thread waits for its end, with which the process would end, too."""

    def __init__(
        self,
        orders: RankOrders,
        descriptor: int,
        told: Callable[[], _Told | None],
    ) -> None:
        self.rank = orders.rank
        self.cpus = orders.cpus
        self.ended = threading.Event()
        ours, theirs = Link.pair()
        self.link = Link(ours)
        self._started = threading.Event()
        self._popen: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        with theirs:
            self._thread = threading.Thread(
                target=self._run,
                args=(theirs.fileno(), descriptor, told),
                name=f"vmserve-rank-{self.rank}",
                daemon=True,
            )
            self._thread.start()
            self._started.wait()
        if self._error is not None:
            raise VmserveError(f"rank {self.rank} cannot be started: {self._error}")
        with contextlib.suppress(BrokenPipeError):  # it is dead: who waits for it is told
            self.link.send(orders)

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def attach(self, ring_fd: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.link.send("ring", [ring_fd])

    def kill(self) -> None:
        assert self._popen is not None
        if not self.ended.is_set():
            self._popen.kill()

    def reap(self) -> None:
        """Wait for its end; kill it if it takes too long."""
        if not self.ended.wait(_CLOSE_SECONDS):
            self.kill()
            self.ended.wait()

    def _run(
        self,
        sock: int,
        descriptor: int,
        told: Callable[[], _Told | None],
    ) -> None:
        try:
            self._popen = popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "vmserve.parallel.rank_main",
                    f"{sock}",
                    f"{descriptor}",
                ],
                pass_fds=[sock, descriptor],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        status = popen.wait()
        self.ended.set()
        if (listener := told()) is not None:
            listener(self, status)
