"""Both regimes, in one batch and in turn: beams as ``transformers`` has them, and what ``auto``
chooses. Counters prove that forks, copies, hits and conversions happened.

Every family in either regime and between both: ``test_rows.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from vmserve import LLM, BeamSearchParams, SamplingParams

import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip

from tests.lives.pairs import covering_rows
from tests.profiles import write_profile
from tests.support.engines import drain, greedy, measure_nothing, seen, tokens_of
from tests.support.paths import together
from vmserve.errors import InvalidRequestError
from vmserve.memory.base import Regime

Prompts = Callable[[int, int, int], list[list[int]]]
Reference = Callable[[list[int], int], list[int]]
#: ``beam_reference(prompt, num_tokens, width, length_penalty)``: token ids, best first.
BeamReference = Callable[[list[int], int, int, float], list[list[int]]]
REGIMES = ["virtual", "paged"]
#: Bytes of a page of one and of eight blocks of 16 tokens (a layer's K and V in float32).
PAGE_BYTES = {1: 16 << 10, 8: 128 << 10}


@pytest.fixture(scope="module")
def beam_reference(model_dir: Path) -> BeamReference:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @cache
    @torch.inference_mode()
    def found(
        prompt: tuple[int, ...], num_tokens: int, width: int, length_penalty: float
    ) -> list[list[int]]:
        rows = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=num_tokens,
            length_penalty=length_penalty,
        )
        ends = model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        return [_cut(row[len(prompt) :].tolist(), ends) for row in rows]

    return lambda prompt, *others: found(tuple(prompt), *others)


def _cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to the end token; behind it there is padding."""
    for length, token in enumerate(tokens, start=1):
        if token in ends:
            return tokens[:length]
    return tokens


AXES = {"regime": REGIMES, "width": [2, 4, 8], "length_penalty": [1.0, 0.0, 2.0]}


@pytest.mark.parametrize("row", covering_rows(AXES, lambda row: True, 0), ids=str)
def test_beams(row: dict[str, Any], prompts: Prompts, beam_reference: BeamReference) -> None:
    regime, width, length_penalty = row.values()
    batch = prompts(3, 60, 13)
    params = BeamSearchParams(beam_width=width, max_tokens=24, length_penalty=length_penalty)
    with LLM(
        dtype="float32",
        kv_regime=regime,
        kv_page_size=PAGE_BYTES[8],
        kv_cache_memory="128MiB",
        max_model_len=256,
    ) as llm:
        cold = llm.beam_search(batch, params)
        between = llm.stats()
        warm = llm.beam_search(batch, params)
        stats = llm.stats()
        llm.engine.memory.check()
    assert between["forks_total"] >= 3 * (width - 1)
    assert between["copied_blocks_total"] > 0
    assert (between["cow_blocks_total"] > 0) == (regime == "paged")
    assert stats["prefix_hit_blocks_total"] > between["prefix_hit_blocks_total"]
    assert stats["num_seqs"] == stats["used_pages"] == 0
    expected = [beam_reference(prompt, 24, width, length_penalty) for prompt in batch]
    assert tokens_of(cold) == tokens_of(warm) == expected
    assert all([each.index for each in one.outputs] == [*range(width)] for one in cold)


