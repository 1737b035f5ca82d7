"""The table of bounds covers every field of every request model."""

import json
from typing import Any

import pytest

from tests.server.test_protocol import MODELS
from vmserve.server.errors import ApiError, error_body
from vmserve.server.wire import dump_json
from vmserve.server.words.protocol import RequestModel

#: Checked by hand in prompts.py and messages.py, or never looked into.
BY_HAND = {"prompt", "messages", "tools", "tool_choice", "response_format", "modalities", "stop"}
BY_HAND |= {"input", "prediction"}


def unbounded(schema: dict[str, Any]) -> list[str]:
    """What in ``schema`` has no minimum and maximum."""
    found = [reason for option in schema.get("anyOf", []) for reason in unbounded(option)]
    kind = schema.get("type")
    if "const" in schema or "enum" in schema:
        return found
    lacks = {
        "integer": not (schema.keys() & {"minimum", "exclusiveMinimum"} and "maximum" in schema),
        "string": "maxLength" not in schema,
        "array": "maxItems" not in schema,
        "object": "maxProperties" not in schema,
    }
    lacks["number"] = lacks["integer"]
    if kind == "array":
        found += unbounded(schema.get("items", {}))
    return [*found, kind] if lacks.get(str(kind)) else found


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_bounded(model: type[RequestModel]) -> None:
    properties = model.model_json_schema()["properties"]
    found = {name: unbounded(schema) for name, schema in properties.items() if name not in BY_HAND}
    assert {name: what for name, what in found.items() if what} == {}


def test_the_check_itself_sees_what_is_unbounded() -> None:
    either = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}
    assert unbounded(either) == ["integer"]
    assert unbounded({"type": "array", "items": {"type": "string"}}) == ["string", "array"]


@pytest.mark.parametrize("char", ["x", "é", "\x00", "\U0001f600", '"'])
def test_error_bodies_stay_under_2_kib(char: str) -> None:
    body = dump_json(error_body(ApiError(400, char * 10_000, "logit_bias")))
    assert len(body) <= 2048
    assert json.loads(body)["error"]["message"].endswith(char + "…")
