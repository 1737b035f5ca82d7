"""A real model, as ``vmserve pull smollm2`` fetches it, in the whole engine."""

from __future__ import annotations

import hashlib

from tests.helpers import smollm2_file
from vmserve import LLM, SamplingParams
from vmserve.models.pullable import PULLABLE


def test_it_is_the_pinned_file_and_answers() -> None:
    path = smollm2_file()
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == PULLABLE["smollm2"].sha256
    questions = ["What is the capital of France?", "What is 2 + 2?"]
    with LLM(str(path), kv_cache_memory="512MiB") as llm:
        answers = llm.chat(
            [[{"role": "user", "content": question}] for question in questions],
            SamplingParams(temperature=0, max_tokens=24),
        )
    texts = [answer.outputs[0].text for answer in answers]
    assert "Paris" in texts[0]
    assert "4" in texts[1]
