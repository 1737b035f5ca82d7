"""Clients over each transport, with what tests look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vmserve.client.client import Client
from vmserve.client.engines.local import start_engine
from vmserve.client.engines.remote import connect_engine, connect_engines
from vmserve.client.transports.base import Transport
from vmserve.client.transports.fleet import Fleet, FleetEngine
from vmserve.client.transports.sealed.link import Place
from vmserve.client.transports.supervised import Supervised
from vmserve.router.policy import Policy


class ProcessClient(Client):
    """Of an engine in a process of its own."""

    transport: Supervised

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__(start_engine(model, **options))

    @property
    def pid(self) -> int:
        return self.transport.pid


class RemoteClient(Client):
    """Of an engine that listens."""

    transport: Supervised

    def __init__(self, place: Place, key: bytes, **options: Any) -> None:
        super().__init__(connect_engine(place, key, **options))


class FleetClient(Client):
    """Of several engines."""

    transport: Fleet

    def __init__(self, transports: Sequence[Transport], policy: Policy = "prefix") -> None:
        super().__init__(Fleet(transports, policy))

    @classmethod
    def connected(cls, addresses: Sequence[str], *args: Any, **how: Any) -> FleetClient:
        """Of engines that listen."""
        made = cls.__new__(cls)
        fleet, _ = connect_engines(addresses, *args, **how)
        assert isinstance(fleet, Fleet)
        Client.__init__(made, fleet)
        return made

    @property
    def members(self) -> list[FleetEngine]:
        return self.transport.members


async def stats_of(member: FleetEngine) -> dict[str, float | int]:
    """What a member says of itself now."""
    await member.ask("stats", {})
    return dict(member.facts.latest())


def address_of(member: FleetEngine) -> str:
    """Where a member's engine is."""
    engine = member.transport
    assert isinstance(engine, Supervised)
    return engine.channel.address
