"""What a request's answer has to match: ``structured_outputs`` and ``response_format``."""

from __future__ import annotations

from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.protocol import GenerationRequest
from vmserve.structured.spec import NAMES, StructuredOutputsParams

__all__ = ["schema_of_format", "structured_outputs"]


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """None where it may be any text. Raises :class:`InvalidRequestError`."""
    asked = _of_field(request.structured_outputs)
    wanted = schema_of_format(request.response_format, "response_format")
    if asked is not None and wanted is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the answer has to match: leave "
            "one out",
            "response_format",
        )
    return asked or wanted


def _of_field(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError("structured_outputs must be an object", "structured_outputs")
    return StructuredOutputsParams(**{name: value[name] for name in NAMES if name in value})


def schema_of_format(wanted: Any, param: str) -> StructuredOutputsParams | None:
    """Of OpenAI's ``response_format``. Raises :class:`InvalidRequestError`."""
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        # Chat has the schema in a field of its own, the responses API beside the type.
        holder = wanted.get("json_schema", wanted)
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"{param} of type json_schema needs a schema, an object", param
            )
        return StructuredOutputsParams(json=schema)
    raise InvalidRequestError(
        f'{param} must be an object whose type is "text", "json_object" or "json_schema"', param
    )
