"""What a client may make long costs the engine's loop nothing: it was prepared elsewhere.

By instructions of the interpreter, not by the clock: a request with long lists and texts takes as
many as one with short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.interrupting import count_instructions
from vmserve import LLM, SamplingParams
from vmserve.options import declared_options
from vmserve.sampling.params import MAX_BAD_WORDS_CHARS, MAX_STOP_CHARS, Pooling
from vmserve.text.prompts import encode_params
from vmserve.types import RequestTerms

VOCABULARY = 2048
#: For each field the shortest value and one as long as it may be.
SIZES: dict[str, tuple[Any, Any]] = {
    "stop": (
        [f"ab{i}" for i in range(16)],
        ["ab" * (MAX_STOP_CHARS // 2 - 1) + f"{i}" for i in range(16)],
    ),
    "stop_token_ids": ([1999], list(range(1000, 2024))),
    "logit_bias": ({7: 1.0}, dict.fromkeys(range(1024), 1.0)),
    "allowed_token_ids": (list(range(5, 9)), list(range(5, VOCABULARY))),
    "bad_words": (["never"], [f"{i:03d} never " * 12 for i in range(MAX_BAD_WORDS_CHARS // 130)]),
    "prediction": ([7], [i % 900 + 5 for i in range(4000)]),
}
#: Whose length is that of the answer, or which are compiled by a process of their own.
OTHERS = {"logprob_token_ids", "structured_outputs"}


@pytest.fixture(scope="module", params=["off", "prompt-lookup"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(max_model_len=256, kv_cache_memory="8MiB", speculative=request.param) as llm:
        yield llm


def num_instructions(llm: LLM, name: str, value: Any) -> int:
    """Of the engine's part of a request."""
    engine = llm.engine
    asked = {"ignore_eos": True, "max_tokens": 6, "min_tokens": 3, "n": 8, "temperature": 0.0}
    params = encode_params(SamplingParams(**{**asked, name: value}), engine.tokenizer)

    def serve() -> None:
        engine.add_checked(name, list(range(10, 40)), params, RequestTerms())
        while engine.has_unfinished:
            engine.step()

    return count_instructions(serve)


@pytest.mark.parametrize("name", SIZES)
def test_length_takes_no_instructions(llm: LLM, name: str) -> None:
    # The first ones fill caches.
    *_, short, long = [num_instructions(llm, name, value) for value in 2 * SIZES[name]]
    # Other tokens may be drawn, which end answers at other places.
    assert long < 1.2 * short + 300, (short, long)


def test_every_field_that_may_be_long_is_here() -> None:
    fields = {
        name
        for name, declared in declared_options(SamplingParams).items()
        if declared.type not in (int, float, bool, Pooling)
    }
    assert fields == SIZES.keys() | OTHERS
