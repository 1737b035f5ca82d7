"""The input of custom tools, which is a text, in pieces."""

from __future__ import annotations

import json

import pytest

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
