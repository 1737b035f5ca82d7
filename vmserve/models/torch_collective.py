"""Ranks that talk through torch.distributed: gloo between processors, NCCL between GPUs.

Process groups are made without torch's default group, of which a process has only one. Imported
only where there are several ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch.nn import functional as F

from vmserve.errors import DriverError

__all__ = ["TorchCollective"]

#: torch.distributed, whose classes have no types.
_distributed: Any = distributed
#: Time limit of one sum. Ranks that wait for work wait elsewhere.
_TIMEOUT = timedelta(minutes=2)


class TorchCollective:
    """One rank of a group; making it waits until all ranks have.

    ``store``: where ranks find each other, a store of torch.distributed.
    ``device``: of the tensors. ``host``: the address of this rank that the others connect to, with
    gloo. Connections are neither authenticated nor encrypted: ``host`` belongs to a loopback or to
    a trusted network.

    Raises :class:`~vmserve.errors.DriverError` if a rank does not come.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        device: torch.device,
        host: str = "127.0.0.1",
        timeout: timedelta = _TIMEOUT,
    ) -> None:
        self.rank = rank
        self.size = size
        with self._together():
            if device.type == "cuda":
                options = _distributed.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group: Any = _distributed.ProcessGroupNCCL(store, rank, size, options)
            else:
                options = _distributed.ProcessGroupGloo._Options()
                options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = timeout
                self._group = _distributed.ProcessGroupGloo(store, rank, size, options)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        options = _distributed.AllreduceOptions()
        options.reduceOp = _distributed.ReduceOp.SUM
        with self._together():
            self._group.allreduce([x], options).wait()
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        x = F.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [] if self.rank else [torch.empty_like(x) for _ in widths]
        options = _distributed.GatherOptions()
        options.rootRank = 0
        with self._together():
            self._group.gather([parts] if parts else [], [x], options).wait()
        if not parts:
            return x.new_empty(0, sum(widths))
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistError is one, too
            lost = DriverError(
                f"rank {self.rank} of {self.size} has lost another rank: {error}; start the ranks "
                "again"
            )
            lost.sticky = True
            raise lost from error
