"""Engines of one model on this machine, each with its own cores and part of the memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vmserve.client.transports.fleet import Fleet
from vmserve.client.transports.process import EngineProcess, ProcessSource
from vmserve.client.transports.supervised import Supervised, Supervision
from vmserve.config import default_kv_bytes
from vmserve.memory.limits import available_memory
from vmserve.models.loader import Progress
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.options import rules
from vmserve.router.policy import Policy
from vmserve.system.threads import split_cpus
from vmserve.text.tokenizer import Tokenizer

__all__ = ["load_engine", "start_engine", "start_engines"]

logger = logging.getLogger(__name__)

_GPU: Final = Path("/dev/nvidiactl")


def start_engine(
    model: str | None = None,
    *,
    progress: Progress | None = None,
    supervision: Supervision | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    **options: Any,
) -> Supervised:
    """Load a model in a process of its own, for a client on one event loop.

    Arguments and errors are those of :class:`vmserve.AsyncLLM`, and of
    :class:`~vmserve.client.transports.supervised.Supervised`. Loading blocks. The engine is killed
    when the thread that called this ends.
    """
    watched = supervision or Supervision()
    source = ProcessSource({"model": model, **options}, watched)
    return Supervised(source, watched, progress=progress, meanwhile=meanwhile)


async def load_engine(
    model: str | None = None, *, supervision: Supervision | None = None, **options: Any
) -> Supervised:
    """Do as :func:`start_engine` while the event loop goes on."""
    watched = supervision or Supervision()
    source = ProcessSource({"model": model, **options}, watched)
    # Started by this thread, which outlives those that only wait: the engine ends with it.
    process = source.open()
    try:
        return await asyncio.to_thread(Supervised, source, watched, channel=process)
    except asyncio.CancelledError:
        process.kill()  # which ends the waiting
        raise


def start_engines(
    size: int,
    policy: Policy = "prefix",
    *,
    progress: Progress | None = None,
    supervision: Supervision | None = None,
    meanwhile: Callable[[], None] = lambda: None,
    **options: Any,
) -> Fleet:
    """Load ``size`` engines at once. ``options``: of one engine, but for ``kv_cache_memory``.

    ``kv_cache_memory`` is that of all together. Other arguments are those of :func:`start_engine`,
    and so is what is raised.
    """
    _check_device(options)
    watched = supervision or Supervision()
    shared = {**options, "kv_cache_memory": _total(options) // size}
    parts = _cpus(size, int(options.get("tensor_parallel_size") or 1))
    sources = [ProcessSource(shared, replace(watched, cpus=cpus)) for cpus in parts]
    engines: list[Supervised] = []
    tokenizers: dict[str, Tokenizer] = {}
    starting: list[EngineProcess] = []
    try:
        # All start before the first is waited for. Weights are pages of one file, which they share.
        starting += [source.open() for source in sources]
        for source, process, cpus in zip(sources, starting, parts, strict=True):
            is_first = not engines
            engines.append(
                Supervised(
                    source,
                    watched,
                    channel=process,
                    progress=progress if is_first else None,
                    meanwhile=meanwhile if is_first else lambda: None,
                    tokenizers=tokenizers,
                )
            )
            logger.info("engine %d: process %d, CPUs %s", len(engines) - 1, process.pid, cpus)
        return Fleet(engines, policy)
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
