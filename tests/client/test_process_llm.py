"""An engine in a process of its own: the same streams, its death, its hanging, its return."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clients import FleetClient, ProcessClient
from tests.support.loops import everything, until
from vmserve import (
    AsyncLLM,
    BeamSearchParams,
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from vmserve.client.client import Client
from vmserve.client.engines.local import load_engine, start_engines
from vmserve.client.messages import Ready
from vmserve.client.service import ready_message
from vmserve.client.transports.framing import frame
from vmserve.client.transports.process import EngineProcess, ProcessSource
from vmserve.client.transports.supervised import Supervision
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.hub import resolve_model
from vmserve.sampling import GenerationParams
from vmserve.text.prompts import Prompt
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

# Each engine is a process that imports torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(400)

OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory": "64MiB",
    "max_num_seqs": 16,
    "kv_regime": "virtual",
}
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@pytest.fixture(autouse=True)
def before() -> Iterator[set[psutil.Process]]:
    """The processes of tests before this one, whose own may not be left afterwards."""
    found = children()
    yield found
    assert children() <= found


@contextlib.asynccontextmanager
async def fresh(**how: Any) -> AsyncIterator[ProcessClient]:
    """A fresh engine."""
    engine = await asyncio.to_thread(ProcessClient, **OPTIONS, **how)
    try:
        yield engine
    finally:
        await engine.shutdown()


async def leaving_aborting_and_asking(engine: ProcessClient) -> None:
    stream = engine.generate([5] * 100, ENDLESS, request_id="x", stream=True)
    async for output in stream:
        if output.outputs:
            break
    assert (await engine.fetch_stats())["used_pages"] > 0
    assert engine.stats()["num_requests_running"] == 1
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.stats()["num_requests_running"] == 0)
    assert (await engine.fetch_stats())["used_pages"] == 0
    # An abort by name tells what there was.
    cut = engine.generate([5], ENDLESS, request_id="y", stream=True)
    async for output in cut:
        if output.outputs and not output.finished:
            await engine.abort("y")
        last = output
    assert last.outputs[0].finish_reason == "abort"
    pin = await engine.pin_prefix([5] * 64)
    assert pin.num_tokens == 64
    await engine.unpin_prefix(pin.handle)
    with pytest.raises(ValueError, match="no prefix is pinned"):
        await engine.unpin_prefix(pin.handle)
    running = engine.generate([5], ENDLESS, request_id="z")
    ended = asyncio.ensure_future(everything(running))
    await until(lambda: engine.stats()["num_requests_running"] == 1)
    await engine.shutdown()
    [output] = await ended
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.errored


ASKED: dict[str, GenerationParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1),
    "several": SamplingParams(n=3, seed=7, max_tokens=10),
    "best": SamplingParams(n=2, best_of=4, seed=3, max_tokens=8),
    "stop": SamplingParams(temperature=0, max_tokens=40, stop=["."], logprobs=0),
    "stop-shown": SamplingParams(
        temperature=0, max_tokens=40, stop=["."], include_stop_str_in_output=True
    ),
    "eos": SamplingParams(temperature=0, max_tokens=1000),
    "beams": BeamSearchParams(beam_width=3, max_tokens=8, logprobs=1),
    "ids": SamplingParams(temperature=0, max_tokens=5, detokenize=False),
    "scored": SamplingParams(max_tokens=0, prompt_logprobs=2),
    # It ends without an end token, and where the end token was needed.
    "choice": SamplingParams(
        structured_outputs=StructuredOutputsParams(choice=["zebra", "yes"]), logprobs=1, n=2, seed=5
    ),
    "open": SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[a-e]+"), seed=3, logit_bias={1: 99}
    ),
    "structured-beams": BeamSearchParams(
        beam_width=2, structured_outputs=StructuredOutputsParams(json_object=True)
    ),
}


async def answers(engine: Client) -> dict[str, object]:
    """Whole, and of streams the same put together."""
    prompt = "Once upon a time there was"
    ids = engine.tokenizer.encode(prompt)
    found: dict[str, object] = {}
    for name, params in ASKED.items():
        [whole] = await everything(engine.generate(Prompt(prompt, ids), params, request_id=name))
        assert whole.metrics.finished_time is not None
        found[name] = (whole.prompt, whole.outputs, whole.prompt_logprobs, whole.finished)
        if name in ("best", "beams", "structured-beams"):
            continue
        first, *parts = await everything(engine.generate(ids, params, request_id=name, stream=True))
        assert (first.outputs, first.finished, first.delta) == ([], False, True)
        # With the first tokens: a stream that echoes its prompt begins with them.
        assert parts[0].prompt_logprobs == whole.prompt_logprobs
        for output in whole.outputs:
            mine = [c for part in parts for c in part.outputs if c.index == output.index]
            assert "".join(c.text for c in mine) == output.text
            assert [i for c in mine for i in c.token_ids] == output.token_ids
            assert mine[-1].finish_reason == output.finish_reason
            assert mine[-1].stop_reason == output.stop_reason
        assert parts[-1].metrics.finished_time is not None
    return found


async def test_a_life() -> None:
    """Requests of every kind, whole and streamed, give what they give in one process."""
    async with fresh() as engine:
        found = await answers(engine)
        with pytest.raises(InvalidRequestError, match="maximum context length is") as refused:
            await everything(engine.generate([5] * 100_000, ENDLESS, request_id="long"))
        assert refused.value.param == "prompt"
        broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        for stream in (False, True):
            with pytest.raises(InvalidRequestError, match="unclosed group"):
                # Before any word of its acceptance.
                await anext(engine.generate([5], broken, request_id="broken", stream=stream))
        stats = await engine.fetch_stats()
        assert stats["used_pages"] == 0
        assert stats["requests_aborted_total"] == 2  # those with the broken regex
        # It sleeps when there is nothing to do.
        process = psutil.Process(engine.pid)
        before = sum(process.cpu_times()[:2])
        await asyncio.sleep(2)
        assert sum(process.cpu_times()[:2]) - before <= 0.05
        await leaving_aborting_and_asking(engine)
    async with AsyncLLM(**OPTIONS) as here:
        assert found == await answers(here)


async def test_an_engine_that_hangs() -> None:
    async with fresh(supervision=Supervision(hang_timeout=5.0, ping_seconds=0.2)) as engine:
        streams = [engine.generate([5], ENDLESS, request_id=f"{i}", stream=True) for i in range(4)]
        for stream in streams:
            await anext(stream)
        question = asyncio.ensure_future(engine.until_dead())
        os.kill(engine.pid, signal.SIGSTOP)
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await everything(stream)
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await everything(engine.generate([5], ENDLESS, request_id="new"))
        await question
        assert engine.stats()["num_requests_running"] == 0
        assert await engine.fetch_stats() == engine.stats()


async def test_one_of_two_engines_that_is_stopped_keeps_no_request() -> None:
    """What has not begun is answered by the other; the stopped one is back when it goes on."""
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    watched = Supervision(ping_seconds=0.5)
    async with fresh(supervision=watched) as one, fresh(supervision=watched) as other:
        fleet = FleetClient([one.transport, other.transport], "round-robin")

        async def answer(number: int, stream: bool) -> list[int]:
            outputs = fleet.generate([5 + number] * 20, few, stream=stream)
            told = [choice.token_ids async for each in outputs for choice in each.outputs]
            return [token_id for each in told for token_id in each]

        async def answers() -> list[list[int]]:
            return await asyncio.gather(*(answer(n, n % 2 == 0) for n in range(8)))

        try:
            expected = await answers()
            os.kill(one.pid, signal.SIGSTOP)
            assert await answers() == expected
            assert fleet.members[0].state == "suspect"
            assert fleet.stats()["router_failovers_total"] > 0
            assert len((await fleet.snapshot()).requests) == 0
            os.kill(one.pid, signal.SIGCONT)
            await until(lambda: fleet.members[0].state == "ready")
            fleet.transport.drain("1")
            assert await answers() == expected
            assert not one.errored
        finally:
            os.kill(one.pid, signal.SIGCONT)
            await fleet.shutdown()


async def test_an_engine_that_is_started_again() -> None:
    """Prefixes are pinned again, and a limit of memory that was changed holds."""
    async with fresh(supervision=Supervision(restarts=1)) as engine:
        pin = await engine.pin_prefix([5] * 64)
        pid, limit = engine.pid, await engine.set_kv_cache_memory("40MiB")
        assert limit == 40 << 20
        stream = engine.generate([5], ENDLESS, request_id="x", stream=True)
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await everything(stream)
        assert engine.errored
        await until(lambda: not engine.errored, 200)
        assert engine.pid != pid
        short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        [output] = await everything(engine.generate([5], short, request_id="x"))
        assert len(output.outputs[0].token_ids) == 3
        stats: dict[str, float | int] = {}
        while stats.get("pinned_prefixes") != 1:
            stats = await engine.fetch_stats()
        assert stats["engine_restarts_total"] == 1
        assert stats["limit_pages"] * stats["page_bytes"] == limit
        assert await engine.set_kv_cache_memory("64MiB") == 64 << 20
        await engine.unpin_prefix(pin.handle)
        # What is no message ends it too. The pause before the last restart is not said again.
        said: list[float | None] = []
        source: Any = engine.transport.source
        source.has_ended = lambda channel: said.append(engine.retry_seconds)
        stream: Any = engine.transport._link
        stream._stream.write(frame(b"\xc1"))
        await engine.until_dead()
        assert engine.errored
        await until(lambda: said == [None])


async def test_an_engine_that_is_woken_before_it_is_started_again_is_started_once(
    before: set[psutil.Process],
) -> None:
    async with fresh(supervision=Supervision(restarts=9)) as engine:
        await engine.start()
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.retry_seconds is not None)
        for _ in range(3):
            await engine.refresh()
        assert engine.transport._asked == {}  # nobody answers
        await engine.wake()
        assert {each.pid for each in children() - before} == {engine.pid}
        assert not engine.errored
        # Nothing is left that would start another.
        assert len(engine.transport._tasks) == 1


async def test_sleep_and_wake(tmp_path: Path) -> None:
    """The same tokens and pins after a sleep; what has become of the files is noticed."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model(None), model)
    (model / "link").symlink_to("nowhere")
    prefix = list(range(10, 74))
    once = SamplingParams(temperature=0, max_tokens=8)
    async with fresh(model=str(model)) as engine:

        async def text() -> str:
            [output] = await everything(engine.generate("Once upon a time", once))
            return output.outputs[0].text

        await engine.pin_prefix(prefix)
        given_up = await engine.pin_prefix(prefix[:16])
        expected, first = await text(), engine.pid
        await engine.sleep()
        assert not psutil.pid_exists(first)
        assert not engine.errored
        with pytest.raises(EngineDeadError):
            await text()
        await engine.unpin_prefix(given_up.handle)
        (model / "model.safetensors").touch()
        await engine.wake()
        assert (await text(), engine.pid != first) == (expected, True)
        assert (await engine.fetch_stats())["pinned_prefixes"] == 1

        await engine.sleep()
        config = json.loads((model / "config.json").read_text())
        words = (model / "tokenizer.json").read_text().replace("<|im_start|>", "<|begin|>")
        for name, content, why in (
            ("model.safetensors", None, "safetensors"),
            ("tokenizer.json", words, "another tokenizer"),
            (
                "config.json",
                json.dumps({**config, "max_position_embeddings": 256}),
                "another shape",
            ),
        ):
            file = model / name
            kept = file.rename(tmp_path / "kept")
            if content is not None:
                file.write_text(content)
            with pytest.raises(ConfigurationError, match=why):
                await engine.wake()
            kept.replace(file)


