"""Engines of one model that Ray places on its nodes, starts, and starts again when they end.

Each is an actor that loads the engine and listens on its node's address. What is asked and
answered goes over our own connections (:mod:`vmserve.client.transports.sealed`), with a key of this
run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from vmserve.client.codec import decode_from_engine, encode
from vmserve.client.engines.remote import join_engines
from vmserve.client.host import EngineHost
from vmserve.client.messages import Refused
from vmserve.client.transports.fleet import Fleet
from vmserve.client.transports.sealed.source import SealedSource
from vmserve.client.transports.supervised import Channel, Supervised, Supervision
from vmserve.config import EngineConfig, default_kv_bytes
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.memory.limits import available_memory
from vmserve.numbers.sizes import parse_size
from vmserve.router.policy import Policy
from vmserve.system.logs import configure_logging
from vmserve.text.tokenizer import Tokenizer

__all__ = ["num_nodes", "place_engines"]

logger = logging.getLogger(__name__)

#: Seconds that Ray may take to place all engines: clusters that grow start machines meanwhile.
PLACE_SECONDS: Final = 300.0
_REMIND_SECONDS: Final = 10.0
#: Seconds that a question to an actor waits, so that its caller can be stopped.
_ASK_SECONDS: Final = 2.0
#: Times that an engine may end while it loads before its server begins without it.
_MOST_ENDS: Final = 3


def _ray() -> Any:
    """Ray, connected to its cluster. Raises :class:`~vmserve.errors.ConfigurationError`."""
    try:
        import ray  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(
            f"distributed_executor: Ray cannot be imported ({error}): pip install 'vmserve[ray]'"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init("auto", configure_logging=False, log_to_driver=False)
        except ConnectionError as error:
            raise ConfigurationError(
                "distributed_executor: no Ray cluster is found: run this on a node of one (`ray "
                "start --head` makes one), or set RAY_ADDRESS"
            ) from error
    return ray


def _cpus_of_nodes(ray: Any) -> list[int]:
    """CPUs of the nodes that have any, the largest first."""
    found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return sorted((each for each in found if each), reverse=True)


def num_nodes() -> int:
    """The number of nodes that have CPUs. Raises :class:`~vmserve.errors.ConfigurationError`."""
    return len(_cpus_of_nodes(_ray()))


def place_engines(
    size: int,
    policy: Policy = "prefix",
    *,
    num_cpus: int | None = None,
    supervision: Supervision | None = None,
    **options: Any,
) -> Supervised | Fleet:
    """Have Ray start ``size`` engines, spread over its nodes, and connect to them.

    ``num_cpus``: what Ray reserves for each, which is its number of threads; None: an equal part of
    the smallest node that is needed. ``kv_cache_memory`` is that of all engines together. An engine
    that ends is started again by Ray, on another node if its own is gone.

    Raises :class:`~vmserve.errors.ConfigurationError` without Ray, a cluster, or room in it, and
    what loading raises.
    """
    ray = _ray()
    nodes = _cpus_of_nodes(ray)
    used = nodes[:size]
    per_node = -(-size // max(1, len(used)))
    if num_cpus is None:
        num_cpus = max(1, used[-1] // per_node) if used else 1
    given = options.get("kv_cache_memory")
    if given is not None:
        options["kv_cache_memory"] = parse_size(given, "kv_cache_memory") // size
    EngineConfig.from_options(options)
    group = _Group(ray, size, num_cpus, sum(nodes))
    key = secrets.token_bytes(32)
    replicas = [
        _Replica(ray, group, index, key, options, num_cpus, per_node) for index in range(size)
    ]
    for each in replicas:
        each.ask()  # all load at once
    tokenizers: dict[str, Tokenizer] = {}
    connecting = {
        f"engine {index}": partial(_connect, each, key, supervision, tokenizers)
        for index, each in enumerate(replicas)
    }
    try:
        return join_engines(connecting, policy)[0]
    except BaseException:
        group.remove()
        raise


class _Group:
    """Room in the cluster for each engine, until the last has left."""

    def __init__(self, ray: Any, size: int, num_cpus: int, total: int) -> None:
        self._ray = ray
        self._num_left = size
        bundles = [{"CPU": num_cpus}] * size
        self.placed = ray.util.placement_group(bundles, strategy="SPREAD")
        began = time.monotonic()
        while not self.placed.wait(_REMIND_SECONDS):
            logger.warning(
                "waiting for Ray to find room for %d engines of %d CPUs (it has %d in all)",
                size,
                num_cpus,
                total,
            )
            if time.monotonic() - began > PLACE_SECONDS:
                self.remove()
                raise ConfigurationError(
                    f"data_parallel_size: Ray has no room for {size} engines of {num_cpus} CPUs: "
                    f"it has {total} in all, and others may use them: lower --data-parallel-size "
                    "or --ray-num-cpus"
                )

    def leave(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self.remove()

    def remove(self) -> None:
        """Give the room back. Actors in it end."""
        self._ray.util.remove_placement_group(self.placed)


class _Replica:
    """One actor, and where its engine listens. One thread at a time may ask."""

    def __init__(
        self,
        ray: Any,
        group: _Group,
        index: int,
        key: bytes,
        options: Mapping[str, Any],
        num_cpus: int,
        per_node: int,
    ) -> None:
        self._ray = ray
        self._group = group
        self._index = index
        self._arguments = (dict(options), key, num_cpus, per_node)
        self._num_cpus = num_cpus
        self._actor = self._create()
        self._asked: Any = None

    def _create(self) -> Any:
        from ray.util.scheduling_strategies import (  # noqa: PLC0415 - an extra
            PlacementGroupSchedulingStrategy,
        )

        strategy = PlacementGroupSchedulingStrategy(self._group.placed, self._index)
        return (
            self._ray.remote(EngineActor)
            .options(num_cpus=self._num_cpus, max_restarts=-1, scheduling_strategy=strategy)
            .remote()
        )

    def ask(self) -> None:
        """Ask where the engine listens, which also loads it."""
        if self._asked is None:
            self._asked = self._actor.listen.remote(*self._arguments)

    def find(self) -> str:
        """Return where the engine listens now.

        Raises :class:`~vmserve.errors.EngineDeadError` if it cannot be said yet, and what loading
        the engine raises.
        """
        errors = self._ray.exceptions
        self.ask()
        try:
            address, refusal = self._ray.get(self._asked, timeout=_ASK_SECONDS)
        except errors.GetTimeoutError:
            raise EngineDeadError(f"engine {self._index}: Ray has not started it yet") from None
        except errors.RayError as error:
            self._asked = None
            if isinstance(error, errors.ActorDiedError):  # Ray does not start it again
                self._actor = self._create()
            reason = str(error).strip().splitlines()[0]
            raise EngineDeadError(f"engine {self._index}: {reason}") from error
        self._asked = None
        if refusal:
            message = decode_from_engine(refusal)
            assert isinstance(message, Refused)
            raise message.error
        return str(address)

    def load(self) -> None:
        """Return once the engine listens. Raises what loading raises, and
        :class:`~vmserve.errors.EngineDeadError` if it ends again and again."""
        num_ends = 0
        while num_ends < _MOST_ENDS:
            try:
                self.find()
            except EngineDeadError as error:
                if self._asked is None:  # not: it takes its time
                    num_ends += 1
                    why = error
            else:
                return
        raise why

    def restart(self) -> None:
        """End the process of an engine that hangs; Ray starts another."""
        self._ray.kill(self._actor, no_restart=False)

    def leave(self) -> None:
        self._ray.kill(self._actor)
        self._group.leave()


def _connect(
    replica: _Replica,
    key: bytes,
    supervision: Supervision | None,
    tokenizers: dict[str, Tokenizer],
) -> Supervised:
    replica.load()
    return Supervised(_RaySource(replica, key), supervision, tokenizers=tokenizers)


class _RaySource(SealedSource):
    """The engine of ``replica``, wherever Ray has started it."""

    def __init__(self, replica: _Replica, key: bytes) -> None:
        super().__init__(replica.find, key)
        self._replica = replica

    def end_silent(self, channel: Channel, seconds: float, hang_timeout: float) -> None:
        super().end_silent(channel, seconds, hang_timeout)
        if seconds > hang_timeout:
            self._replica.restart()

    async def leave(self) -> None:
        await asyncio.to_thread(self._replica.leave)


class EngineActor:
    """An engine in a process of Ray's, which ends with it."""

    def __init__(self) -> None:
        self._address = ""

    def listen(
        self, options: dict[str, Any], key: bytes, num_cpus: int, per_node: int
    ) -> tuple[str, bytes]:
        """Load the engine unless it is, and return where it listens.

        Where it cannot be loaded, return an encoded :class:`~vmserve.client.messages.Refused` too.
        """
        try:
            if not self._address:
                self._address = _listen(options, key, num_cpus, per_node)
        except VmserveError as error:
            return "", encode(Refused(error))
        return self._address, b""


def _listen(options: dict[str, Any], key: bytes, num_cpus: int, per_node: int) -> str:
    """Load an engine and have a thread serve it on this node's address, which is returned."""
    ranks = int(options.get("tensor_parallel_size", 1))
    os.environ["OMP_NUM_THREADS"] = str(max(1, num_cpus // ranks))
    configure_logging(logging.INFO, "text", "engine")
    if per_node > 1 and "kv_cache_memory" not in options:
        options = {
            **options,
            "kv_cache_memory": default_kv_bytes(available_memory()[0]) // per_node,
        }
    engine = LLMEngine(EngineConfig.from_options(options))
    node = _ray().util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in node else socket.AF_INET
    listener = socket.create_server((node, 0), family=family)
    host = EngineHost(engine, listener, key)
    threading.Thread(target=_run, args=(host,), name="vmserve-engine", daemon=True).start()
    port = listener.getsockname()[1]
    return f"[{node}]:{port}" if ":" in node else f"{node}:{port}"


def _run(host: EngineHost) -> None:
    try:
        host.run()
    except BaseException:  # the thread's boundary: Ray starts another process
        logger.exception("the engine stopped")
    finally:
        os._exit(1)
