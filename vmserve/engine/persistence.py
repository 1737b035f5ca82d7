"""Open the store in which cached prefixes outlive the engine (decision 0079)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmserve.attention.base import AttentionBackend
from vmserve.attention.cpu import CpuBackend
from vmserve.config import ResolvedConfig
from vmserve.dtypes import DType
from vmserve.errors import ConfigurationError
from vmserve.memory.base import MemoryStats
from vmserve.memory.manager import MemoryManager
from vmserve.memory.persist import core_digest, open_stores
from vmserve.models.config import ModelConfig
from vmserve.models.content import content_digest
from vmserve.runner.runtime import DeviceRuntime
from vmserve.telemetry.counters import merged_stats

__all__ = ["computed_by", "persist", "persist_figures"]

#: Of the layout, what says where a token's numbers lie; pages may have any size.
_PLACES = ("num_layers", "kv_heads", "head_dim", "dtype", "layers_per_group", "split_kv",
           "keys_only", "block_tokens", "state_bytes")  # fmt: skip


def persist(
    memory: MemoryManager,
    resolved: ResolvedConfig,
    model: ModelConfig,
    path: Path,
    dtype: DType,
    computed: Mapping[str, Any],
) -> None:
    """Let the memory keep its blocks in ``resolved.kv_persist`` and find those that are there.

    ``path``: the model's files. ``computed``: :func:`computed_by`. Raises
    :class:`~vmserve.errors.ConfigurationError` for a directory or a limit that cannot be used.
    """
    from vmserve.version import __version__  # noqa: PLC0415 - slow to import

    assert resolved.kv_persist is not None
    if not memory.can_persist:
        raise ConfigurationError(
            "kv_persist: this page driver has no host memory through which blocks go to the disk: "
            "leave --kv-persist out, or --kv-driver"
        )
    directory = Path(resolved.kv_persist)
    layout = {name: getattr(memory.layout, name) for name in _PLACES}
    identity = {
        "model": path.name,
        "content": content_digest(path, directory),
        "dtype": str(dtype),
        "layout": {name: str(value) for name, value in layout.items()},
        "token_stride": memory.layout.token_stride,
        "kinds": [str(dataclasses.astuple(kind)) for kind in memory.kinds],
        # Of these alone, the longest sequence chooses the factors of all.
        "rope_len": resolved.max_model_len if "longrope" in repr(model.network) else None,
        "version": __version__,
        "build": core_digest(),
        **computed,
    }
    stores = open_stores(
        directory,
        resolved.kv_persist_bytes,
        identity,
        memory.block_bytes(),
        memory.layout.blocks_per_page,
    )
    memory.persist_to(stores)


def computed_by(
    runtime: DeviceRuntime,
    backends: Mapping[Any, AttentionBackend],
    quantization: str,
    *,
    native: bool,
) -> dict[str, Any]:
    """What computes: kernels round differently, so blocks are only for those that made them."""
    kernels = set()
    for backend in backends.values():
        isa = f" {backend.isa}" if isinstance(backend, CpuBackend) else ""
        kernels.add(f"{backend.name}{isa}")
    return {
        "attention": sorted(kernels),
        "layers": "native" if native else _torch_kernels(runtime.device_type),
        "quantization": quantization,
    }


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
