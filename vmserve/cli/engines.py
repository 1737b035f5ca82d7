"""Which engines a command uses: its own, Ray's, or those that somebody else started."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from vmserve.client.client import Client
from vmserve.client.engines.local import start_engine, start_engines
from vmserve.client.transports.supervised import Supervision
from vmserve.errors import ConfigurationError
from vmserve.models.hub import is_embedded
from vmserve.models.loader import Progress
from vmserve.options import Bounds, Option, check_options, rules
from vmserve.router.policy import Policy
from vmserve.server.config import PROCESSES

__all__ = ["EngineChoice"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """Options of commands that have engines outside their own process.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    data_parallel_size: Annotated[
        int | None,
        Option(
            "Engines of the model, each with its own cores and part of --kv-cache-memory.",
            PROCESSES,
            Bounds(1, 1024, integer=True),
            default="1; with Ray, one for each node",
        ),
    ] = None
    router: Annotated[
        str,
        Option(
            "Which engine gets a request: the one that should have most of its prompt cached and "
            "is not much busier (prefix), each in turn, or the least busy.",
            PROCESSES,
            choices=get_args(Policy),
        ),
    ] = "prefix"
    distributed_executor: Annotated[
        Literal["process", "ray"],
        Option(
            "Who starts engines: this command, as processes, or Ray, as actors on its nodes.",
            PROCESSES,
        ),
    ] = "process"
    ray_num_cpus: Annotated[
        int | None,
        Option(
            "CPUs that Ray reserves for each engine, which is its number of threads.",
            PROCESSES,
            Bounds(1, 4096, integer=True),
            default="an equal part of the smallest node",
        ),
    ] = None
    engines: Annotated[
        tuple[str, ...],
        Option(
            "Use the engine that listens there (vmserve engine) instead of starting one; options "
            "of the engine are given to it. Repeatable: engines of one model.",
            PROCESSES,
            flags=("--engine",),
            metavar="HOST:PORT",
        ),
    ] = ()
    engine_key_file: Annotated[
        Path | None,
        Option(
            "File with the key that --engine was started with.",
            PROCESSES,
            metavar="FILE",
        ),
    ] = None

    engine_wait: Annotated[
        float,
        Option(
            "How long to wait at the start for an --engine that serves another server.",
            PROCESSES,
            Bounds(0, 86_400),
            unit="seconds",
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        check_options(self)
        rules.check(
            {
                "engine_key_file": self.engine_key_file,
                "engines": self.engines,
                "ray_num_cpus": self.ray_num_cpus,
                "uses_ray": self.uses_ray,
            }
        )

    @property
    def uses_ray(self) -> bool:
        return self.distributed_executor == "ray"

    @property
    def is_one_process(self) -> bool:
        """Whether there is one engine, which this command starts itself."""
        return not (self.engines or self.uses_ray or (self.data_parallel_size or 1) > 1)

    @property
    def facts(self) -> dict[str, Any]:
        """What rules ask of engines: :mod:`vmserve.options.rules`."""
        ray = "--distributed-executor ray" if self.uses_ray else ""
        return {
            "data_parallel_size": self.data_parallel_size,
            "engines": self.engines,
            "is_one_process": self.is_one_process,
            "uses_ray": self.uses_ray,
            "whose_engines": "--engine" if self.engines else ray,
        }

    def check(self, options: Mapping[str, Any]) -> None:
        """Check all that can be checked before anything is started, also ``options`` of engines.

        Raises :class:`~vmserve.errors.ConfigurationError`.
        """
        if self.engines:
            rules.check(self.facts)
            self._remote(options)

    def _remote(self, options: Mapping[str, Any]) -> tuple[bytes, Path | None]:
        """What ``--engine`` needs: the key, and a tokenizer of our own if there is one."""
        from vmserve.client.transports.sealed.handshake import (  # noqa: PLC0415 - most start their engine
            read_key,
        )
        from vmserve.client.transports.sealed.link import parse_address  # noqa: PLC0415 - as above

        places = [parse_address(address, "engine") for address in self.engines]
        for address, place in zip(self.engines, places, strict=True):
            if places.count(place) > 1:
                raise ConfigurationError(f"engine: {address} is given twice")
        if self.engine_key_file is None:
            raise ConfigurationError("engine: --engine-key-file FILE is missing: the engine's key")
        others = sorted(name for name in options if name not in ("model", "tokenizer"))
        if options.get("model") is not None:
            others.insert(0, "model")
        rules.check({**self.facts, "engine_option": next(iter(others), None)})
        tokenizer = options.get("tokenizer")
        key = read_key(self.engine_key_file, "engine_key_file")
        return key, None if tokenizer is None else Path(tokenizer)

    def start(
        self,
        options: Mapping[str, Any],
        *,
        supervision: Supervision,
        progress: Progress,
        meanwhile: Callable[[], None],
    ) -> tuple[Client, str | None]:
        """Start or find the engines; returns a client, and the model's name if engines said it.

        ``options``: those of an engine. Raises what loading and connecting raise.
        """
        policy = cast("Policy", self.router)
        if self.engines:
            from vmserve.client.engines.remote import connect_engines  # noqa: PLC0415 - as above

            key, tokenizer = self._remote(options)
            logger.info("connecting to the engine at %s", ", ".join(self.engines))
            found, name = connect_engines(
                self.engines,
                key,
                policy,
                supervision=supervision,
                tokenizer=tokenizer,
                wait_seconds=self.engine_wait,
            )
            meanwhile()
            return Client(found), name
        model = options.get("model")
        logger.info("loading %s", "the embedded model" if is_embedded(model) else model)
        if self.uses_ray:
            from vmserve.client.engines.on_ray import num_nodes, place_engines  # noqa: PLC0415

            placed = place_engines(
                self.data_parallel_size or num_nodes(),
                policy,
                num_cpus=self.ray_num_cpus,
                supervision=supervision,
                **options,
            )
            meanwhile()
            return Client(placed), None
        size = self.data_parallel_size or 1
        watched: dict[str, Any] = {
            "progress": progress, "supervision": supervision, "meanwhile": meanwhile
        }  # fmt: skip
        if size == 1:
            return Client(start_engine(**options, **watched)), None
        return Client(start_engines(size, policy, **options, **watched)), None
