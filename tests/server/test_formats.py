"""What an answer has to match, in the words of other servers: served or refused, never ignored."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from vmserve.structured.spec import Constraint
from vmserve.testing import ScriptedTransport

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
GBNF = 'root ::= "yes" | "no"'
#: The same request on every route that generates.
ROUTES: dict[str, Body] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}
SERVED: list[tuple[Body, Constraint]] = [
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Constraint("json", TEXT)),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, Constraint("json", TEXT)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Constraint("json", TEXT)),
    ({"response_format": {"type": "regex", "pattern": "a+"}}, Constraint("regex", "a+")),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, Constraint("grammar", GBNF)),
    ({"json_schema": SCHEMA}, Constraint("json", TEXT)),
    ({"json_schema": TEXT, "grammar": "", "regex": None}, Constraint("json", TEXT)),
    ({"guided_json": SCHEMA}, Constraint("json", TEXT)),
    ({"guided_regex": "a+"}, Constraint("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, Constraint("choice", '["a", "b"]')),
    ({"guided_grammar": GBNF}, Constraint("grammar", GBNF)),
    ({"grammar": GBNF}, Constraint("grammar", GBNF)),
    ({"ebnf": GBNF}, Constraint("grammar", GBNF)),
    ({"regex": "a+"}, Constraint("regex", "a+")),
    ({"regex_pattern": "a+"}, Constraint("regex", "a+")),
    ({"grammar_string": GBNF}, Constraint("grammar", GBNF)),
    ({"nvext": {"guided_json": SCHEMA, "other": 1}}, Constraint("json", TEXT)),
    (
        {"structured_outputs": {"regex": "a+", "disable_fallback": True, "whitespace": None}},
        Constraint("regex", "a+"),
    ),
]
REFUSED: list[tuple[Body, str, str]] = [
    ({"structural_tag": {"triggers": []}}, "structural_tag", "use tools"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "leave it out"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " *"}}, "structured_outputs", "no"),
    ({"grammar": {"type": "json"}}, "grammar", "must be a string"),
    ({"guided_choice": "a"}, "guided_choice", "list of strings"),
    ({"json_schema": "{"}, "json_schema", "not the JSON text"),
    ({"response_format": {"type": "json_object", "schema": "x"}}, "response_format", "an object"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", '"regex"'),
    ({"regex": "a", "ebnf": GBNF}, "regex", "ebnf and regex|regex and ebnf"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "response_format"),
]


@pytest.fixture(scope="module")
def served() -> Any:
    engine = ScriptedTransport()
    running = Running(engine)
    yield engine, running
    running.close()


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("asked", "constraint"), SERVED)
def test_served(
    served: tuple[ScriptedTransport, Running], path: str, asked: Body, constraint: Constraint
) -> None:
    engine, running = served
    running.ok(path, {**ROUTES[path], **asked})
    structured = engine.requests[-1][1].structured_outputs
    assert structured is not None
    assert structured.constraint == constraint


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("asked", "param", "told"), REFUSED)
def test_refused_by_name(
    served: tuple[ScriptedTransport, Running], path: str, asked: Body, param: str, told: str
) -> None:
    _, running = served
    response = running.post(path, {**ROUTES[path], **asked})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.get("param", param) == param  # Anthropic's errors have none
    assert param in error["message"]
    assert re.search(told, error["message"])


def test_formats_that_a_route_has_under_a_name_of_its_own(
    served: tuple[ScriptedTransport, Running],
) -> None:
    engine, running = served
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for path, given in (
        ("/v1/responses", {"text": {"format": wanted}}),
        ("/v1/messages", {"output_config": {"format": wanted}}),
        ("/v1/messages", {"output_format": wanted}),
    ):
        running.ok(path, {**ROUTES[path], **given})
        structured = engine.requests[-1][1].structured_outputs
        assert structured is not None
        assert structured.constraint == Constraint("json", TEXT)
        twice = {**ROUTES[path], **given, "response_format": {"type": "json_object"}}
        assert running.post(path, twice).status_code == 400


def test_calls_that_are_enforced_go_without_another_constraint(
    served: tuple[ScriptedTransport, Running],
) -> None:
    engine, running = served
    body = {**ROUTES["/v1/chat/completions"], "tool_choice": "required"}
    body["tools"] = [{"type": "function", "function": {"name": "now"}}]
    error = running.error("/v1/chat/completions", {**body, "grammar": GBNF})
    assert error["param"] == "tool_choice"
    running.ok("/v1/chat/completions", {**body, "response_format": {"type": "json_object"}})
    structured = engine.requests[-1][1].structured_outputs
    assert structured is not None
    assert structured.constraint.kind == "grammar"
