"""The application of a deployment as Ray Serve begins and ends it, without Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from vmserve.ray import serve
from vmserve.ray.serve import ServedEngine
from vmserve.server.config import ServerConfig
from vmserve.testing import ScriptedTransport


class SlowToEnd(ScriptedTransport):
    """Its end takes some turns of the event loop."""

    async def close(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await super().close()


def test_the_engine_has_ended_when_the_lifespan_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve ends the event loop as soon as it hears that the application has ended."""
    engine = SlowToEnd()

    async def load(model: str | None, **options: Any) -> ScriptedTransport:
        return engine

    monkeypatch.setattr(serve, "load_engine", load)
    failed: list[dict[str, Any]] = []

    async def live() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        served = ServedEngine(None, ServerConfig(served_model_names=("m",)), {})
        lifespan = LifespanOn(Config(served, lifespan="on"))
        await lifespan.startup()
        assert not lifespan.should_exit
        served.check_health()
        await lifespan.shutdown()
        assert engine.stopped

    asyncio.run(live())
    assert not failed