@pytest.mark.parametrize("blocks_per_page", [1, 8])
def test_beams_and_choices_change_their_regime_too(
    blocks_per_page: int, prompts: Prompts, beam_reference: BeamReference
) -> None:
    batch = prompts(4, 60, 21)
    drawn = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=20, ignore_eos=True)
    with LLM(
        dtype="float32",
        kv_page_size=PAGE_BYTES[blocks_per_page],
        kv_cache_memory="64MiB",
        max_model_len=256,
    ) as llm:
        expected = llm.generate(batch[2:], drawn)
        before = llm.stats()
        for index, prompt in enumerate(batch):
            params = [BeamSearchParams(beam_width=4, max_tokens=20), drawn][index // 2]
            llm.engine.add_request(str(index), prompt, params)

        def change(step: int) -> None:
            for index in range(len(batch)):
                to = Regime.VIRTUAL if (step + index) % 6 < 3 else Regime.PAGED
                llm.engine.convert(str(index), to)

        done = drain(llm.engine, change)
        stats = llm.stats()
    for to in ("virtual", "paged"):
        assert stats[f"converted_to_{to}_total"] - before[f"converted_to_{to}_total"] > 10
    searched = [beam_reference(prompt, 20, 4, 1.0) for prompt in batch[:2]]
    found = tokens_of([done[str(index)] for index in range(4)])
    assert found == [*searched, *tokens_of(expected)]


def test_every_method_in_one_batch(
    prompts: Prompts, reference: Reference, beam_reference: BeamReference, tmp_path: Path
) -> None:
    """Greedy, parallel sampling and beams together; ``auto`` keeps what forks paged."""
    batch = prompts(9, 120, 14)
    # Forks at 40 tokens and more copy more of a page than of a block.
    batch[3:6] = [prompts(1, 40 + index, 20 + index)[0] for index in range(3)]
    drawn = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    with LLM(
        dtype="float32",
        kv_cache_memory="32MiB",
        max_num_batched_tokens=64,
        regime_profile=write_profile(tmp_path),
    ) as llm:
        alone = [llm.generate([prompt], drawn)[0] for prompt in batch[3:6]]
        llm.engine.memory.clear_cache()
        for index, prompt in enumerate(batch):
            params = [greedy(20), drawn, BeamSearchParams(beam_width=3, max_tokens=20)][index // 3]
            llm.engine.add_request(str(index), prompt, params)
        num_mixed = 0

        def look(_: int) -> None:
            nonlocal num_mixed
            stats = llm.stats()
            num_mixed += stats["virtual_seqs"] > 0 and stats["paged_seqs"] > 0

        done = drain(llm.engine, look)
    assert num_mixed > 5
    for index, prompt in enumerate(batch):
        output = done[str(index)]
        if index < 3:
            assert output.outputs[0].token_ids == reference(prompt, 20)
            assert (output.metrics.kv_regime, output.metrics.kv_regime_reason) == (
                "virtual",
                "kernels",
            )
            continue
        assert (output.metrics.kv_regime, output.metrics.kv_regime_reason) == ("paged", "forks")
        tokens = [choice.token_ids for choice in output.outputs]
        if index < 6:
            assert tokens == [choice.token_ids for choice in alone[index - 3].outputs]
            assert len({tuple(choice) for choice in tokens}) == 3
        else:
            assert tokens == beam_reference(prompt, 20, 3, 1.0)


def test_whoever_shares_a_prefix_takes_the_batch_along(
    prompts: Prompts, reference: Reference, tmp_path: Path
) -> None:
    """Three run in slots; a newcomer would have to copy what it shares of a page there."""
    batch = [prompts(1, 70 + index, 30 + index)[0] for index in range(3)]
    newcomer = [*batch[0][:56], *batch[1][:20]]
    with LLM(
        dtype="float32", kv_cache_memory="32MiB", regime_profile=write_profile(tmp_path, call=1e-3)
    ) as llm:
        for index, prompt in enumerate(batch):
            llm.engine.add_request(str(index), prompt, greedy(40))
        regimes = []

        def look(step: int) -> None:
            if step == 10:
                llm.engine.add_request("3", newcomer, greedy(40))
            stats = llm.stats()
            regimes.append((stats["virtual_seqs"], stats["paged_seqs"]))

        done = drain(llm.engine, look)
        stats = llm.stats()
    assert regimes[5] == (3, 0)
    assert regimes[12:14] == [(0, 4), (0, 4)]
    assert stats["converted_to_paged_total"] == 3
    assert stats["converted_zero_copy_total"] == 3
    for index, prompt in enumerate([*batch, newcomer]):
        output = done[str(index)]
        assert output.outputs[0].token_ids == reference(prompt, 40)
        reason = "batch" if index < 3 else "prefix"
        assert (output.metrics.kv_regime, output.metrics.kv_regime_reason) == ("paged", reason)
    assert done["3"].metrics.num_cached_tokens == 48


@pytest.mark.parametrize("regime", REGIMES)
def test_forks_and_beams_are_swapped_as_far_as_there_is_room(
    regime: str, prompts: Prompts, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted groups come back from host memory, or compute again: one the prompt, the others
    as forks of it. Swapping alone, and computing again: ``test_rows.py``."""
    measure_nothing(monkeypatch)
    batch = prompts(6, 90, 16)
    drawn = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
    beams = BeamSearchParams(beam_width=4, max_tokens=60, ignore_eos=True)
    asked = list(zip(batch, [drawn, drawn, drawn, beams, beams, greedy(100)], strict=True))
    options: dict[str, Any] = {
        "dtype": "float32",
        "kv_regime": regime,
        "kv_page_size": PAGE_BYTES[1],
        "max_model_len": 256,
        "enable_prefix_caching": False,
    }
    with LLM(kv_cache_memory="64MiB", **options) as llm:
        expected = tokens_of(together(llm, asked))
        assert llm.stats()["num_preemptions_total"] == 0
    with LLM(kv_cache_memory="4MiB", swap_space="512KiB", **options) as llm:
        found = together(llm, asked)
        stats = llm.stats()
    assert tokens_of(found) == expected
    assert expected[5] == [reference(batch[5], 100)]
    each = [output.metrics.num_preemptions for output in found]
    assert sum(each) == stats["num_preemptions_total"] > 0
    assert max(each) < 50
    assert 0 < stats["swapped_in_blocks_total"] <= stats["swapped_out_blocks_total"]
    assert stats["swap_blocks"] == stats["num_seqs"] == stats["used_pages"] == 0


@pytest.mark.parametrize("regime", REGIMES)
def test_beams_that_outgrow_the_pool_alone_fail_with_the_numbers(regime: str) -> None:
    with LLM(
        dtype="float32", kv_regime=regime, kv_page_size="16KiB", kv_cache_memory="1.5MiB",
        max_model_len=128, max_num_seqs=16,
    ) as llm:  # fmt: skip
        llm.engine.add_request(
            "a", [1, *range(5, 60)], BeamSearchParams(beam_width=16, max_tokens=70, ignore_eos=True)
        )
        failures = []
        while llm.engine.has_unfinished:
            failures += llm.engine.step().failures
        assert [failure.request_id for failure in failures] == ["a"]
        assert "lower the beam width" in str(failures[0].error)
        stats = llm.stats()
        assert stats["num_seqs"] == stats["used_pages"] == 0
        assert llm.generate([[1, 5, 6]], greedy(4))[0].finished


def test_a_beam_search_that_is_aborted_tells_what_it_has(llm: LLM, prompts: Prompts) -> None:
    [prompt] = prompts(1, 40, 17)
    llm.engine.add_request("a", prompt, BeamSearchParams(beam_width=4, max_tokens=50))
    for _ in range(6):
        llm.engine.step()
    output = llm.engine.abort("a")
    assert output is not None
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 4
    assert all(len(choice.token_ids) == 6 for choice in output.outputs)
    assert llm.stats()["num_seqs"] == 0


def test_beams_tell_their_log_probabilities(llm: LLM, prompts: Prompts) -> None:
    [prompt] = prompts(1, 40, 18)
    params = BeamSearchParams(beam_width=3, max_tokens=8, logprobs=5)
    [result] = llm.beam_search([prompt], params)
    scores = [o.cumulative_logprob / len(o.token_ids) for o in result.outputs]
    assert scores == sorted(scores, reverse=True)
    for output in result.outputs:
        assert output.logprobs is not None
        assert [next(iter(position)) for position in output.logprobs] == output.token_ids
        own = [next(iter(position.values())).logprob for position in output.logprobs]
        assert output.cumulative_logprob == pytest.approx(sum(own))
        assert all(5 <= len(position) <= 6 for position in output.logprobs)


def test_a_pinned_prefix_survives_whatever_comes(prompts: Prompts, reference: Reference) -> None:
    head, *others = prompts(12, 200, 19)
    with LLM(dtype="float32", max_model_len=256, kv_cache_memory="3MiB") as llm:
        pin = llm.pin_prefix(head)
        assert pin.num_tokens == 200 // 16 * 16
        for prompt in others:  # fill the pool many times over
            llm.generate([prompt], greedy(40))
        assert llm.stats()["evicted_blocks_total"] > 0
        [result] = llm.generate([[*head, 7, 8]], greedy(10))
        assert result.metrics.num_cached_tokens == pin.num_tokens
        assert result.outputs[0].token_ids == reference([*head, 7, 8], 10)
        llm.unpin_prefix(pin.handle)
        with pytest.raises(ValueError, match=f"handle {pin.handle}"):
            llm.unpin_prefix(pin.handle)
        assert llm.stats()["used_pages"] == 0
        with pytest.raises(InvalidRequestError, match="whole blocks of 16 tokens"):
            llm.pin_prefix(head[:15])
        pins = [llm.pin_prefix([index, *head]) for index in range(2)]
        with pytest.raises(InvalidRequestError, match=r"pages are left, and a sequence of 256"):
            [llm.pin_prefix([index, *head]) for index in range(2, 12)]
        assert llm.stats()["pinned_prefixes"] >= len(pins)
    with (
        LLM(max_model_len=64, kv_cache_memory="1MiB", enable_prefix_caching=False) as llm,
        pytest.raises(InvalidRequestError, match="enable-prefix-caching"),
    ):
        llm.pin_prefix(head[:40])


def test_prompt_log_probabilities_of_many_prompts_take_bounded_memory(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = prompts(4, 300, 20)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    with LLM(dtype="float32", kv_cache_memory="32MiB") as llm:
        whole = llm.generate(batch, params)
        vocab = llm.engine.model_config.vocab_size
    monkeypatch.setattr("vmserve.engine.parts._SCORED_LOGITS", 32 * vocab)
    with LLM(dtype="float32", kv_cache_memory="32MiB") as llm:
        widest = 0
        execute = llm.engine.runner.execute

        def watched(*args: Any) -> Any:
            nonlocal widest
            logits = execute(*args)
            widest = max(widest, logits.logits.shape[0])
            return logits

        monkeypatch.setattr(llm.engine.runner, "execute", watched)
        cut = llm.generate(batch, params)
    assert widest <= 32 + len(batch)
    assert all(len(each.prompt_logprobs or ()) == len(each.prompt_token_ids) for each in cut)
    assert list(map(seen, cut)) == list(map(seen, whole))


def calls_per_step(num_steps: int = 40, **options: Any) -> float:
    """Of functions, in Python and from it, by steps in which three sequences decode."""
    num_calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    with LLM(kv_cache_memory="32MiB", kv_mapper="off", **options) as llm:
        for index in range(3):
            llm.engine.add_request(str(index), [5 + index] * 20, greedy(8 + num_steps))
        for _ in range(4):
            llm.engine.step()
        sys.setprofile(count)
        for _ in range(num_steps):
            llm.engine.step()
        sys.setprofile(None)
        assert llm.engine.scheduler.num_running == 3
    return num_calls / num_steps


def test_a_step_costs_auto_hardly_more_than_a_fixed_regime(tmp_path: Path) -> None:
    """Choosing is for newcomers; where everybody decodes, the steps are the same but for what
    attention should have taken. (Not a matter of time here: on a small model it was 3 % of it.)"""
    fixed = calls_per_step(kv_regime="virtual")
    auto = calls_per_step(kv_regime="auto", regime_profile=write_profile(tmp_path))
    assert fixed < auto <= fixed + 6
