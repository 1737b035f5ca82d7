"""The engine for many callers at once: one thread steps it, callers use asyncio."""

from __future__ import annotations

import os
from typing import Any

from vmserve.client.client import Client
from vmserve.client.transports.thread import ThreadTransport
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.loader import Progress

__all__ = ["AsyncLLM"]


class AsyncLLM(Client):
    """Streams from one engine to any number of tasks on any number of event loops.

    Arguments and errors are those of :class:`vmserve.LLM`. Loading blocks.

        async with AsyncLLM(kv_cache_memory="256MiB") as llm:
            async for output in llm.generate("Once upon a time", stream=True):
                for choice in output.outputs:
                    print(choice.text, end="")
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **engine_options: Any,
    ) -> None:
        self.config = EngineConfig.from_options({"model": model, **engine_options})
        super().__init__(ThreadTransport(LLMEngine(self.config, progress=progress)))
