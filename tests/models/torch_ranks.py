"""Ranks that torch computes, over gloo on loopback."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as distributed
from safetensors.torch import save_file

from tests.models.schedule import LENGTHS, random_prompts, run_schedule
from vmserve.models import LoadedModel, load_model
from vmserve.models.shard import Shard
from vmserve.models.torch_collective import TorchCollective

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)


def join(
    store: distributed.Store, rank: int, size: int, host: str = "127.0.0.1"
) -> TorchCollective:
    return TorchCollective(store, rank, size, device=CPU, host=host, timeout=TIMEOUT)


def load_rank(
    path: Path,
    dtype: torch.dtype,
    store: distributed.Store,
    rank: int,
    size: int,
    host: str = "127.0.0.1",
) -> LoadedModel:
    return load_model(path, dtype, ranks=join(store, rank, size, host))


def run_rank(
    path: Path,
    dtype: torch.dtype,
    store: distributed.Store,
    rank: int,
    size: int,
    host: str = "127.0.0.1",
) -> list[torch.Tensor]:
    model = load_rank(path, dtype, store, rank, size, host)
    kv_heads = Shard(model.config.network, rank, size).config.kv_heads
    return run_schedule(model, random_prompts(LENGTHS), None, kv_heads, rank)


def run_ranks(path: Path, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Logits of the first rank; ranks are threads."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, path, dtype, store, rank, size) for rank in range(size)]
        first, *_ = [each.result(90) for each in ranks]
    return first


def main(directory: str, meeting: str, rank: str, size: str, host: str, results: str) -> None:
    """``meeting``: HOST:PORT of rank 0, or a file; ``results``: takes the first rank's logits."""
    torch.set_num_threads(1)
    store: distributed.Store
    where, colon, port = meeting.rpartition(":")
    if colon:
        store = distributed.TCPStore(where, int(port), int(size), rank == "0", TIMEOUT)
    else:
        store = distributed.FileStore(meeting, int(size))
    logits = run_rank(Path(directory), torch.float32, store, int(rank), int(size), host)
    if rank == "0":
        save_file({str(number): rows for number, rows in enumerate(logits)}, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
