"""Engines of one model that listen on other machines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from vmserve.client.transports.fleet import Fleet
from vmserve.client.transports.restarts import Reconnecting
from vmserve.client.transports.sealed.handshake import TakenError
from vmserve.client.transports.sealed.link import Place
from vmserve.client.transports.sealed.source import SealedSource
from vmserve.client.transports.supervised import Supervised, Supervision
from vmserve.errors import EngineDeadError, VmserveError
from vmserve.router.policy import Policy
from vmserve.text.tokenizer import Tokenizer

__all__ = ["connect_engine", "connect_engines", "join_engines"]

logger = logging.getLogger(__name__)

#: Reason why an engine is not available now.
Absence: TypeAlias = EngineDeadError | TakenError
#: Seconds between two looks at an engine that serves another server.
_WAIT_SECONDS = 1.0


def connect_engine(
    place: Place,
    key: bytes,
    *,
    supervision: Supervision | None = None,
    tokenizer: Path | None = None,
    tokenizers: dict[str, Tokenizer] | None = None,
) -> Supervised:
    """Connect to the engine at ``place``; arguments and errors are those of
    :class:`~vmserve.client.transports.sealed.source.SealedSource`."""
    return Supervised(SealedSource(place, key, tokenizer), supervision, tokenizers=tokenizers)


def connect_engines(
    addresses: Sequence[str],
    key: bytes,
    policy: Policy = "prefix",
    *,
    supervision: Supervision | None = None,
    tokenizer: Path | None = None,
    wait_seconds: float = 0.0,
) -> tuple[Supervised | Fleet, str]:
    """Connect to engines; returns a transport to all, and their name of the model.

    One that does not answer, or serves another server, joins when it can, if another serves now;
    if none does, ``wait_seconds`` is how long to wait for one that serves another server. Other
    arguments, and what is raised, are those of :func:`connect_engine`; engines that differ raise
    :class:`~vmserve.errors.ConfigurationError`.
    """
    shared: dict[str, Tokenizer] = {}
    connecting = {
        each: partial(
            connect_engine,
            each,
            key,
            supervision=supervision,
            tokenizer=tokenizer,
            tokenizers=shared,
        )
        for each in addresses
    }
    return join_engines(connecting, policy, wait_seconds)


def join_engines(
    connecting: Mapping[str, Callable[[], Supervised]], policy: Policy, wait_seconds: float = 0.0
) -> tuple[Supervised | Fleet, str]:
    """Connect to each engine, by the name that it has in the log; returns as
    :func:`connect_engines`.

    One alone is no fleet. One that is not there, or serves another server, joins when it can, if
    another serves now. If none does, wait so long for one that serves another server.
    """
    engines: list[Supervised] = []
    absent: dict[str, Absence] = {}
    end, has_logged = time.monotonic() + wait_seconds, False
    try:
        while not engines:
            absent = _try_each(connecting, engines)
            taken = next((each for each in absent.values() if isinstance(each, TakenError)), None)
            if engines:
                break
            # One that was taken may start again as its server leaves it.
            if (taken is None and not has_logged) or time.monotonic() >= end:
                raise taken or next(iter(absent.values()))
            if not has_logged:
                logger.warning("%s; waiting up to %g s for it", taken, wait_seconds)
                has_logged = True
            time.sleep(_WAIT_SECONDS)
        name = engines[0].ready.name
        if len(connecting) == 1:
            return engines[0], name
        fleet = Fleet(engines, policy)
    except BaseException:
        asyncio.run(_end(engines))
        raise
    for each, why in absent.items():
        logger.warning("%s; it joins when it can", why)
        fleet.meanwhile(_joining(fleet, each, connecting[each]))
    return fleet, name


def _try_each(
    connecting: Mapping[str, Callable[[], Supervised]], engines: list[Supervised]
) -> dict[str, Absence]:
    """Append those that can be had to ``engines``; returns why others cannot."""
    absent: dict[str, Absence] = {}
    for name, connect in connecting.items():
        try:
            engines.append(connect())
        except (EngineDeadError, TakenError) as error:
            absent[name] = error
        else:
            if len(connecting) > 1:
                logger.info("engine %d: %s", len(engines) - 1, engines[-1].channel.address)
    return absent


async def _end(engines: Iterable[Supervised]) -> None:
    for engine in engines:
        await engine.close()


def _joining(
    fleet: Fleet, address: str, connect: Callable[[], Supervised]
) -> Callable[[], Awaitable[None]]:
    async def attempt() -> None:
        engine = await asyncio.to_thread(connect)
        try:
            member = await fleet.join(engine)
        except BaseException:
            await engine.close()
            raise
        logger.info("engine %s: %s joined", member.name, address)

    return partial(_until_connected, attempt)


async def _until_connected(connect: Callable[[], Awaitable[None]]) -> None:
    """Call ``connect``, after pauses that grow, until it raises no error of ours."""
    attempts = Reconnecting()
    while True:
        await asyncio.sleep(attempts.pause())
        try:
            await connect()
        except VmserveError as error:
            attempts.failed(error)
        else:
            return
