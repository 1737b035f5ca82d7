"""Custom tools of OpenAI: their input in pieces, and the grammars that it has to match."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.server.conftest import Running
from tests.server.test_tools import DATE, WORD
from vmserve import AsyncLLM
from vmserve.server.words.custom_tools import InputText

BEGIN = '{"input" : "'


def read(text: str, size: int) -> str:
    """The input that is written in ``text``, which comes in pieces of a size."""
    reader = InputText()
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return "".join(map(reader.feed, pieces)) + reader.finish()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_an_input_in_pieces(size: int) -> None:
    for text in ('a"\\\n\t/é\x01', "\U0001f600\u00e4", "x" * 50, ""):
        for ascii_only in (True, False):
            assert read(json.dumps({"input": text}, ensure_ascii=ascii_only), size) == text
    halves = r'{"input": "\ud83dx\ud83d\n\udc00"}'
    assert read(halves, size) == "\ufffdx\ufffd\n\ufffd"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((BEGIN[:cut], "") for cut in range(len(BEGIN) + 1)),
        (BEGIN + "a\\", "a"),
        (BEGIN + "a\\u00", "a"),
        (BEGIN + "a\\ud83d\\u", "a"),
        (BEGIN + 'C:\\path\\new"}', 'C:\\path\\new"}'),
        ("just text", "just text"),
    ],
)
def test_an_input_that_is_no_json_or_was_cut_off(text: str, told: str) -> None:
    assert read(text, 100) == told


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    running = Running(AsyncLLM(kv_cache_memory="64MiB", max_model_len=1024))
    yield running
    running.close()


@pytest.mark.parametrize(("tool", "pattern"), [(DATE, "[0-9]{4}|x"), (WORD, "a+b")])
@pytest.mark.parametrize("is_named", [True, False])
def test_inputs_match_their_format(real: Running, tool: dict, pattern: str, is_named: bool) -> None:
    """The embedded model knows nothing of it: all that it writes is what the grammar allows."""
    [answer] = real.chat(
        tools=[tool],
        tool_choice=tool if is_named else "required",
        max_tokens=200,
        seed=1,
        parallel_tool_calls=False,
    )["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == ("stop" if is_named else "tool_calls")
    assert re.fullmatch(pattern, call["custom"]["input"])
