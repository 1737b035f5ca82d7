"""JSON as it comes in: what parsers disagree on is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from vmserve.errors import InvalidRequestError
from vmserve.server import wire as wire_module
from vmserve.server.wire import TextTemplate, dump_json, dump_parts, parse_json


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "range of a double"),
        (b'{"a": 1, "a": 1}', "'a' twice"),
        (b'{"b": [{"a": 1, "c": 2, "a": 3}]}', "'a' twice"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "twice"),
        (b"\xff\xfe", "not UTF-8"),
        (b"1" * 5000, "too many digits"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b"[" * 100_000 + b"]" * 100_000, "deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "deeper than 64"),
    ],
)
def test_refused(body: bytes, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        parse_json(body)


OBJECT = b'{"a": [1, 2.5, "\\ud83d\\ude00", null, true]}'


@pytest.mark.parametrize("body", [b"[" * 64 + b"]" * 64, OBJECT, b"16.0", b"-0"])
def test_taken(body: bytes) -> None:
    assert parse_json(body) == json.loads(body)


def test_dump_is_compact_utf8_and_has_no_nan() -> None:
    assert dump_json({"a": ["é", 1.5]}) == '{"a":["é",1.5]}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json([float("nan")])


def test_a_template_is_what_the_encoder_gives() -> None:
    text = "".join(map(chr, [*range(0x800), 0x2028, 0xE000, 0xFFFD, 0x1F600])) + '"\\'
    chunk = {"id": 'a"b', "choices": [{"text": TextTemplate.TEXT, "logprobs": None}]}
    template = TextTemplate(chunk)
    for piece in ("", "x", text):
        assert template.fill(piece) == dump_json(
            {"id": 'a"b', "choices": [{"text": piece, "logprobs": None}]}
        )


def lazily(given: Any) -> Any:
    """The same, of which lists are made as they are read."""
    if isinstance(given, list):
        return (lazily(item) for item in given)
    if isinstance(given, dict):
        return {key: lazily(item) for key, item in given.items()}
    return given


DEEP: Any = {"a": [], "b": [1, {"c": "ä"}, {"x": [2, {"y": [3]}]}, None, 1.5], "d": {"e": []}}


@pytest.mark.parametrize("value", [{}, [], None, DEEP, [[{"a": [1, 2]}], [], "x"]])
def test_parts_are_the_whole(value: Any) -> None:
    assert b"".join(dump_parts(lazily(value))) == dump_json(value)
    assert b"".join(dump_parts(value)) == dump_json(value)


def test_items_are_asked_for_as_their_turn_comes() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for item in range(3):
            asked.append(item)
            yield item

    seen = [(part, len(asked)) for part in dump_parts({"a": items(), "b": 1})]
    assert (b"1", 2) in seen
    assert (b"2", 3) in seen
    assert b"".join(part for part, _ in seen) == b'{"a":[0,1,2],"b":1}'


def test_a_body_has_so_many_arrays_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MAX_CONTAINERS", 100)
    assert len(parse_json(b"[" + b",".join([b"{}"] * 99) + b"]")) == 99
    with pytest.raises(InvalidRequestError, match="more than 100 arrays and objects"):
        parse_json(b"[" + b",".join([b"{}"] * 100) + b"]")
    assert parse_json(b'"' + b"[" * 200 + b'"') == "[" * 200
