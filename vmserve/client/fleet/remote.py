"""Engines of one model that listen on other machines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from vmserve.client.fleet.fleet import FleetLLM
from vmserve.client.process_llm import Supervision
from vmserve.client.remote.remote_llm import RemoteLLM, until_connected
from vmserve.errors import EngineDeadError
from vmserve.router.policy import Policy
from vmserve.text.tokenizer import Tokenizer

__all__ = ["connect_engines", "join_engines"]

logger = logging.getLogger(__name__)


def connect_engines(
    addresses: Sequence[str],
    key: bytes,
    policy: Policy = "prefix",
    *,
    supervision: Supervision | None = None,
    tokenizer: Path | None = None,
) -> tuple[RemoteLLM | FleetLLM, str]:
    """Connect to engines; returns a client of all, and their name of the model.

    One that does not answer joins when it does, if another answers now. Other arguments, and what
    is raised, are those of :class:`~vmserve.client.remote.remote_llm.RemoteLLM`; engines that
    differ raise :class:`~vmserve.errors.ConfigurationError`.
    """
    shared: dict[str, Tokenizer] = {}
    connect = partial(
        RemoteLLM, key=key, supervision=supervision, tokenizer=tokenizer, tokenizers=shared
    )
    client = join_engines({each: partial(connect, each) for each in addresses}, policy)
    first = client.members[0].client if isinstance(client, FleetLLM) else client
    assert isinstance(first, RemoteLLM)
    return client, first.name


def join_engines(
    connecting: Mapping[str, Callable[[], RemoteLLM]], policy: Policy
) -> RemoteLLM | FleetLLM:
    """Connect to each engine, by the name that it has in the log.

    One alone is no fleet. One that is not there joins when it is, if another is there now.
    """
    if len(connecting) == 1:
        [connect] = connecting.values()
        return connect()
    clients: list[RemoteLLM] = []
    absent: dict[str, EngineDeadError] = {}
    try:
        for name, connect in connecting.items():
            try:
                clients.append(connect())
            except EngineDeadError as error:
                absent[name] = error
            else:
                logger.info("engine %d: %s", len(clients) - 1, clients[-1].address)
        if not clients:
            raise next(iter(absent.values()))
        fleet = FleetLLM(clients, policy)
    except BaseException:
        asyncio.run(_end(clients))
        raise
    for name, why in absent.items():
        logger.warning("%s; it joins when it answers", why)
        fleet.meanwhile(_joining(fleet, name, connecting[name]))
    return fleet


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
