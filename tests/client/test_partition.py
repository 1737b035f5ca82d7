"""A network that fails between a server and one of its two engines, and heals.

The engine is on another host, by network namespaces. Silences are shorter here than they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.chaos.harness import free_port
from tests.client.test_remote_llm import KEY, hosted
from tests.clients import FleetClient, RemoteClient, address_of, stats_of
from tests.namespaces import cut_cable, inside, namespaces
from tests.support.loops import everything, until
from vmserve import EngineDeadError, SamplingParams
from vmserve.client import host
from vmserve.client.transports import restarts
from vmserve.client.transports.fleet import FleetEngine
from vmserve.client.transports.sealed import handshake, link
from vmserve.client.transports.sealed.handshake import TakenError
from vmserve.client.transports.supervised import Supervision
from vmserve.types import PinnedPrefix

__all__ = ["namespaces"]

pytestmark = pytest.mark.timeout(300)

Names = tuple[str, str]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5 + number] * (30 + 9 * number) for number in range(4)]
PINNED = [9] * 64


@pytest.fixture
def far(namespaces: Names, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where an engine listens on the second host. This process connects from the first."""
    connect = socket.create_connection

    def from_first(address: tuple[str, int], timeout: float) -> socket.socket:
        if not address[0].startswith("10.77."):
            return connect(address, timeout)
        with inside(namespaces[0]):
            return connect(address, timeout)

    monkeypatch.setattr(link.socket, "create_connection", from_first)
    monkeypatch.setattr(link, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 1.0)
    monkeypatch.setattr(host, "_SILENT_SECONDS", 4.0)
    monkeypatch.setattr(restarts, "_LONGEST_PAUSE_SECONDS", 0.5)
    with inside(namespaces[1]):
        listener = socket.create_server(("10.77.0.2", free_port()))
    with listener:
        yield listener


@contextlib.asynccontextmanager
async def fleet_with(far: socket.socket, ping_seconds: float = 0.2) -> AsyncIterator[FleetClient]:
    """Of an engine here and one on the second host."""
    watched = Supervision(ping_seconds=ping_seconds)
    with hosted() as (near, _), hosted(listener=far) as (address, _):
        connect = FleetClient.connected
        fleet = await asyncio.to_thread(connect, [near, address], KEY, supervision=watched)
        yield fleet
        await fleet.shutdown()


class Load:
    """Clients that ask again and again, and what came of it."""

    def __init__(self, fleet: FleetClient, expected: list[list[int]]) -> None:
        self.ends: Counter[str] = Counter()
        self._fleet = fleet
        self._expected = expected
        self._is_over = False
        self._clients = [asyncio.create_task(self._ask(number)) for number in range(4)]

    async def _ask(self, number: int) -> None:
        is_stream = number % 2 == 0
        while not self._is_over:
            expected, told = self._expected[number], []
            try:
                async with asyncio.timeout(60):
                    async for output in self._fleet.generate(
                        PROMPTS[number], PARAMS, stream=is_stream
                    ):
                        told += [each for choice in output.outputs for each in choice.token_ids]
            except EngineDeadError:
                assert is_stream, "another engine could have answered"
                assert told == expected[: len(told)] != []
                self.ends["ended by an error"] += 1
            else:
                assert told == expected
                self.ends["answered"] += 1

    async def go_on(self) -> None:
        """Wait for some more answers."""
        before = self.ends["answered"]
        await until(lambda: self._failed() or self.ends["answered"] > before + 4)

    def _failed(self) -> bool:
        return any(client.done() for client in self._clients)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)


async def answers(fleet: FleetClient) -> list[list[int]]:
    finals = [(await everything(fleet.generate(prompt, PARAMS)))[-1] for prompt in PROMPTS]
    return [list(final.outputs[0].token_ids) for final in finals]


