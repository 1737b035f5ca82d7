"""The public fakes."""

from __future__ import annotations

import asyncio

import httpx

from vmserve import SamplingParams
from vmserve.client.client import Client
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.testing import NullRuntime, ScriptedTransport


def test_an_engine_without_a_forward_pass_says_the_token_that_was_chosen() -> None:
    runtime = NullRuntime(token_id=7)
    config = EngineConfig(device="cpu", kv_cache_memory="16MiB", max_model_len=256)
    engine = LLMEngine(config, runtime=runtime)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2)
    for index in range(2):
        engine.add_request(str(index), [5, 6 + index], params)
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step().outputs:
            tokens[output.request_id] = [choice.token_ids for choice in output.outputs]
    assert tokens == {"0": [[7, 7, 7]] * 2, "1": [[7, 7, 7]] * 2}
    assert runtime.num_tokens == 4
    engine.memory.check()
    engine.close()


def test_a_scripted_engine_answers_behind_the_server() -> None:
    engine = ScriptedTransport("yes")
    app = create_app(Client(engine), ServerConfig(served_model_names=("m",)))

    async def complete() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/completions", json={"prompt": "Hi", "n": 2})

    choices = asyncio.run(complete()).json()["choices"]
    assert [choice["text"] for choice in choices] == ["yes", "yes1"]
    assert [prompt for prompt, _, _ in engine.requests] == [engine.facts.tokenizer.encode("Hi")]
    assert engine.finished
    assert not engine.running
