"""Load several models, each in an engine process of its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vmserve.client.client import Client
from vmserve.client.engines.local import load_engine
from vmserve.client.lending import KVPool
from vmserve.client.transports.supervised import Supervision
from vmserve.config import CPU_KV_SHARE, LEAST, EngineConfig, default_kv_bytes
from vmserve.engine.choose import model_weight_bytes
from vmserve.memory.limits import available_memory
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.options import rules
from vmserve.server.auth import KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.models.memory import PoolShare
from vmserve.server.models.prefixes import Prefixes
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.models.specs import ModelSpec, spec_of
from vmserve.server.models.tokenizer_info import with_tokenizer

__all__ = ["ModelLoader", "share_memory"]

logger = logging.getLogger(__name__)

_GPU: Final = Path("/dev/nvidiactl")


class ModelLoader:
    """Makes served models. ``keys``: those of ``config``. ``shared``: options of the engine that
    all models have unless they say otherwise; its ``kv_cache_memory`` is the memory of all of them
    together, if there is no ``pool`` yet. ``specs``: models for which that needs memory besides
    their weights, since all may be awake at once.

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
        specs: Sequence[ModelSpec] = (),
    ) -> None:
        self._config = config
        self._keys = keys
        self._supervision = supervision
        self._show_tokenizer = show_tokenizer
        self._shared = shared
        self._specs = specs
        self.pool = KVPool(_pool_bytes(shared, specs)) if pool is None else pool

    async def load_all(self) -> Models:
        """Make all models, and load those that are not left for their first request.

        One after the other: each measures what its steps take. Raises what loading raises.
        """
        models = Models([self._served(spec) for spec in self._specs], self.make, self.pool)
        try:
            for spec, model in zip(self._specs, models, strict=True):
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

        async def load() -> Client:
            logger.info("loading %s", spec.name)
            began = time.monotonic()
            engine = Client(
                await load_engine(
                    **{**spec.engine, "kv_cache_memory": LEAST}, supervision=self._supervision
                )
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
        pool = await KVPool.around(served.engine, served.name)
    served.memory = PoolShare(pool, served.name)
    logger.info("%s are a pool now, which other models share", format_size(pool.size_bytes))
    return pool


def _pool_bytes(shared: Mapping[str, Any], specs: Sequence[ModelSpec]) -> int:
    """Return how much memory the KV caches of all models have together: what is asked, or a share
    of what weights leave. Of the models that load at their first request the largest counts: they
    need not be awake together.

    On a CPU, weights and caches that are more than is free are logged as a warning, as those of a
    single model are. Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    given = shared.get("kv_cache_memory")
    on_gpu = shared.get("device") == "cuda" or (shared.get("device") != "cpu" and _GPU.exists())
    rules.check({"are_several": True, "unlimited_gpu": on_gpu and given is None})
    if given is not None and on_gpu:
        return parse_size(given, "kv_cache_memory")
    free, whose = available_memory()
    known = {spec.name: _weight_bytes(spec) for spec in specs}
    weights = {name: num_bytes for name, num_bytes in known.items() if num_bytes is not None}
    left = free - sum(weights.values())
    lasting = sum(weights.get(spec.name, 0) for spec in specs if spec.preload)
    largest = max((weights.get(spec.name, 0) for spec in specs if not spec.preload), default=0)
    size = default_kv_bytes(free - lasting - largest)
    if given is not None:
        size = parse_size(given, "kv_cache_memory")
    else:
        logger.info(
            "KV caches of up to %s for all models: %g %% of the memory that is free beside their "
            "weights (%s)",
            format_size(size),
            100 * CPU_KV_SHARE,
            whose,
        )
    if size > left and weights:
        logger.warning(
            "all models awake take %s of weights (%s) and up to %s of KV cache, and %s are free "
            "(%s): the system may swap or end processes; lower --kv-cache-memory, use smaller "
            "models or --quantization int8, or serve fewer: --idle-unload gives back the memory of "
            "those that are not used",
            format_size(sum(weights.values())),
            ", ".join(f"{format_size(each)} {name}" for name, each in weights.items()),
            format_size(size),
            format_size(free),
            whose,
        )
    return size


def _weight_bytes(spec: ModelSpec) -> int | None:
    """None for a model that is not at hand, or cannot be used: loading it says why."""
    with contextlib.suppress(Exception):
        return model_weight_bytes(EngineConfig.from_options(dict(spec.engine)))
    return None
