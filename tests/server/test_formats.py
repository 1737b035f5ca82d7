"""What an answer has to match, in the words of other servers: served or refused, never ignored."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import CHAT, COMPLETIONS, MESSAGES, RESPONSES, VALID, Body, Running
from tests.server.test_refusals import GBNF, structured, wanted
from vmserve.structured.spec import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OF_SCHEMA, OF_REGEX = Constraint("json", TEXT), Constraint("regex", "a+")
OF_GRAMMAR = Constraint("grammar", GBNF)
SERVED: list[tuple[Body, Constraint]] = [
    (wanted("json_object", schema=SCHEMA), OF_SCHEMA),
    (wanted("json_object", value=SCHEMA), OF_SCHEMA),
    (wanted("json_schema", schema=SCHEMA), OF_SCHEMA),
    (wanted("regex", pattern="a+"), OF_REGEX),
    (wanted("grammar", grammar=GBNF), OF_GRAMMAR),
    ({"json_schema": SCHEMA}, OF_SCHEMA),
    ({"json_schema": TEXT, "grammar": "", "regex": None}, OF_SCHEMA),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_regex": "a+"}, OF_REGEX),
    ({"guided_choice": ["a", "b"]}, Constraint("choice", '["a", "b"]')),
    ({"guided_grammar": GBNF}, OF_GRAMMAR),
    ({"grammar": GBNF}, OF_GRAMMAR),
    ({"ebnf": GBNF}, OF_GRAMMAR),
    ({"regex": "a+"}, OF_REGEX),
    ({"regex_pattern": "a+"}, OF_REGEX),
    ({"grammar_string": GBNF}, OF_GRAMMAR),
    ({"nvext": {"guided_json": SCHEMA, "other": 1}}, OF_SCHEMA),
    (structured(regex="a+", disable_fallback=True, whitespace=None), OF_REGEX),
]
SCHEMA_WANTED = {"type": "json_schema", "schema": SCHEMA}
#: Under a name that one route has.
OF_ROUTES: list[tuple[str, Body]] = [
    (RESPONSES, {"text": {"format": SCHEMA_WANTED}}),
    (MESSAGES, {"output_config": {"format": SCHEMA_WANTED, "effort": "low"}}),
    (MESSAGES, {"output_format": SCHEMA_WANTED}),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("asked", "constraint"), SERVED)
def test_served(shared: Running, path: str, asked: Body, constraint: Constraint) -> None:
    shared.ok(path, {**VALID[path], **asked})
    assert shared.constraint == constraint


@pytest.mark.parametrize(("path", "asked"), OF_ROUTES)
def test_formats_that_a_route_has_under_a_name_of_its_own(
    shared: Running, path: str, asked: Body
) -> None:
    shared.ok(path, {**VALID[path], **asked})
    assert shared.constraint == OF_SCHEMA
    shared.error(path, {**VALID[path], **asked, **wanted("json_object")})
