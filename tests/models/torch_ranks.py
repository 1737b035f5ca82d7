"""Ranks that torch computes, over gloo on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from safetensors.torch import save_file

from tests.models.schedule import run_schedule
from vmserve.models import LoadedModel, load_model
from vmserve.models.shard import Shard
from vmserve.models.torch_collective import TorchCollective

TIMEOUT = timedelta(seconds=60)


def join(
    store: distributed.Store, rank: int, size: int, host: str = "127.0.0.1"
) -> TorchCollective:
    device = torch.device("cpu")
    return TorchCollective(store, rank, size, device=device, host=host, timeout=TIMEOUT)


def run_rank(path: Path, dtype: torch.dtype, ranks: TorchCollective) -> list[torch.Tensor]:
    model = load_model(path, dtype, ranks=ranks)
    kv_heads = Shard(model.config.network, ranks.rank, ranks.size).config.kv_heads
    return run_schedule(model, kv_heads=kv_heads, rank=ranks.rank)


def on_ranks(size: int, work: Callable[[TorchCollective], Any]) -> list[Any]:
    """What each rank's work returns; ranks are threads."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(lambda r=r: work(join(store, r, size))) for r in range(size)]
        return [each.result(90) for each in ranks]


def run_ranks(path: Path, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Logits of the first rank."""
    return on_ranks(size, lambda ranks: run_rank(path, dtype, ranks))[0]


def parameter_bytes(path: Path, size: int) -> list[int]:
    """Of each rank."""

    def load(ranks: TorchCollective) -> LoadedModel:
        return load_model(path, torch.float32, ranks=ranks)

    return [model.parameter_bytes for model in on_ranks(size, load)]


def main(directory: str, meeting: str, rank: str, size: str, host: str, results: str) -> None:
    """``meeting``: HOST:PORT of rank 0, or a file; ``results``: takes the first rank's logits."""
    torch.set_num_threads(1)
    store: distributed.Store
    where, colon, port = meeting.rpartition(":")
    if colon:
        store = distributed.TCPStore(where, int(port), int(size), rank == "0", TIMEOUT)
    else:
        store = distributed.FileStore(meeting, int(size))
    logits = run_rank(Path(directory), torch.float32, join(store, int(rank), int(size), host))
    if rank == "0":
        save_file({str(number): rows for number, rows in enumerate(logits)}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
