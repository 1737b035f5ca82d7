"""Read the constraints on an answer, under the names that clients use."""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request

from vmserve.errors import InvalidRequestError
from vmserve.sampling import GenerationParams
from vmserve.server.errors import UnservedError
from vmserve.server.words.protocol import ConstrainedRequest
from vmserve.structured.spec import StructuredOutputsParams

__all__ = [
    "format_fields",
    "schema_of_format",
    "structured_outputs",
    "tell_unenforced",
    "unenforced_by",
]

#: Fields of other servers, and the kind of structured_outputs that each is.
_FOREIGN: Final = {
    "ebnf": "grammar",
    "grammar": "grammar",
    "grammar_string": "grammar",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "json_schema": "json",
    "regex": "regex",
    "regex_pattern": "regex",
}
#: Fields without an equivalent, and the remedy.
_UNSERVED: Final = {
    "guided_whitespace_pattern": "leave it out: JSON has one space at most between its tokens",
    "structural_tag": "use tools, or a grammar in structured_outputs",
}
#: Keys of vLLM's structured_outputs which change no answer.
_HARMLESS: Final = ("disable_any_whitespace", "disable_fallback")


def structured_outputs(request: ConstrainedRequest) -> StructuredOutputsParams | None:
    """Return the constraint, or None for any text. Raises :class:`InvalidRequestError`."""
    for name, remedy in _UNSERVED.items():
        if _is_given(getattr(request, name)):
            raise UnservedError(f"{name} is not served: {remedy}", name)
    asked = {
        "structured_outputs": _of_field(request.structured_outputs),
        "response_format": schema_of_format(request.response_format, "response_format"),
        **{name: _of_foreign(name, getattr(request, name)) for name in _FOREIGN},
    }
    if isinstance(request.nvext, dict):
        nested = {name: value for name, value in request.nvext.items() if name in _FOREIGN}
        asked |= {f"nvext.{name}": _of_foreign(name, value) for name, value in nested.items()}
    found = {name: wanted for name, wanted in asked.items() if wanted is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise _both(second, first)
    return next(iter(found.values()), None)


def unenforced_by(params: GenerationParams) -> list[str]:
    """Keywords of a schema that an answer need not follow. Takes long: run it aside."""
    wanted = params.as_sampling().structured_outputs
    return [] if wanted is None else wanted.unenforced


def tell_unenforced(request: Request, names: list[str]) -> None:
    """Name these keywords in a header of the reply."""
    if names:
        request.state.headers = [(b"x-vmserve-unenforced", ", ".join(names).encode())]


def _both(one: str, other: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{one} and {other} both say what the answer has to match: leave one out", one
    )


def _is_given(value: Any) -> bool:
    return value is not None and value != ""  # clients send an empty text for none


def _of_field(value: Any) -> StructuredOutputsParams | None:
    if isinstance(value, dict):
        value = {
            key: item
            for key, item in value.items()
            if key not in _HARMLESS and item not in (None, False)
        }
    return None if value is None else StructuredOutputsParams.of(value)


def _of_foreign(name: str, value: Any) -> StructuredOutputsParams | None:
    return _named(name, **{_FOREIGN[name]: value}) if _is_given(value) else None


def _named(name: str, **wanted: Any) -> StructuredOutputsParams:
    """Make the parameters; errors name the client's field."""
    try:
        return StructuredOutputsParams(**wanted, param=name)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", name) from None


def schema_of_format(wanted: Any, param: str) -> StructuredOutputsParams | None:
    """Read OpenAI's ``response_format``. Raises :class:`InvalidRequestError`."""
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            # llama.cpp and others take a schema with it, some under another name.
            schema = wanted.get("schema", wanted.get("value"))
            if schema is None:
                return _named(param, json_object=True)
        case "json_schema":
            # Chat has the schema in a field of its own, the responses API next to the type.
            holder = wanted.get("json_schema", wanted)
            schema = holder.get("schema") if isinstance(holder, dict) else None
        case "regex":
            return _named(param, regex=wanted.get("pattern", wanted.get("value")))
        case "grammar":
            return _named(param, grammar=wanted.get("grammar"))
        case _:
            raise InvalidRequestError(
                f'{param} must be an object whose type is "text", "json_object", "json_schema", '
                '"regex" or "grammar"',
                param,
            )
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param} of type {kind} needs a schema, an object", param)
    return _named(param, json=schema)


def format_fields(body: ConstrainedRequest, wanted: Any, param: str) -> dict[str, Any]:
    """The same for a chat: fields of ``body``, and ``wanted``, a format that it has elsewhere,
    as ``param``. Raises :class:`InvalidRequestError`."""
    fields = {name: getattr(body, name) for name in ConstrainedRequest.model_fields}
    if wanted is not None:
        schema_of_format(wanted, param)  # refused under the name that it has here
        if body.response_format is not None:
            raise _both(param, "response_format")
        fields["response_format"] = wanted
    return fields
