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

# Until all is loaded: see vmserve.imports.
gc.disable()

import msgspec

from vmserve import _core
from vmserve.attention import create_backend
from vmserve.errors import DriverError, EngineDeadError, VmserveError
from vmserve.logs import configure_logging
from vmserve.memory.base import Regime
from vmserve.memory.ranks import RankMemory
from vmserve.models import load_model
from vmserve.models.config import ModelConfig
from vmserve.parallel.columns import decode
from vmserve.parallel.link import Link, RankOrders, refused
from vmserve.processes import die_with
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.kernels import RegimeKernels
from vmserve.runner.model_runner import ModelRunner
from vmserve.threads import keep_to

logger = logging.getLogger("vmserve.rank")

#: Exit status of a rank whose rank 0 has gone.
_EXIT_ORPHANED = 3


def main() -> int:
    # Both signals reach whole groups of processes. Rank 0 decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        message, _ = link.receive()
    except EngineDeadError:
        return _EXIT_ORPHANED
    orders = msgspec.convert(message, RankOrders)
    if not die_with(orders.parent_pid):
        return _EXIT_ORPHANED
    _end_with(link)
    keep_to(orders.cpus)
    configure_logging(orders.log_level, "text", f"rank {orders.rank}")
    try:
        rank = _Rank(orders, link, int(sys.argv[2]))
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


def _end_with(link: Link) -> None:
    """End this process when rank 0 closes its end, whatever happens here meanwhile."""

    def watch() -> None:
        poll = select.poll()
        poll.register(link.sock, select.POLLHUP | select.POLLRDHUP)
        poll.poll()
        os._exit(_EXIT_ORPHANED)

    threading.Thread(target=watch, name="vmserve-rank-0-lives", daemon=True).start()


class _Rank:
    """Its part of the model and of the KV cache."""

    def __init__(self, orders: RankOrders, link: Link, descriptor: int) -> None:
        self._group = _core.RankGroup(descriptor, orders.rank, orders.size, orders.board_bytes)
        config = ModelConfig.from_directory(orders.path)
        runtime = open_runtime(orders.device, orders.kv_driver)
        model = load_model(
            orders.path,
            orders.dtype,
            config=config,
            max_model_len=orders.max_model_len,
            native=orders.native,
            quantization=orders.quantization,
            group=self._group,
        )
        link.send("loaded")
        device = runtime.memory()
        #: They own the memory.
        self._loops: list[_core.RankLoop] = []
        while (message := link.receive())[0] == "ring":
            _, [ring] = message
            driver = device.create_driver(*_core.ring_frames(ring), None)
            self._loops.append(_core.RankLoop(ring, driver))
            os.close(ring)
        memory = RankMemory(self._loops, device, message[0])
        views = runtime.views(memory)
        dtype = memory.layout.dtype
        kernels = {
            regime: RegimeKernels(
                create_backend(
                    orders.attention_backend,
                    regime,
                    config.head_dim,
                    dtype,
                    config.attention,
                    runtime.device_type,
                ),
                views[regime],
            )
            for regime in Regime
        }
        self._tables = [memory.block_tables(kind) for kind in range(memory.num_token_kinds)]
        self._runner = ModelRunner(model, kernels, runtime)

    def run(self) -> None:
        """Compute what rank 0 tells until it ends the group."""
        while True:
            try:
                told = self._group.receive()
            except DriverError:
                return
            self._runner.follow(decode(told, self._tables))


if __name__ == "__main__":
    try:
        status = main()
    except DriverError as failure:  # another rank has ended
        logger.warning("%s", failure)
        status = 1
    except BaseException:  # the process's boundary
        logger.exception("the rank ended")
        status = 1
    logging.shutdown()
    os._exit(status)
