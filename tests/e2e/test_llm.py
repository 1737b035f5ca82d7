"""The offline API's contract."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engines import greedy
from vmserve import (
    LLM,
    BeamSearchParams,
    ConfigurationError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from vmserve.sampling.torch_sampler import TorchSampler

GREEDY = greedy(5)


def test_every_form_of_prompt_gives_the_same(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.encode(text)
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    results = llm.generate(forms, GREEDY)
    assert [r.prompt_token_ids for r in results] == [ids] * 4
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    assert [r.prompt for r in results] == [text, None, text, None]
    for form in forms:
        [alone] = llm.generate(form, GREEDY)
        assert alone.outputs[0].token_ids == results[0].outputs[0].token_ids


def test_defaults_are_16_tokens_and_metrics_are_set(llm: LLM) -> None:
    [result] = llm.generate("Once upon a time", SamplingParams(ignore_eos=True))
    assert isinstance(result, RequestOutput)
    assert result.finished
    [choice] = result.outputs
    assert len(choice.token_ids) == 16
    assert choice.finish_reason == "length"
    metrics = result.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_the_core_samples_every_row_on_a_cpu(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy or drawn, with penalties, bans, grammars and log-probabilities."""

    def refuse(*args: object) -> object:
        raise AssertionError("sampled by torch")

    monkeypatch.setattr(TorchSampler, "sample", refuse)
    sampler = llm.engine.sampler
    before = sampler.num_core_rows
    every: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.9, "logprobs": 5},
        {"top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"min_p": 0.1, "logit_bias": {5: 1.0}, "bad_words": ["the"]},
        {"structured_outputs": {"regex": "[a-z]{40}"}},
    ]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **each) for each in every]
    results = llm.generate(["Once upon a time"] * len(every), params)
    assert [len(result.outputs[0].token_ids) for result in results] == [6] * len(every)
    assert sampler.num_core_rows - before == 6 * len(every)


def test_one_bad_prompt_refuses_the_call_and_leaves_nothing_queued(llm: LLM) -> None:
    cases = [
        (["fine", ""], "The decoder prompt cannot be empty"),
        ([[1, 2], [1, 10**6]], "out of vocabulary"),
        ([[1, 2], [1, -1]], "out of vocabulary"),
        (["fine", [1] * 8192], "maximum context length is 8192"),
    ]
    for prompts, text in cases:
        with pytest.raises(InvalidRequestError, match=text) as caught:
            llm.generate(prompts, GREEDY)
        assert isinstance(caught.value, ValueError)
        stats = llm.stats()
        assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (0, 0)


def test_params_and_priority_are_one_or_one_each(llm: LLM) -> None:
    prompts = ["a", "b"]
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    results = llm.generate(prompts, [GREEDY, short], priority=[1, 2])
    assert [len(r.outputs[0].token_ids) for r in results] == [5, 1]
    with pytest.raises(ValueError, match="sampling_params: 1 given for 2 prompts"):
        llm.generate(prompts, [GREEDY])
    with pytest.raises(ValueError, match="priority: 3 given for 2 prompts"):
        llm.generate(prompts, GREEDY, priority=[1, 2, 3])
    with pytest.raises(ValueError, match="priority: 0 given for 2 prompts"):
        llm.generate(prompts, GREEDY, priority=[])


def test_max_tokens_is_capped_by_the_context() -> None:
    with LLM(max_model_len=64, kv_cache_memory="16MiB") as llm:
        # Above the context itself, as vLLM; the server refuses it.
        for most in (50, None, 1000):
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            [result] = llm.generate([[5] * 60], params)
            assert len(result.outputs[0].token_ids) == 4
            assert result.outputs[0].finish_reason == "length"
        [beams] = llm.generate([[5] * 60], BeamSearchParams(beam_width=2, max_tokens=1000))
        assert [len(choice.token_ids) for choice in beams.outputs] == [4, 4]


def test_stop_string_cuts_the_text_and_is_the_stop_reason(llm: LLM) -> None:
    [whole] = llm.generate("Once upon a time", greedy(40))
    text = whole.outputs[0].text
    stop = text[10:14]
    [result] = llm.generate("Once upon a time", greedy(40, stop=stop))
    assert result.outputs[0].text == text[: text.index(stop)]
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].stop_reason == stop


