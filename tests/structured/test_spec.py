"""What a request may state, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vmserve.errors import InvalidRequestError
from vmserve.sampling.params import BeamSearchParams, SamplingParams
from vmserve.structured.spec import Constraint, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of so many levels."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "constraint"),
    [
        ({"json": SCHEMA}, Constraint("json", json.dumps(SCHEMA, separators=(",", ":")))),
        (
            {"json": json.dumps(SCHEMA)},
            Constraint("json", json.dumps(SCHEMA, separators=(",", ":"))),
        ),
        ({"regex": "a+"}, Constraint("regex", "a+")),
        ({"choice": ["a", "ü", "a"]}, Constraint("choice", '["a", "ü"]')),
        ({"grammar": 'root ::= "a"'}, Constraint("grammar", 'root ::= "a"')),
        ({"json_object": True}, Constraint("json", '{"type":"object"}')),
        ({"json_object": False, "regex": "a"}, Constraint("regex", "a")),
    ],
)
def test_each_kind(given: dict[str, Any], constraint: Constraint) -> None:
    assert StructuredOutputsParams(**given).constraint == constraint
    for params in (
        SamplingParams(structured_outputs=given),  # type: ignore[arg-type]
        BeamSearchParams(beam_width=2, structured_outputs=given).as_sampling(),  # type: ignore[arg-type]
    ):
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        assert params.structured_outputs.constraint == constraint


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "none is given"),
        ({"json": None}, "none is given"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"regexp": "a"}, "has no 'regexp'"),
        ({"regex": "a", "param": "x"}, "has no 'param'"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": "{"}, "not the JSON text of a schema"),
        ({"json": {"a": float("nan")}}, "not JSON"),
        ({"json": {"a": {1, 2}}}, "not JSON"),
        ({"json": nested(66)}, "deeper than 64"),
        ({"json": json.dumps(nested(66))}, "deeper than 64"),
        ({"json": "[" * 60_000}, "nested too deep"),
        ({"regex": ""}, "must not be empty"),
        ({"regex": 5}, "must be a string"),
        ({"regex": "a" * 65_537}, "at most 65536 bytes, got 65537"),
        ({"regex": "ü" * 32_769}, "at most 65536 bytes, got 65538"),
        ({"regex": "\ud800"}, "lone surrogates"),
        ({"choice": []}, "at least one"),
        ({"choice": "ab"}, "at least one"),
        ({"choice": ["a", 1]}, "strings only"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a" * 40_000, "b" * 40_000]}, "at most 65536 bytes"),
        ({"grammar": " \n"}, "must not be empty"),
        ({"grammar": ["a"]}, "must be a string"),
        ({"json_object": 1}, "must be true or false"),
        ("json", "must be an object"),
    ],
)
def test_refusals(given: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.param == "structured_outputs"


def test_a_schema_of_64_levels_is_taken() -> None:
    StructuredOutputsParams(json=nested(64))