class ReadyProcess:
    """An engine's process that has loaded already."""

    pid = 0

    def __init__(self, ready: Ready) -> None:
        self._ready = ready

    def wait_ready(self, progress: object) -> Ready:
        return self._ready

    def close(self) -> None:
        pass


def test_engines_of_one_model_have_one_tokenizer_that_is_loaded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LLMEngine(EngineConfig.from_options(OPTIONS))
    ready = ready_message(engine)
    engine.close()
    loaded = []

    def load(source: str | Path) -> Tokenizer:
        loaded.append(load_tokenizer(source))
        return loaded[-1]

    monkeypatch.setattr("vmserve.client.transports.process.load_tokenizer", load)
    monkeypatch.setattr("vmserve.client.engines.local.split_cpus", lambda size: [(0,)] * size)
    monkeypatch.setattr(ProcessSource, "open", lambda *_: ReadyProcess(ready))
    fleet = start_engines(16, **OPTIONS, device="cpu")
    assert len(fleet.members) == 16
    assert loaded == [fleet.facts.tokenizer]
    assert all(member.facts.tokenizer is fleet.facts.tokenizer for member in fleet.members)


def test_a_process_that_is_killed_before_it_reads_is_a_dead_engine() -> None:
    process = EngineProcess({}, 20, "text")
    process.kill()
    with pytest.raises(EngineDeadError, match="killed by signal 9"):
        process.wait_ready(lambda *_: None)
    process.close()


async def test_loading_that_is_given_up(before: set[psutil.Process]) -> None:
    """The event loop goes on meanwhile, and no process is left."""
    loading = asyncio.create_task(load_engine(**OPTIONS))
    while children() <= before:
        await asyncio.sleep(0.01)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading


def test_options_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="max_model_len: 10000000"):
        ProcessClient(max_model_len=10_000_000)
    with pytest.raises(ConfigurationError, match="engine_hang_timeout"):
        Supervision(hang_timeout=0)


def test_it_ends_with_its_server(tmp_path: Path) -> None:
    """However that ends: here it is killed, with its engine stopped."""
    script = (
        "import sys, time\n"
        "from vmserve.client.engines.local import start_engine\n"
        "engine = start_engine(kv_cache_memory='64MiB', max_model_len=1024)\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout as said:
        engine = psutil.Process(int(said.readline()))
    engine.suspend()
    server.kill()
    server.wait(60)
    engine.wait(60)
