"""Ranks that torch computes, over gloo on loopback."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed

from tests.models.schedule import LENGTHS, random_prompts, run_schedule
from vmserve.models import LoadedModel, load_model
from vmserve.models.shard import Shard
from vmserve.models.torch_collective import TorchCollective

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)


def join(store: distributed.Store, rank: int, size: int) -> TorchCollective:
    return TorchCollective(store, rank, size, device=CPU, timeout=TIMEOUT)


def load_rank(
    path: Path, dtype: torch.dtype, store: distributed.Store, rank: int, size: int
) -> LoadedModel:
    return load_model(path, dtype, ranks=join(store, rank, size))


def run_rank(
    path: Path, dtype: torch.dtype, store: distributed.Store, rank: int, size: int
) -> list[torch.Tensor]:
    model = load_rank(path, dtype, store, rank, size)
    kv_heads = Shard(model.config.network, rank, size).config.kv_heads
    return run_schedule(model, random_prompts(LENGTHS), None, kv_heads, rank)


def run_ranks(path: Path, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Logits of the first rank; ranks are threads."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, path, dtype, store, rank, size) for rank in range(size)]
        first, *_ = [each.result(90) for each in ranks]
    return first


if __name__ == "__main__":
    torch.set_num_threads(1)
    directory, file, rank, size = sys.argv[1:]
    run_rank(
        Path(directory), torch.float32, distributed.FileStore(file, int(size)), int(rank), int(size)
    )
