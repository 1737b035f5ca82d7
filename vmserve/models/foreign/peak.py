"""Measure the peak bytes of the tensors that a piece of code makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["PeakBytes"]


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count storages, not tensors: views and operations in place take no memory.

    On the meta device too, where no memory is taken and no profiler sees any.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {_storage(tensor) for tensor in _tensors((args, tuple((kwargs or {}).values())))}
        result = func(*args, **(kwargs or {}))
        for ref in [ref for ref in self._live if ref.expired()]:  # type: ignore[no-untyped-call]
            del self._live[ref]
        for tensor in _tensors((result,)):
            ref = _storage(tensor)
            if ref not in given:
                self._live[ref] = tensor.untyped_storage().nbytes()
        self.num_bytes = max(self.num_bytes, sum(self._live.values()))
        return result


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
