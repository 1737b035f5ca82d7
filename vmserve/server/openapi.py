"""The description of the API. Bodies are read by hand, so their schemas are added by hand."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from vmserve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    ResponsesRequest,
    TokenizeRequest,
)

__all__ = ["body_of", "install_openapi"]

_MODELS: Final[tuple[type[RequestModel], ...]] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
_SCHEMAS: Final = "#/components/schemas/"
_ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def body_of(*models: type[RequestModel]) -> dict[str, Any]:
    """For ``openapi_extra``: a JSON body of one of ``models``, and what errors look like."""
    references = [{"$ref": f"{_SCHEMAS}{model.__name__}"} for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    error = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}Error"}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"default": {"description": "An error", "content": error}},
    }


def install_openapi(app: FastAPI, needs_key: bool) -> None:
    """Give ``app`` an ``openapi()`` that knows the request models and the API key."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, needs_key)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, routes=app.routes, servers=app.servers
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template=_SCHEMAS + "{model}"
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**definitions.get("$defs", {}), "Error": _ERROR}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
