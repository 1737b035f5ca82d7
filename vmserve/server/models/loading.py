"""Load several models, each in an engine process of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vmserve.client.lending import KVPool
from vmserve.client.process_llm import ProcessLLM, Supervision
from vmserve.config import CPU_KV_SHARE, LEAST
from vmserve.errors import ConfigurationError
from vmserve.memory.limits import available_memory
from vmserve.server.auth import KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.models.memory import PoolShare
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.models.specs import ModelSpec, spec_of
from vmserve.server.prefixes import Prefixes
from vmserve.server.tokenizer_info import with_tokenizer
from vmserve.sizes import format_size, parse_size

__all__ = ["ModelLoader", "share_memory"]

logger = logging.getLogger(__name__)

_GPU: Final = Path("/dev/nvidiactl")


class ModelLoader:
    """Makes served models. ``keys``: those of ``config``. ``shared``: options of the engine that
    all models have unless they say otherwise; its ``kv_cache_memory`` is the memory of all of them
    together, if there is no ``pool`` yet.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    def __init__(
        self,
        config: ServerConfig,
        keys: KeyRing,
        shared: Mapping[str, Any],
        supervision: Supervision,
        *,
        show_tokenizer: bool = False,
        pool: KVPool | None = None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._supervision = supervision
        self._show_tokenizer = show_tokenizer
        self._shared = shared
        self.pool = KVPool(_pool_bytes(shared)) if pool is None else pool

    async def load_all(self, specs: Sequence[ModelSpec]) -> Models:
        """Make all models, and load those that are not left for their first request.

        One after the other: each measures what its steps take. Raises what loading raises.
        """
        models = Models([self._served(spec) for spec in specs], self.make, self.pool)
        try:
            for spec, model in zip(specs, models, strict=True):
                if spec.preload:
                    await model.load()
        except BaseException:
            await models.shutdown()
            raise
        return models

    def make(self, name: str, table: Mapping[str, Any]) -> ServedModel:
        """Make a model of a table of options. It sleeps until it is needed first."""
        return self._served(spec_of(name, table, self._shared))

    def _served(self, spec: ModelSpec) -> ServedModel:
        """Make a model that sleeps until it is needed first."""

        async def load() -> ProcessLLM:
            logger.info("loading %s", spec.name)
            began = time.monotonic()
            engine = await ProcessLLM.load(
                **{**spec.engine, "kv_cache_memory": LEAST}, supervision=self._supervision
            )
            resolved = engine.resolved
            logger.info(
                "loaded in %.1f s; KV cache of %s or more, context of %d tokens, %d sequences at "
                "once",
                time.monotonic() - began,
                format_size(resolved.kv_limit_bytes),
                resolved.max_model_len,
                resolved.max_num_seqs,
            )
            try:
                served.config = with_tokenizer(
                    served.config, engine.tokenizer, shows_info=self._show_tokenizer
                )
            except BaseException:
                await engine.shutdown()
                raise
            return engine

        memory = PoolShare(self.pool, spec.name, spec.weight, spec.kv_floor, spec.kv_cap)
        prefixes = Prefixes(spec.prefixes, self._keys) if spec.prefixes else None
        served = ServedModel(spec.config(self._config), None, load, memory, prefixes)
        return served


async def share_memory(served: ServedModel) -> KVPool:
    """Make a pool of the memory of a model that had it alone; it wakes for that.

    Raises :class:`~vmserve.errors.ConfigurationError` if it cannot be shared, and what waking
    raises.
    """
    with served.serving():
        await served.awake()
        client: object = served.engine
        assert isinstance(client, ProcessLLM)
        pool = await KVPool.around(client, served.name)
    served.memory = PoolShare(pool, served.name)
    logger.info("%s are a pool now, which other models share", format_size(pool.size_bytes))
    return pool


def _pool_bytes(shared: Mapping[str, Any]) -> int:
    """Return how much memory the KV caches of all models have together.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    given = shared.get("kv_cache_memory")
    if given is not None:
        return parse_size(given, "kv_cache_memory")
    if shared.get("device") == "cuda" or (shared.get("device") != "cpu" and _GPU.exists()):
        raise ConfigurationError(
            "kv_cache_memory: several models share a GPU's memory: say how much of it their KV "
            "caches may take together, e.g. --kv-cache-memory 16GiB"
        )
    free, whose = available_memory()
    size = int(CPU_KV_SHARE * free)
    logger.info(
        "KV caches of up to %s for all models: %g %% of the memory that is free (%s)",
        format_size(size),
        100 * CPU_KV_SHARE,
        whose,
    )
    return size
