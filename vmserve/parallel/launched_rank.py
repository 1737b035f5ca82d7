"""What a process becomes that torchrun or srun has started as another rank than the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vmserve import _core
from vmserve.errors import RankLostError
from vmserve.memory import relay
from vmserve.models.torch_collective import TorchCollective
from vmserve.parallel import rank_main
from vmserve.parallel.launched import Placement
from vmserve.parallel.link import ByteWire, Link, RankOrders
from vmserve.parallel.meeting import Visitor

if TYPE_CHECKING:
    import threading

    import torch

    from vmserve.memory.device import MemoryDevice
    from vmserve.models.collective import Collective

__all__ = ["be_rank"]


def be_rank(placement: Placement) -> None:
    """Load and compute what rank 0 says, and end the process with it."""

    def main() -> int:
        visitor = Visitor(placement)
        return rank_main.serve(visitor.connect("orders"), _Elsewhere(visitor, placement.local_rank))

    rank_main.run(main)


class _Elsewhere:
    group = None
    patience = 1.0

    def __init__(self, visitor: Visitor, local_rank: int) -> None:
        self._visitor = visitor
        self._local_rank = local_rank
        self._threads: list[threading.Thread] = []

    def join(self, orders: RankOrders, link: Link) -> None:
        self._link = link

    def gpu(self, orders: RankOrders) -> int:
        return self._local_rank

    def collective(self, orders: RankOrders, device: torch.device) -> Collective:
        host = self._link.sock.getsockname()[0]
        store = self._visitor.store
        return TorchCollective(store, orders.rank, orders.size, device=device, host=host)

    def make_driver(
        self, device: MemoryDevice, message: Any, descriptors: list[int]
    ) -> _core.RankLoop:
        _, frame_bytes, num_frames = message
        driver = device.create_driver(frame_bytes, num_frames, None)
        loop, thread = relay.serve(driver, ByteWire(self._visitor.connect("memory")))
        self._threads.append(thread)
        return loop

    def receive(self) -> bytes:
        encoded, _ = self._link.receive()
        if not isinstance(encoded, bytes):
            raise RankLostError("rank 0 has ended the group")
        return encoded
