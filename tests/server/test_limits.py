"""The table of bounds covers every field of every request model."""

import json
from typing import Any

import pytest

from tests.server.test_protocol import MODELS
from vmserve.server.errors import ApiError, error_body
from vmserve.server.wire import dump_json
from vmserve.server.words.protocol import RequestModel

#: Checked by hand in prompts.py and messages.py, or never looked into.
BY_HAND = {
    "prompt",
    "messages",
    "tools",
    "tool_choice",
    "response_format",
    "modalities",
    "stop",
} | {"input", "prediction"}


def unbounded(schema: dict[str, Any]) -> list[str]:
    """What in ``schema`` has no minimum and maximum."""
    found = [reason for option in schema.get("anyOf", []) for reason in unbounded(option)]
    kind = schema.get("type")
    if "const" in schema or "enum" in schema:
        return found
    if kind in ("integer", "number"):
        lower = schema.keys() & {"minimum", "exclusiveMinimum"}
        return [*found, *([] if lower and "maximum" in schema else ["number"])]
    if kind == "string" and "maxLength" not in schema:
        return [*found, "string"]
    if kind == "array":
        inner = unbounded(schema.get("items", {}))
        return [*found, *inner, *([] if "maxItems" in schema else ["array"])]
    if kind == "object" and "maxProperties" not in schema:
        return [*found, "object"]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_field_is_bounded(model: type[RequestModel]) -> None:
    properties = model.model_json_schema()["properties"]
    assert {
        name: unbounded(schema)
        for name, schema in properties.items()
        if name not in BY_HAND and unbounded(schema)
    } == {}


def test_the_check_itself_sees_what_is_unbounded() -> None:
    assert unbounded({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}) == ["number"]
    assert unbounded({"type": "array", "items": {"type": "string"}}) == ["string", "array"]


@pytest.mark.parametrize("char", ["x", "é", "\x00", "\U0001f600", '"'])
def test_error_bodies_stay_under_2_kib(char: str) -> None:
    body = dump_json(error_body(ApiError(400, char * 10_000, "logit_bias")))
    assert len(body) <= 2048
    assert json.loads(body)["error"]["message"].endswith(char + "…")
