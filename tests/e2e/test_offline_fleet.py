"""``LLM(data_parallel_size=2)``: what it answers, in which order, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from tests.helpers import until
from vmserve import (
    LLM,
    BeamSearchParams,
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    KVPool,
    SamplingParams,
)
from vmserve.client.inbox import OpenRequest
from vmserve.types import RequestOutput

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores"
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "kv_cache_memory": "32MiB", "max_model_len": 512, "max_num_seqs": 2
}  # fmt: skip
PROMPTS = [[5 + index % 7] * (20 + 5 * index) for index in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM(**OPTIONS, data_parallel_size=2) as llm:
        yield llm


def engines(llm: LLM) -> list[Any]:
    fleet: Any = llm._client.transport
    members: list[Any] = fleet.members
    return members


def test_answers_and_their_order_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    seeded = SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=6, logprobs=2)
    each_params = [GREEDY, seeded] * (len(PROMPTS) // 2)
    priorities = list(range(len(PROMPTS)))[::-1]
    told = [llm.generate(PROMPTS, each_params, priority=priorities) for llm in (one, two)]
    tokens = [[[c.token_ids for c in each.outputs] for each in outputs] for outputs in told]
    assert tokens[0] == tokens[1]
    assert [each.prompt_token_ids for each in told[1]] == PROMPTS
    choices = two.stats()
    assert choices["router_choices_total"] == len(PROMPTS)
    members = engines(two)
    assert all(each.facts.latest()["prompt_tokens_total"] for each in members)  # both had work
    talk = [{"role": "user", "content": "hello"}]
    answered = [llm.chat([talk, talk], GREEDY)[1].outputs[0].text for llm in (one, two)]
    assert answered[0] == answered[1]


def test_beams_and_embeddings_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=5)
    beams = [
        [[c.token_ids for c in each.outputs] for each in llm.beam_search(PROMPTS[:4], params)]
        for llm in (one, two)
    ]
    assert beams[0] == beams[1]
    vectors = [[each.embedding for each in llm.embed(PROMPTS[:4])] for llm in (one, two)]
    np.testing.assert_array_equal(*vectors)


def test_nothing_is_computed_where_one_prompt_cannot_be_served(two: LLM) -> None:
    before = two.stats()["prompt_tokens_total"]
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        two.generate([PROMPTS[0], [5] * 600], GREEDY)
    assert two.stats()["prompt_tokens_total"] == before


def test_an_engine_that_is_killed_loses_nothing(
    one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in one.generate(PROMPTS, params)]
    killed: list[int] = []
    first, num_ended = engines(two)[0], 0
    complete = two._client.complete

    async def complete_and_kill(request: OpenRequest) -> RequestOutput:
        """Kill the first engine when some have ended."""
        nonlocal num_ended
        output = await complete(request)
        num_ended += 1
        if num_ended == 4:
            killed.append(first.transport.pid)
            psutil.Process(killed[0]).kill()
        return output

    monkeypatch.setattr(two._client, "complete", complete_and_kill)
    outputs = two.generate(PROMPTS, params)
    assert killed
    assert [each.outputs[0].token_ids for each in outputs] == expected
    # The tests that come next ask each engine.
    until(lambda: first.transport.pid != killed[0] and not first.facts.is_dead)


def test_what_it_refuses_and_its_end() -> None:
    for options, why in (
        ({"data_parallel_size": 0}, "data_parallel_size: 0"),
        ({"data_parallel_size": 1024}, "1024 engines need 1024 cores"),
        ({"data_parallel_size": 2, "router": "random"}, "router: 'random'"),
        ({"data_parallel_size": 2, "nonsense": 1}, "nonsense"),
        ({"data_parallel_size": 2, "model": "/no/model"}, "/no/model"),
        ({"data_parallel_size": 2, "kv_pool": KVPool("64MiB")}, "kv_pool"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            LLM(**{**({} if "kv_pool" in options else OPTIONS), **options})
    llm = LLM(**OPTIONS, data_parallel_size=2)
    pids = [each.transport.pid for each in engines(llm)]
    with pytest.raises(ConfigurationError, match="other processes"):
        _ = llm.engine
    llm.close()
    llm.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
