"""Keywords that llguidance does not know: what is enforced by others, and what is left out."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from vmserve.models import resolve_model
from vmserve.structured.grammar import to_grammar
from vmserve.structured.schemas import rewritten
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.text.tokenizer import load_tokenizer
from vmserve.tools.forced import forced_calls

Matches = Callable[[StructuredOutputsParams, str], bool]


@pytest.fixture(scope="module")
def matches() -> Matches:
    """Whether a text matches; an assertion for a schema that is refused."""
    tokenizer = load_tokenizer(resolve_model(None))
    tables = LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size)

    def check(params: StructuredOutputsParams, text: str) -> bool:
        matcher = LLMatcher(tables, to_grammar(params.constraint), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = list(tokenizer.encode(text, add_special_tokens=False))
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    return check


ABC = {"enum": ["a", "b", "c"], "type": "string"}
UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}
LISTS = [[], ["a"], ["b", "a"], ["c", "a", "b"], ["a", "a"], ["a", "b", "a"], ["d"], [True]]
LISTS += [[True, False], [False, False], [5], [5, 7], [7, 7]]
OBJECTS = [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "b": 2}, {"b": 2, "c": 3}, {"a": 1, "c": 3}]
OBJECTS += [{"a": 1, "b": 2, "c": 3}]
ABC_OBJECT = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in "abc"},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": ABC},
        {**UNIQUE, "items": ABC, "minItems": 2},
        {**UNIQUE, "items": ABC, "maxItems": 2},
        {**UNIQUE, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"title": "X", **ABC}}},
        {**UNIQUE, "items": {"type": "boolean"}},
        {**UNIQUE, "items": {"const": "a"}},
        {**UNIQUE, "items": {"enum": [5, 7]}},
        {**UNIQUE, "items": {"type": "string"}, "maxItems": 1},
        {"type": "array", "items": ABC, "uniqueItems": False},
    ],
)
def test_a_set_of_few_values_is_enforced(matches: Matches, schema: dict[str, Any]) -> None:
    params = StructuredOutputsParams(json=schema)
    assert params.unenforced == []
    for value in LISTS:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert matches(params, json.dumps(value)) == is_valid, value


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": {"type": "string"}},
        {**UNIQUE, "items": {"enum": ["a", "b", "c", "d", "e"]}},
        {**UNIQUE, "items": {"enum": ["a", 1]}},
        {**UNIQUE, "items": {"$ref": "https://example.com/x"}},
        {**UNIQUE, "prefixItems": [ABC, ABC], "items": ABC},
        {"type": "object", "properties": {"x": {**UNIQUE, "items": {"type": "string"}}}},
        {"anyOf": [{"items": {**UNIQUE, "items": {"type": "integer"}}}]},
    ],
)
def test_other_sets_are_served_and_told(schema: dict[str, Any]) -> None:
    assert StructuredOutputsParams(json=schema).unenforced == ["uniqueItems"]


def test_what_is_left_out_allows_all_that_is_valid(matches: Matches) -> None:
    params = StructuredOutputsParams(json={**UNIQUE, "items": {"type": "string"}})
    assert all(matches(params, text) for text in ('["x", "y"]', '["x", "x"]', "[]"))
    assert not matches(params, "[5]")


def test_names_and_data_are_no_keywords(matches: Matches) -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"const": {"uniqueItems": True}}, "dependentRequired": ABC},
        "required": ["uniqueItems"],
        "additionalProperties": False,
    }
    params = StructuredOutputsParams(json=schema)
    assert params.unenforced == []
    assert matches(params, '{"uniqueItems": {"uniqueItems": true}, "dependentRequired": "a"}')


@pytest.mark.parametrize(
    "dependent", [{"a": ["b"]}, {"a": ["b"], "b": ["a"]}, {"a": []}, {"a": ["b", "c"], "c": ["a"]}]
)
def test_dependent_properties(matches: Matches, dependent: dict[str, Any]) -> None:
    schema = {**ABC_OBJECT, "dependentRequired": dependent}
    params = StructuredOutputsParams(json=schema)
    for value in OBJECTS:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert matches(params, json.dumps(value)) == is_valid, value


def test_there_is_a_limit_to_what_a_short_schema_makes() -> None:
    """Sixteen sets become their orders, the seventeenth is left out; and of dependencies four."""
    sets = {str(i): {**UNIQUE, "items": ABC} for i in range(17)}
    constraint = StructuredOutputsParams(json={"properties": sets}).constraint
    assert to_grammar(constraint).count("prefixItems") == 16 * 6
    names = {str(i): ["x"] for i in range(5)}
    kept = StructuredOutputsParams(json={"dependentRequired": names}).constraint
    assert "dependentRequired" in to_grammar(kept)  # which is refused by its name


def test_what_is_written_for_a_schema_is_in_proportion_to_it() -> None:
    long = {"enum": [letter * 60_000 for letter in "abc"]}
    sets = {str(i): {**UNIQUE, "items": {"$ref": "#/$defs/x"}} for i in range(16)}
    schema = {"type": "object", "properties": sets, "$defs": {"x": long}}
    changed, left_out = rewritten(schema)
    assert (changed["$defs"], left_out) == (schema["$defs"], ["uniqueItems"])
    assert len(json.dumps(changed)) <= len(json.dumps(schema))
    few = {"properties": {str(i): {**UNIQUE, "items": {"enum": list("abcd")}} for i in range(8)}}
    tools = [{"function": {"name": f"f{i}", "parameters": few}} for i in range(4)]
    assert forced_calls(tools, parallel=False).grammar.count("prefixItems") == 16 * 24  # type: ignore[union-attr]


def test_references_into_a_set(matches: Matches) -> None:
    properties = {"a": {**UNIQUE, "items": ABC}, "b": {"$ref": "#/properties/a/items"}}
    params = StructuredOutputsParams(json={"type": "object", "properties": properties})
    assert matches(params, '{"a": ["a", "b"], "b": "c"}')
    assert not matches(params, '{"a": ["a", "a"], "b": "c"}')
    assert not matches(params, '{"a": [], "b": "d"}')


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Picture(BaseModel):
    colours: set[Colour]
    flags: frozenset[bool]
    kind: set[Literal["a", "b"]]


class Tagged(BaseModel):
    tags: set[str]


def test_sets_of_pydantic(matches: Matches) -> None:
    params = StructuredOutputsParams(json=Picture.model_json_schema())
    assert params.unenforced == []
    assert matches(params, '{"colours": ["blue", "red"], "flags": [true], "kind": []}')
    assert not matches(params, '{"colours": ["blue", "blue"], "flags": [], "kind": []}')
    assert StructuredOutputsParams(json=Tagged.model_json_schema()).unenforced == ["uniqueItems"]


def test_sets_in_enforced_calls(matches: Matches) -> None:
    tool = {"function": {"name": "f", "parameters": Picture.model_json_schema()}}
    params = forced_calls([tool], parallel=False)
    call = '[{"name": "f", "arguments": {"colours": %s, "flags": [], "kind": []}}]'
    assert matches(params, call % '["red", "blue"]')
    assert not matches(params, call % '["red", "red"]')
    assert params.unenforced == []
    tagged = {"function": {"name": "g", "parameters": Tagged.model_json_schema()}}
    assert forced_calls([tool, tagged], parallel=False).unenforced == ["uniqueItems"]
