"""What numbers depend on besides tokens, and the store in which cached prefixes outlive the engine
(decision 0079)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmserve.attention.cpu import CpuBackend
from vmserve.config import ResolvedConfig
from vmserve.memory.base import MemoryStats
from vmserve.memory.manager import MemoryManager
from vmserve.memory.persist import core_digest, open_stores
from vmserve.models.config import ModelConfig
from vmserve.models.content import content_digest
from vmserve.options import rules
from vmserve.runner.computing import Computing
from vmserve.runner.runtime import DeviceRuntime
from vmserve.telemetry.counters import merged_stats

__all__ = ["identity_of", "persist", "persist_figures", "settings_of"]

#: Fields of the layout which say where a token's numbers lie; pages may have any size.
_PLACES = ("num_layers", "kv_heads", "head_dim", "value_dim", "dtype", "layers_per_group",
           "split_kv", "keys_only", "token_stride")  # fmt: skip


def persist(
    memory: MemoryManager,
    resolved: ResolvedConfig,
    path: Path,
    settings: Mapping[str, Any],
) -> None:
    """Let the memory keep its blocks in ``resolved.kv_persist``, if that is given, and find those
    that are there.

    ``path``: the model's files. ``settings``: :func:`settings_of`. Raises
    :class:`~vmserve.errors.ConfigurationError` for a directory or a limit that cannot be used.
    """
    if resolved.kv_persist is None:
        return
    from vmserve.version import __version__  # noqa: PLC0415 - slow to import

    rules.check({"kv_persist": resolved.kv_persist, "no_host_memory": not memory.can_persist})
    directory = Path(resolved.kv_persist)
    identity = {
        "model": path.name,
        "content": content_digest(path, directory),
        "version": __version__,
        "build": core_digest(),
        **settings,
    }
    stores = open_stores(
        directory,
        resolved.kv_persist_bytes,
        identity,
        memory.block_bytes(),
        memory.layout.blocks_per_page,
    )
    memory.persist_to(stores)


def settings_of(
    memory: MemoryManager, computing: Computing, runtime: DeviceRuntime, num_ranks: int = 1
) -> dict[str, Any]:
    """What else than the files, the version and the build a block's numbers depend on, for JSON.

    Kernels round differently, so blocks are only for those that made them. Of ``num_ranks`` ranks,
    torch's sums have an order of their own.
    """
    layout = memory.layout
    kernels = set()
    for backend in computing.backends.values():
        isa = f" {backend.isa}" if isinstance(backend, CpuBackend) else ""
        kernels.add(f"{backend.name}{isa}")
    native = computing.native
    return {
        "dtype": str(computing.dtype),
        "layout": [{name: str(getattr(part, name)) for name in _PLACES} for part in layout.parts],
        "block_tokens": layout.block_tokens,
        "state_bytes": layout.state_bytes,
        "kinds": [str(dataclasses.astuple(kind)) for kind in memory.kinds],
        # Of these alone, the longest sequence chooses the factors of all.
        "rope_len": (
            computing.max_model_len if "longrope" in repr(computing.model.network) else None
        ),
        "attention": sorted(kernels),
        "layers": "native" if native else _torch_kernels(runtime.device_type),
        "quantization": computing.quantization,
        **({} if native or num_ranks == 1 else {"ranks": num_ranks}),
    }


def identity_of(weights: str, model: ModelConfig, settings: Mapping[str, Any]) -> str:
    """A digest of the same with little read of the files: ``weights`` is their fingerprint.

    The version is left out: callers that show the digest know it.
    """
    facts = {**settings, "weights": weights, "network": repr(model.network)}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def persist_figures(*memories: MemoryStats) -> dict[str, float | int]:
    """The figures of files that the memories of a model and its draft model share."""
    return merged_stats(
        [
            {name: value for name, value in each.as_dict().items() if name.startswith("persist_")}
            for each in memories
        ]
    )


def _torch_kernels(device_type: str) -> str:
    import torch  # noqa: PLC0415 - our own decoder does without it

    if device_type == "cuda":
        return f"torch {torch.__version__} on {torch.cuda.get_device_name()}"
    return f"torch {torch.__version__} for {torch.backends.cpu.get_cpu_capability()}"
