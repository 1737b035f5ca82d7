"""Models that come, go, sleep, wake and die under requests, over scripted engines in one loop.

The server's routes, its models and the pool are the real ones. What engines do with memory is
scripted too: they carry orders out late, keep what they use, and ask for more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.chaos.models import Changes
from tests.pool.test_shares import Engine as Borrower
from vmserve.client.client import Client
from vmserve.client.lending import KVPool
from vmserve.client.messages import Lend, MemoryReport, ToEngine
from vmserve.config import LEAST
from vmserve.errors import ConfigurationError
from vmserve.pool.shares import Order
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.models.memory import PoolShare
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.testing import ScriptedTransport

POOL, FLOOR = 1 << 20, 200 << 10
ADMIN = {"authorization": "Bearer admin"}


class Engine(ScriptedTransport):
    """A scripted engine whose memory a pool lends."""

    def __init__(self, text: str, chance: random.Random) -> None:
        super().__init__(text, kv_limit_bytes=FLOOR)
        self.facts.kv_cache_memory = LEAST
        self.chance = chance
        self.memory = Borrower(FLOOR, limit=FLOOR)

    @property
    def is_away(self) -> bool:
        return self.facts.is_dead or self.stopped

    def send(self, message: ToEngine) -> None:
        super().send(message)
        if isinstance(message, Lend):
            self.memory.orders.append(Order("", message.limit_bytes, message.reclaim))
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.003), self._obey)

    def _obey(self) -> None:
        if self.memory.orders:  # else it has died since
            self.memory.obey(is_late=self.chance.random() < 0.3)
            self.memory.run()
            self.tell(is_answer=True)

    def tell(self, *, is_answer: bool = False) -> None:
        self._receive(MemoryReport(self.memory.holding(), is_answer))

    def use(self) -> None:
        """What requests want changes, and a step sees it."""
        if not self.is_away:
            self.memory.wanted = self.chance.choice([0, FLOOR // 2, FLOOR, POOL // 2, POOL])
            self.memory.committed = min(self.memory.committed, max(self.memory.limit, 0))
            self.memory.step()
            self.tell()

    def lose(self) -> None:
        """Lose all memory, and all requests."""
        self.memory = Borrower(FLOOR, limit=FLOOR)
        super().lose()

    async def die(self) -> None:
        """Be killed and started again, unless it is put to sleep meanwhile."""
        self.lose()
        await asyncio.sleep(self.chance.uniform(0, 0.01))
        if self.stopped:
            self.facts.is_dead = False
        else:
            self.revive()

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(0.001)
        self.lose()
        self.facts.is_dead = False


class Chaos:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.pool = KVPool(POOL)
        self.counts: Counter[str] = Counter()
        self.engines: dict[str, Engine] = {}
        self.changes = Changes(self.chance, "x", most=6, pause=0.05)
        config = ServerConfig(
            served_model_names=("a",), admin_api_key="admin", shutdown_timeout=0.05
        )
        self.models = Models(
            [self.make(name, {}) for name in self.changes.names], self.make, self.pool
        )
        self.app = create_app(self.models, config)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://localhost"
        )
        self.over = False

    def make(self, name: str, table: Mapping[str, Any]) -> ServedModel:
        async def load() -> Client:
            await asyncio.sleep(self.chance.uniform(0, 0.01))
            if self.chance.random() < 0.1:
                raise ConfigurationError("it does not start")
            self.engines[name] = Engine(name, self.chance)
            return Client(self.engines[name])

        config = ServerConfig(served_model_names=(name,), idle_unload=0.05)
        weight = table.get("weight", 1.0)
        return ServedModel(config, None, load, PoolShare(self.pool, name, weight))

    async def run(self, num_changes: int) -> None:
        clients = [asyncio.ensure_future(self.ask()) for _ in range(8)]
        for _ in range(num_changes):
            what = self.chance.randrange(7)
            if what == 0:
                await self.kill()
            elif what == 1:
                for engine in self.awake():
                    engine.use()
            else:
                await self.post(*self.changes.next())
            await asyncio.sleep(self.chance.uniform(0, 0.005))
            self.check()
        self.over = True
        await asyncio.wait_for(asyncio.gather(*clients), 60)
        first, *others = self.changes.names
        for name in others:
            await self.post("remove", {"model": name})
        await self.post("sleep", {"model": first})
        assert self.pool.free_bytes == POOL
        assert not self.pool.state()
        self.app.state.context.close()
        await self.http.aclose()

    def check(self) -> None:
        """The pool's laws, as of the moment."""
        rows = {row.name: row for row in self.pool.state()}
        assert sum(row.granted_bytes for row in rows.values()) <= POOL
        for served in self.models:
            if served.state == "ready":
                assert rows[served.name].granted_bytes >= FLOOR, served.name
        # What has left is asleep, or is leaving.
        assert set(rows) <= {served.name for served in self.models}

    async def ask(self) -> None:
        while not self.over:
            name = self.chance.choice([*self.changes.names, "none"])
            reply = await self.http.post(
                "/v1/completions", json={"model": name, "prompt": "Hi", "request_timeout": 20}
            )
            body = reply.json()
            if reply.status_code == 200:
                choice = body["choices"][0]  # of an engine that was put to sleep: aborted
                assert choice["text"] == name or choice["finish_reason"] == "abort"
            else:
                assert body["error"]["message"]
            self.counts[str(reply.status_code)] += 1
            await asyncio.sleep(self.chance.uniform(0, 0.01))

    async def post(self, what: str, body: dict[str, Any]) -> None:
        reply = await self.http.post(f"/v1/models/{what}", json=body, headers=ADMIN)
        self.counts[f"{what} {reply.status_code}"] += 1
        may_fail = what in ("wake", "add")
        assert reply.status_code < 500 or may_fail, reply.text

    def awake(self) -> list[Engine]:
        """Engines of members, which serve."""
        served = {each.name for each in self.models if each.state == "ready"}
        return [each for name, each in self.engines.items() if name in served]

    async def kill(self) -> None:
        if engines := self.awake():
            await self.chance.choice(engines).die()
            self.counts["killed"] += 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_an_answer_and_all_memory_comes_back(seed: int) -> None:
    async def run() -> Chaos:
        chaos = Chaos(seed)
        await chaos.run(150)
        return chaos

    counts = asyncio.run(run()).counts
    assert counts["200"] > 0
    assert counts["404"] > 0
    assert counts["killed"] > 0
