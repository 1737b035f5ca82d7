"""Engines of one model that listen on other machines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from vmserve.client.fleet.fleet import FleetLLM
from vmserve.client.process_llm import Supervision
from vmserve.client.remote.remote_llm import RemoteLLM, until_connected
from vmserve.client.transports.sealed.handshake import TakenError
from vmserve.errors import EngineDeadError
from vmserve.router.policy import Policy
from vmserve.text.tokenizer import Tokenizer

__all__ = ["connect_engines", "join_engines"]

logger = logging.getLogger(__name__)

#: Reason why an engine is not available now.
Absence: TypeAlias = EngineDeadError | TakenError
#: Seconds between two looks at an engine that serves another server.
_WAIT_SECONDS = 1.0


def connect_engines(
    addresses: Sequence[str],
    key: bytes,
    policy: Policy = "prefix",
    *,
    supervision: Supervision | None = None,
    tokenizer: Path | None = None,
    wait_seconds: float = 0.0,
) -> tuple[RemoteLLM | FleetLLM, str]:
    """Connect to engines; returns a client of all, and their name of the model.

    One that does not answer, or serves another server, joins when it can, if another serves now;
    if none does, ``wait_seconds`` is how long to wait for one that serves another server. Other
    arguments, and what is raised, are those of
    :class:`~vmserve.client.remote.remote_llm.RemoteLLM`; engines that differ raise
    :class:`~vmserve.errors.ConfigurationError`.
    """
    shared: dict[str, Tokenizer] = {}
    connect = partial(
        RemoteLLM, key=key, supervision=supervision, tokenizer=tokenizer, tokenizers=shared
    )
    connecting = {each: partial(connect, each) for each in addresses}
    client = join_engines(connecting, policy, wait_seconds)
    first = client.members[0].client if isinstance(client, FleetLLM) else client
    assert isinstance(first, RemoteLLM)
    return client, first.name


def join_engines(
    connecting: Mapping[str, Callable[[], RemoteLLM]], policy: Policy, wait_seconds: float = 0.0
) -> RemoteLLM | FleetLLM:
    """Connect to each engine, by the name that it has in the log.

    One alone is no fleet. One that is not there, or serves another server, joins when it can, if
    another serves now. If none does, wait so long for one that serves another server.
    """
    clients: list[RemoteLLM] = []
    absent: dict[str, Absence] = {}
    end, has_logged = time.monotonic() + wait_seconds, False
    try:
        while not clients:
            absent = _try_each(connecting, clients)
            taken = next((each for each in absent.values() if isinstance(each, TakenError)), None)
            if clients:
                break
            # One that was taken may start again as its server leaves it.
            if (taken is None and not has_logged) or time.monotonic() >= end:
                raise taken or next(iter(absent.values()))
            if not has_logged:
                logger.warning("%s; waiting up to %g s for it", taken, wait_seconds)
                has_logged = True
            time.sleep(_WAIT_SECONDS)
        if len(connecting) == 1:
            return clients[0]
        fleet = FleetLLM(clients, policy)
    except BaseException:
        asyncio.run(_end(clients))
        raise
    for name, why in absent.items():
        logger.warning("%s; it joins when it can", why)
        fleet.meanwhile(_joining(fleet, name, connecting[name]))
    return fleet


def _try_each(
    connecting: Mapping[str, Callable[[], RemoteLLM]], clients: list[RemoteLLM]
) -> dict[str, Absence]:
    """Append clients of the engines that can be had to ``clients``; returns why others cannot."""
    absent: dict[str, Absence] = {}
    for name, connect in connecting.items():
        try:
            clients.append(connect())
        except (EngineDeadError, TakenError) as error:
            absent[name] = error
        else:
            if len(connecting) > 1:
                logger.info("engine %d: %s", len(clients) - 1, clients[-1].address)
    return absent


async def _end(clients: Iterable[RemoteLLM]) -> None:
    for client in clients:
        await client.shutdown()


def _joining(
    fleet: FleetLLM, address: str, connect: Callable[[], RemoteLLM]
) -> Callable[[], Awaitable[None]]:
    async def attempt() -> None:
        client = await asyncio.to_thread(connect)
        try:
            member = await fleet.join(client)
        except BaseException:
            await client.shutdown()
            raise
        logger.info("engine %s: %s joined", member.name, address)

    return partial(until_connected, attempt)