def test_stop_token_is_in_the_ids_but_not_in_the_text(llm: LLM) -> None:
    [whole] = llm.generate("Once upon a time", GREEDY)
    ids = whole.outputs[0].token_ids
    [result] = llm.generate("Once upon a time", greedy(5, stop_token_ids=[ids[2]]))
    end = ids.index(ids[2]) + 1
    assert result.outputs[0].token_ids == ids[:end]
    assert result.outputs[0].text == llm.decode(ids[: end - 1])
    assert result.outputs[0].stop_reason == ids[2]


def test_logprobs_sum_to_the_cumulative_one_and_rank_greedy_first(llm: LLM) -> None:
    params = greedy(6, logprobs=3, prompt_logprobs=2)
    [result] = llm.generate("Once upon a time there was a fox", params)
    [choice] = result.outputs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 6
    total = 0.0
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(position)) == token
        assert len(position) == 3
        assert position[token].rank == 1
        total += position[token].logprob
    assert choice.cumulative_logprob == pytest.approx(total, abs=1e-4)
    scores = result.prompt_logprobs
    assert scores is not None
    assert len(scores) == len(result.prompt_token_ids)
    assert scores[0] is None
    for token, entry in zip(result.prompt_token_ids[1:], scores[1:], strict=True):
        assert entry is not None
        assert token in entry
        assert len(entry) in (2, 3)


def test_best_of_keeps_the_likeliest(llm: LLM) -> None:
    base = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 3}
    [every] = llm.generate("One day", SamplingParams(n=4, **base))
    [best] = llm.generate("One day", SamplingParams(n=2, best_of=4, **base))
    expected = sorted((c.cumulative_logprob for c in every.outputs), reverse=True)[:2]
    assert [c.cumulative_logprob for c in best.outputs] == pytest.approx(expected)
    assert [c.index for c in best.outputs] == [0, 1]


def test_chat_ends_by_itself(llm: LLM) -> None:
    [result] = llm.chat(
        [{"role": "user", "content": "What color is the sky?"}],
        SamplingParams(temperature=0, max_tokens=200),
    )
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].text.strip()
    tokenizer = llm.get_tokenizer()
    assert result.prompt_token_ids.count(tokenizer.bos_token_id) == 1


def test_unknown_and_unusable_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="unknown engine option no_such"):
        LLM(no_such=1)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ConfigurationError, match=r"device: cuda cannot be used: .* --device cpu"):
        LLM(device="cuda")


def test_beam_searches_that_are_refused(llm: LLM) -> None:
    most = llm.engine.resolved.max_num_seqs
    with pytest.raises(InvalidRequestError, match=f"at most {most} here, got {most + 1}"):
        llm.beam_search("x", BeamSearchParams(beam_width=most + 1))
    assert not llm.engine.has_unfinished
    params: Any = SamplingParams()
    with pytest.raises(InvalidRequestError, match="takes BeamSearchParams, not SamplingParams"):
        llm.beam_search("x", params)


def test_close_is_idempotent_and_final() -> None:
    llm = LLM(kv_cache_memory="64MiB")
    llm.close()
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.generate("x", GREEDY)


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        (None, "a prompt or a list of prompts, not NoneType"),
        (3, "not int"),
        (b"hi", "not bytes"),
        ([b"hi"], "not bytes"),
        ({"prompt": None}, "is a string, not NoneType"),
        ([None], "not NoneType"),
        ([1, "x", 2], "not int"),
        (torch.tensor([5, 6]), r"\.tolist\(\)"),
    ],
)
def test_what_is_no_prompt(llm: LLM, prompts: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        llm.generate(prompts)


@pytest.mark.parametrize("messages", [None, "hello", {"role": "user", "content": "x"}, [3], [[]]])
def test_what_are_no_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat(messages)


def test_threads_take_turns(llm: LLM) -> None:
    def answer(number: int) -> list[int]:
        [result] = llm.generate([[5, 6, 7 + number]], replace(GREEDY, max_tokens=40))
        return result.outputs[0].token_ids

    one_by_one = [answer(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, range(4), timeout=60)) == one_by_one
