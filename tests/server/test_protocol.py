"""What all request models have in common: strict types, and fields unknown to them ignored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from vmserve.server.words import protocol
from vmserve.server.words.protocol import RequestModel

MODELS = [
    model
    for model in (getattr(protocol, name) for name in protocol.__all__)
    if model is not RequestModel
]
#: What each model cannot do without.
NEEDED: dict[str, Any] = {
    "prompt": "Hi",
    "messages": [{"role": "user", "content": "Hi"}],
    "input": "Hi",
    "tokens": [1],
    "max_tokens": 1,
    "kv_cache_memory": 1,
    "model": "m",
}


def kinds(field: dict[str, Any]) -> set[str]:
    return {each.get("type", "") for each in field.get("anyOf", [field])}


def fields_of(kind: str) -> list[tuple[type[RequestModel], str]]:
    return [
        (model, name)
        for model in MODELS
        for name, field in model.model_json_schema()["properties"].items()
        if kind in kinds(field) and kinds(field) <= {kind, "null"}
    ]


def validate(model: type[RequestModel], fields: dict[str, Any]) -> RequestModel:
    needed = {name: value for name, value in NEEDED.items() if name in model.model_fields}
    return model.model_validate(needed | fields)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("integer", ["16", 16.0, True, [16]]),
        ("number", ["0.5", True]),
        ("boolean", ["true", 1, 0.0]),
        ("string", [1, True, ["x"]]),
    ],
)
def test_types_are_strict(kind: str, others: list[Any]) -> None:
    fields = fields_of(kind)
    assert len(fields) > 5
    for model, name in fields:
        for value in others:
            with pytest.raises(ValidationError) as raised:
                validate(model, {name: value})
            assert raised.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize("model", MODELS)
def test_fields_that_are_not_declared_are_ignored(model: type[RequestModel]) -> None:
    assert validate(model, {"not_a_field": {"x": 1}}) == validate(model, {})
