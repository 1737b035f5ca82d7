"""An interrupt at any point of a call: the engine serves on, and has lost nothing."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.interrupting import count_instructions, raise_at
from tests.support.small_engine import SMALL, assert_nothing_left
from vmserve import LLM, SamplingParams
from vmserve.engine.engine import LLMEngine

#: Interrupts of each kind; VMSERVE_INTERRUPTS runs others.
COUNT = int(os.environ.get("VMSERVE_INTERRUPTS", "8"))
PROMPTS = [[(i * 7919 + 31 * j) % 900 + 5 for i in range(30 + 9 * j)] for j in range(5)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60),
    SamplingParams(temperature=1.0, seed=3, max_tokens=40, n=3),
    SamplingParams(temperature=0.0, max_tokens=60, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=20, stop=["zzz"]),
    SamplingParams(temperature=0.9, seed=5, max_tokens=60),
]


class Alarm(Exception):
    """What a handler of SIGALRM raises."""


@pytest.fixture(params=["small", "drafts"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A pool that holds two of the requests: they are preempted, and swapped."""
    options: dict[str, Any] = {"speculative": "prompt-lookup"} if request.param == "drafts" else {}
    with LLM(**SMALL, max_model_len=128, kv_cache_memory="576KiB", **options) as llm:
        yield llm


def tokens(results: Any) -> list[list[list[int]]]:
    return [[list(choice.token_ids) for choice in result.outputs] for result in results]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Alarm])
def test_an_interrupt_anywhere_in_generate(llm: LLM, error: type[BaseException]) -> None:
    """``KeyboardInterrupt``, and an exception that steps take for a failed batch."""

    def generate() -> list[list[list[int]]]:
        return tokens(llm.generate(PROMPTS, PARAMS))

    expected = generate()
    limit_pages, num_points = llm.stats()["limit_pages"], count_instructions(generate)
    rng = random.Random(1)
    num_raised = 0
    for _ in range(COUNT):
        number = rng.randrange(1, num_points + 1)
        try:
            raise_at(number, error, generate)
        except BaseException as raised:  # noqa: BLE001 - also where a failed batch is told
            num_raised += 1
            del raised
        assert_nothing_left(llm.engine)
        assert generate() == expected, number
        assert_nothing_left(llm.engine)
    assert llm.stats()["limit_pages"] == limit_pages
    assert num_raised > COUNT // 2
    assert llm.stats()["num_preemptions_total"] > 0


def test_an_interrupt_while_an_interrupt_is_handled(llm: LLM) -> None:
    """The second comes while the first one's requests are being ended."""
    expected = tokens(llm.generate(PROMPTS, PARAMS))
    rng = random.Random(2)
    num_points = count_instructions(lambda: llm.generate(PROMPTS, PARAMS))
    start_over = llm.engine._start_over
    num_twice = 0
    for _ in range(COUNT):
        number = rng.randrange(1, 250)
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(*args: Any, number: int = number, patch: Any = patch) -> Any:
                nonlocal num_twice
                num_twice += 1
                patch.undo()
                return raise_at(number, KeyboardInterrupt, lambda: start_over(*args))

            patch.setattr(llm.engine, "_start_over", interrupted)
            with contextlib.suppress(KeyboardInterrupt):
                raise_at(
                    rng.randrange(num_points // 20, num_points),
                    KeyboardInterrupt,
                    lambda: llm.generate(PROMPTS, PARAMS),
                )
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
        assert_nothing_left(llm.engine)
    assert num_twice > COUNT // 2


# -- an engine without a client, which nobody tells to start over


def add_all(engine: LLMEngine) -> None:
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"{number}", prompt, params)


def served(engine: LLMEngine) -> tuple[dict[str, list[list[int]]], dict[str, str]]:
    """Step to the end; returns the tokens of each request, and why others failed."""
    done, failed = {}, {}
    while engine.has_unfinished:
        result = engine.step()
        for update in result.outputs:
            if update.finished:
                done[update.request_id] = [list(each.token_ids) for each in update.outputs]
        failed |= {failure.request_id: str(failure.error) for failure in result.failures}
    return done, failed


@pytest.mark.parametrize("interrupted", ["step", "add", "abort"])
def test_the_call_after_an_interrupted_one_mends_the_engine(llm: LLM, interrupted: str) -> None:
    """All requests then fail, in the next step, and those that come are served as ever."""
    engine = llm.engine
    add_all(engine)
    expected, failed = served(engine)
    assert not failed

    def call() -> None:
        if interrupted == "step":
            engine.step()
        elif interrupted == "add":
            engine.add_request("late", PROMPTS[0], PARAMS[0])
        else:
            engine.abort("2")

    rng = random.Random(4)
    num_mended = 0
    for _ in range(COUNT):
        add_all(engine)
        for _ in range(rng.randrange(4)):
            engine.step()
        known = set(engine.request_ids)
        with contextlib.suppress(KeyboardInterrupt):
            raise_at(
                rng.randrange(1, 120 if interrupted != "step" else 900), KeyboardInterrupt, call
            )
        done, failed = served(engine) if rng.random() < 0.5 else ({}, {})
        engine.add_request("next", PROMPTS[3], PARAMS[3])
        more_done, more_failed = served(engine)
        done, failed = done | more_done, failed | more_failed
        assert done["next"] == expected["3"]
        if failed:
            num_mended += 1
            assert known - {"2"} <= failed.keys() <= known | {"late"}
        else:  # the call had begun nothing, or ended
            assert all(done[name] == expected[name] for name in known & done.keys())
        assert_nothing_left(llm.engine)
    assert num_mended > COUNT // 3
