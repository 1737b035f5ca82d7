"""Engines of one model on this machine, each with its own cores and part of the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vmserve.client.fleet.fleet import FleetLLM
from vmserve.client.process_llm import ProcessLLM, Supervision
from vmserve.config import default_kv_bytes
from vmserve.memory.limits import available_memory
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.options import rules
from vmserve.router.policy import Policy
from vmserve.system.threads import split_cpus
from vmserve.text.tokenizer import Tokenizer

__all__ = ["load_fleet"]

logger = logging.getLogger(__name__)

_GPU: Final = Path("/dev/nvidiactl")


def load_fleet(
    size: int,
    policy: Policy = "prefix",
    *,
    progress: Callable[[str, int, int], None] | None = None,
    supervision: Supervision | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    **options: Any,
) -> FleetLLM:
    """Load ``size`` engines at once. ``options``: of one engine, but for ``kv_cache_memory``.

    ``kv_cache_memory`` is that of all together. Other arguments are those of
    :class:`~vmserve.client.process_llm.ProcessLLM`, and so is what is raised.
    """
    _check_device(options)
    watched = supervision or Supervision()
    shared = {**options, "kv_cache_memory": _total(options) // size}
    parts = _cpus(size, int(options.get("tensor_parallel_size") or 1))
    clients: list[ProcessLLM] = []
    tokenizers: dict[str, Tokenizer] = {}
    # All start before the first is waited for. Weights are pages of one file, which they share.
    starting = [ProcessLLM.begin(replace(watched, cpus=cpus), **shared) for cpus in parts]
    try:
        for process, cpus in zip(starting, parts, strict=True):
            clients.append(
                ProcessLLM(
                    **shared,
                    progress=progress if not clients else None,
                    supervision=replace(watched, cpus=cpus),
                    meanwhile=meanwhile if not clients else lambda: None,
                    process=process,
                    tokenizers=tokenizers,
                )
            )
            logger.info("engine %d: process %d, CPUs %s", len(clients) - 1, process.pid, cpus)
        return FleetLLM(clients, policy)
    except BaseException:
        for process in starting:
            process.close()
        raise


def _cpus(size: int, num_ranks: int) -> list[tuple[int, ...]]:
    """The CPUs of each engine, which are whole cores for each of its ranks."""
    if num_ranks == 1:
        return split_cpus(size)
    each = split_cpus(
        size * num_ranks, f"data_parallel_size: {size} engines of {num_ranks} ranks, {{}} in all,"
    )
    firsts = range(0, size * num_ranks, num_ranks)
    return [tuple(cpu for part in each[i : i + num_ranks] for cpu in part) for i in firsts]


def _check_device(options: dict[str, Any]) -> None:
    device = options.get("device")
    on_gpu = device == "cuda" or (device in (None, "auto") and _GPU.exists())
    rules.check({"engines_here": True, "on_gpu": on_gpu})


def _total(options: dict[str, Any]) -> int:
    """Bytes of the KV caches of all engines."""
    given = options.get("kv_cache_memory")
    if given is not None:
        return parse_size(given, "kv_cache_memory")
    free, whose = available_memory()
    total = default_kv_bytes(free)
    logger.info("KV caches of up to %s for all engines (free: %s)", format_size(total), whose)
    return total
