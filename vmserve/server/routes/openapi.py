"""The description of the API. Bodies are read by hand, so their schemas are added by hand."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from vmserve.server.errors import CODES, has_anthropic_errors
from vmserve.server.models.registry import Models
from vmserve.server.wire import JSON_TYPE
from vmserve.server.words.openapi_replies import REPLIES, REPLY_SCHEMAS, Reply
from vmserve.server.words.protocol import (
    AddModelRequest,
    ChatCompletionRequest,
    CompletionRequest,
    CountMessageTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    KVMemoryRequest,
    MessagesRequest,
    ModelRequest,
    ModelTermsRequest,
    RequestModel,
    ResponsesRequest,
    TokenizeRequest,
)

__all__ = ["body_of", "install_openapi"]

_MODELS: Final[tuple[type[RequestModel], ...]] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountMessageTokensRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_ADMIN_MODELS: Final = (KVMemoryRequest, ModelRequest, ModelTermsRequest, AddModelRequest)
_SCHEMAS: Final = "#/components/schemas/"
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "status"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"enum": [*CODES, None]},
                "status": {"type": "integer", "description": "As of HTTP."},
            },
        }
    },
}
_ANTHROPIC_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def body_of(*models: type[RequestModel]) -> dict[str, Any]:
    """For ``openapi_extra``: a JSON body of one of ``models``."""
    references = [{"$ref": f"{_SCHEMAS}{model.__name__}"} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {JSON_TYPE: {"schema": schema}}}}


def install_openapi(app: FastAPI, needs_key: bool, models: Models) -> None:
    """Give ``app`` an ``openapi()`` that knows the request models, the API key and which names
    a request may give for the model.
    """

    described: list[str] = []

    def describe() -> dict[str, Any]:
        names = models.names  # models come and go
        if app.openapi_schema is None or described != names:
            described[:] = names
            app.openapi_schema = _describe(app, needs_key, names)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI, needs_key: bool, model_names: list[str]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, routes=app.routes, servers=app.servers
    )
    is_administered = "/v1/kv/memory" in document["paths"]
    models: list[type[RequestModel]] = [*_MODELS, *(_ADMIN_MODELS if is_administered else ())]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_SCHEMAS + "{model}"
    )
    components = document.setdefault("components", {})
    named = {"type": "string", "enum": model_names}
    for name, schema in definitions.get("$defs", {}).items():
        fields = schema.get("properties", {})
        if "model" in fields and name != AddModelRequest.__name__:
            may_be_left_out = "anyOf" in fields["model"]
            fields["model"] = {"anyOf": [named, {"type": "null"}]} if may_be_left_out else named
    parameter = {"name": "model", "in": "path", "required": True, "schema": named}
    document["paths"]["/v1/models/{model}"]["get"]["parameters"] = [parameter]
    for operation in document["paths"]["/v1/responses/{response_id}"].values():
        operation["parameters"] = [
            {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    components["schemas"] = {
        **definitions.get("$defs", {}),
        **REPLY_SCHEMAS,
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path in REPLIES:
                _describe_reply(operation, REPLIES[path])
            operation["responses"]["default"] = _error_reply(path)
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _error_reply(path: str) -> dict[str, Any]:
    name = "AnthropicError" if has_anthropic_errors(path) else "Error"
    return {
        "description": "An error",
        "content": {JSON_TYPE: {"schema": {"$ref": f"{_SCHEMAS}{name}"}}},
    }


#: Schema of a stream's events, as the sequential media types of OpenAPI have it.
_EVENT = {
    "type": "object",
    "description": "A chunk as `data:`, of some endpoints with its kind as `event:`; last [DONE].",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


def _describe_reply(operation: dict[str, Any], reply: Reply) -> None:
    operation["summary"], operation["tags"] = reply.summary, [reply.tag]
    content: dict[str, Any] = {}
    if reply.schema is not None:
        content[reply.media_type] = {"schema": reply.schema}
    if reply.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    described = {"description": "As asked", "content": content}
    operation["responses"]["200"] = described if content else {"description": "No body"}
