"""``python -m vmserve.parallel.rank_main SOCKET MEMORY``: one rank, but the first, of an engine.

Started by :mod:`vmserve.parallel.ranks`, never by hand. ``MEMORY``: the descriptor in which ranks
of the native decoder meet.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

# Until all is loaded: see vmserve.system.imports.
gc.disable()

import msgspec

from vmserve import _core
from vmserve.errors import DriverError, EngineDeadError, VmserveError
from vmserve.memory.ranks import RankMemory
from vmserve.models.config import ModelConfig
from vmserve.models.native import RankGroup
from vmserve.numbers.dtypes import DType
from vmserve.parallel.columns import decode
from vmserve.parallel.link import Link, PairLink, RankOrders, refused
from vmserve.runner.computing import Computing, attention_backends
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.model_runner import ModelRunner
from vmserve.system.logs import configure_logging
from vmserve.system.processes import die_with
from vmserve.system.threads import keep_to

if TYPE_CHECKING:
    import torch

    from vmserve.memory.device import MemoryDevice
    from vmserve.models.collective import Collective
    from vmserve.runner.runtime import DeviceRuntime

logger = logging.getLogger("vmserve.rank")

#: Exit status of a rank whose rank 0 has gone.
_EXIT_ORPHANED = 3


def main() -> int:
    # Both signals reach whole groups of processes. Rank 0 decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = PairLink(socket.socket(fileno=int(sys.argv[1])))
    return serve(link, Local(int(sys.argv[2])))


def serve(link: Link, place: Place) -> int:
    """Be a rank until rank 0 ends; returns the status to exit with."""
    try:
        message, _ = link.receive()
    except EngineDeadError:
        return _EXIT_ORPHANED
    orders = msgspec.convert(message, RankOrders)
    if orders.parent_pid and not die_with(orders.parent_pid):
        return _EXIT_ORPHANED
    _end_with(link, place.patience)
    if orders.cpus:
        keep_to(orders.cpus)
    configure_logging(orders.log_level, "text", f"rank {orders.rank}")
    try:
        rank = _Rank(orders, link, place)
    except EngineDeadError:
        return _EXIT_ORPHANED
    except VmserveError as error:
        link.send(refused(error))
        return 1
    gc.collect()
    gc.freeze()
    gc.enable()
    link.send("ready")
    rank.run()
    return 0


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the status of ``main``, or with what it raised in the log."""
    try:
        status = main()
    except DriverError as failure:  # another rank has ended
        logger.warning("%s", failure)
        status = 1
    except BaseException:  # the process's boundary
        logger.exception("the rank ended")
        status = 1
    logging.shutdown()
    # All is closed: taking the interpreter and its libraries apart would only take time.
    os._exit(status)


def _end_with(link: Link, patience: float) -> None:
    """End this process when rank 0 closes its end, whatever happens here meanwhile.

    ``patience``: seconds for what rank 0 has said before.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(link.sock, select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        time.sleep(patience)
        os._exit(_EXIT_ORPHANED)

    threading.Thread(target=watch, name="vmserve-rank-0-lives", daemon=True).start()


class Place(Protocol):
    """Where a rank is: on rank 0's host, or elsewhere."""

    patience: float

    def join(self, orders: RankOrders, link: Link) -> None:
        """Meet the others."""

    @property
    def group(self) -> RankGroup | None:
        """The native decoder's group; after :meth:`join`, as all that follows."""

    def gpu(self, orders: RankOrders) -> int:
        """Number of the rank's GPU on its host."""

    def collective(self, orders: RankOrders, device: torch.device) -> Collective:
        """Torch's collective."""

    def make_driver(
        self, device: MemoryDevice, message: Any, descriptors: list[int]
    ) -> _core.RankLoop:
        """Make a driver as rank 0's message says, and have its calls executed."""

    def receive(self) -> bytes:
        """The next step. Raises :class:`~vmserve.errors.VmserveError` when there is none."""


class Local:
    """``descriptor``: of the memory that the ranks of one host share."""

    patience = 0.0

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.group: RankGroup | None = None

    def join(self, orders: RankOrders, link: Link) -> None:
        self.group = RankGroup(self._descriptor, orders.rank, orders.size, orders.board_bytes)

    def gpu(self, orders: RankOrders) -> int:
        return orders.rank

    def collective(self, orders: RankOrders, device: torch.device) -> Collective:
        # Imported late: the native decoder does without torch.
        from vmserve.models.torch_collective import TorchCollective  # noqa: PLC0415
        from vmserve.parallel.meeting import ranks_store  # noqa: PLC0415

        return TorchCollective(
            ranks_store(orders.store_port), orders.rank, orders.size, device=device
        )

    def make_driver(
        self, device: MemoryDevice, message: Any, descriptors: list[int]
    ) -> _core.RankLoop:
        [ring] = descriptors
        try:
            driver = device.create_driver(*_core.ring_frames(ring), None)
            return _core.RankLoop(ring, driver)
        finally:
            os.close(ring)

    def receive(self) -> bytes:
        assert self.group is not None
        return self.group.receive()


class _Rank:
    """Its part of the model and of the KV cache."""

    def __init__(self, orders: RankOrders, link: Link, place: Place) -> None:
        place.join(orders, link)
        path = Path(orders.path)
        config = ModelConfig.from_directory(path)
        if orders.device == "cuda":
            import torch  # noqa: PLC0415 - the native decoder does without

            torch.cuda.set_device(place.gpu(orders))
        runtime: DeviceRuntime = open_runtime(orders.device, orders.kv_driver)
        collective = None
        if not orders.native:
            torch_runtime = runtime = runtime.with_torch()
            collective = place.collective(orders, torch_runtime.device)
        dtype, kv_dtype = DType(orders.dtype), DType(orders.kv_dtype)
        computing = Computing(
            path=path,
            model=config,
            dtype=dtype,
            kv_dtype=kv_dtype,
            native=orders.native,
            quantization=orders.quantization,
            max_model_len=orders.max_model_len,
            backends=attention_backends(
                orders.attention_backend, config, dtype, kv_dtype, runtime.device_type
            ),
        )
        model = computing.load(runtime, collective=collective, group=place.group)
        link.send("loaded")
        device = runtime.memory()
        #: Loops of the drivers, which own the memory.
        self._loops: list[_core.RankLoop] = []
        while isinstance((message := link.receive())[0], list):
            self._loops.append(place.make_driver(device, *message))
        memory = RankMemory(self._loops, device, message[0])
        self._place = place
        self._runtime = runtime
        self._tables = [memory.block_tables(kind) for kind in range(len(memory.token_kinds))]
        self._runner = ModelRunner(model, computing.kernels(runtime, memory), runtime)

    def run(self) -> None:
        """Compute what rank 0 sends until it ends the group."""
        with self._runtime.active():
            while True:
                try:
                    encoded = self._place.receive()
                except VmserveError:
                    return
                self._runner.follow(decode(encoded, self._tables))


if __name__ == "__main__":
    run(main)