async def assert_is_whole(fleet: FleetClient, expected: list[list[int]]) -> None:
    """Both engines serve this server and nobody else, and have what is pinned and nothing else."""
    assert [member.state for member in fleet.members] == ["ready", "ready"]
    for member, other in zip(fleet.members, reversed(fleet.members), strict=True):
        fleet.transport.drain(other.name)
        assert await answers(fleet) == expected
        stats = await stats_of(member)
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
        [hit] = await everything(fleet.generate([*PINNED, 5], PARAMS))
        assert hit.metrics.num_cached_tokens == len(PINNED)
        fleet.transport.resume(other.name)
        assert not member.requests
        with pytest.raises(TakenError):
            await asyncio.to_thread(RemoteClient, address_of(member), KEY)


async def until_pinned(fleet: FleetClient) -> None:
    for member in fleet.members:
        while (await stats_of(member))["pinned_prefixes"] != 1:
            await asyncio.sleep(0.01)


async def end(fleet: FleetClient, pin: PinnedPrefix) -> None:
    """Nothing holds memory any more."""
    await fleet.unpin_prefix(pin.handle)
    for member in fleet.members:
        stats = await stats_of(member)
        assert stats["pinned_prefixes"] == stats["num_seqs"] == stats["used_pages"] == 0


@pytest.mark.parametrize(
    "senders",
    [
        pytest.param((0, 1), id="both"),
        pytest.param((0,), id="server", marks=pytest.mark.slow),
        pytest.param((1,), id="engine", marks=pytest.mark.slow),
    ],
)
async def test_an_engine_is_back_when_the_network_is(
    senders: tuple[int, ...], namespaces: Names, far: socket.socket
) -> None:
    """Whoever's packets are lost; all requests end, before it is noticed and after."""
    async with fleet_with(far) as fleet:
        expected = await answers(fleet)
        pin = await fleet.pin_prefix(PINNED)
        load = Load(fleet, expected)
        await load.go_on()
        with cut_cable(namespaces, senders):
            await until(lambda: fleet.members[1].state == "down")
            await load.go_on()
        await until(lambda: fleet.members[1].state == "ready")
        await load.go_on()
        await load.end()
        await until_pinned(fleet)
        await assert_is_whole(fleet, expected)
        await end(fleet, pin)


async def test_a_short_cut_is_only_a_delay(namespaces: Names, far: socket.socket) -> None:
    async with fleet_with(far, ping_seconds=1.0) as fleet:
        load = Load(fleet, await answers(fleet))
        await load.go_on()
        with cut_cable(namespaces):
            await asyncio.sleep(0.5)
        await load.go_on()
        await load.end()
        assert set(load.ends) == {"answered"}
        stats = await fleet.fetch_stats()
        assert stats["engine_restarts_total"] == stats["router_failovers_total"] == 0


@pytest.mark.parametrize("moment", ["handshake", "pin"])
async def test_a_cut_while_an_engine_joins_leaves_nothing_half_joined(
    moment: str,
    namespaces: Names,
    far: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is not there when the server starts, and lost again after a handshake, or before a pin."""
    network, is_cut = contextlib.ExitStack(), threading.Event()

    def cut_at(place: Any, name: str) -> None:
        """Cut at the first call that is about the second host."""
        original = getattr(place, name)

        def wrapped(asked: Any, *arguments: Any) -> Any:
            result = original(asked, *arguments)
            address = asked.getpeername()[0] if moment == "handshake" else address_of(asked)
            if address.startswith("10.77."):
                monkeypatch.setattr(place, name, original)
                caplog.clear()
                network.enter_context(cut_cable(namespaces))
                is_cut.set()
            return result

        monkeypatch.setattr(place, name, wrapped)

    network.enter_context(cut_cable(namespaces))
    with network:
        async with fleet_with(far) as fleet:
            expected = await answers(fleet)
            pin = await fleet.pin_prefix(PINNED)
            if moment == "handshake":
                cut_at(link, "greet_engine")
            else:
                cut_at(FleetEngine, "ask")
            network.close()
            await until(lambda: is_cut.is_set() and "not connected yet" in caplog.text)
            assert len(fleet.members) == 1
            assert await answers(fleet) == expected
            network.close()
            await until(lambda: len(fleet.members) == 2)
            await assert_is_whole(fleet, expected)
            await end(fleet, pin)
