"""Batches as ``ray.data`` gives them, without Ray."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from vmserve import LLM, ConfigurationError, SamplingParams
from vmserve.ray import Predictor

ASKED = {"temperature": 0.0, "max_tokens": 6}
OPTIONS = {"kv_cache_memory": "16MiB", "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def predictor() -> Iterator[Predictor]:
    made = Predictor(sampling_params=ASKED, **OPTIONS)
    yield made
    made._llm.close()


def test_rows_get_the_answers_of_their_prompts(predictor: Predictor) -> None:
    prompts = ["Once upon a time", "The", "A dog"]
    batch = {"prompt": np.array(prompts, dtype=object), "id": np.arange(3)}
    answered = predictor(batch)
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        expected = llm.generate(prompts, SamplingParams(**ASKED))  # type: ignore[arg-type]
    assert answered["generated_text"].tolist() == [each.outputs[0].text for each in expected]
    assert answered["num_generated_tokens"].tolist() == [6, 6, 6]
    assert answered["finish_reason"].tolist() == ["length"] * 3
    assert answered["num_prompt_tokens"].tolist() == [len(e.prompt_token_ids) for e in expected]
    assert answered["id"].tolist() == [0, 1, 2]
    assert answered["error"].tolist() == [""] * 3


def test_a_row_that_cannot_be_served_leaves_the_others(predictor: Predictor) -> None:
    prompts = ["The", "word " * 500, "A dog", "A cat"]
    answered = predictor({"prompt": np.array(prompts, dtype=object)})
    assert [bool(each) for each in answered["error"]] == [False, True, False, False]
    assert "64" in answered["error"][1]
    assert answered["num_generated_tokens"].tolist() == [6, 0, 6, 6]
    assert answered["generated_text"][1] == ""


def test_conversations_may_be_nested_arrays(predictor: Predictor) -> None:
    """As Arrow gives them: missing fields are None, and lists are arrays."""
    message = {"role": "user", "content": "Hello", "name": None}
    batch = {"messages": np.array([np.array([message]), np.array([message])], dtype=object)}
    answered = predictor(batch)
    assert answered["error"].tolist() == ["", ""]
    assert answered["generated_text"][0] == answered["generated_text"][1] != ""


def test_a_batch_without_a_known_column_is_refused(predictor: Predictor) -> None:
    with pytest.raises(ConfigurationError, match=r"it has text"):
        predictor({"text": np.array(["A"], dtype=object)})
