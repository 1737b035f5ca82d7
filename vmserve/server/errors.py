"""Turn exceptions into ``{"error": {message, type, param, code, status}}``, or into
Anthropic's ``{"type": "error", "error": {type, message}}`` for its routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from vmserve.errors import (
    ChatTemplateError,
    DeadlineError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
    PromptTooLongError,
    RankLostError,
    UnsupportedError,
)
from vmserve.server.limits import MAX_MESSAGE_BYTES
from vmserve.server.wire import JSON_TYPE, dump_json

__all__ = [
    "CODES",
    "ApiError",
    "ClientDisconnectedError",
    "UnservedError",
    "anthropic_error_body",
    "below_minimum",
    "error_body",
    "error_response",
    "has_anthropic_errors",
    "not_implemented",
    "to_api_error",
]

logger = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "authentication_error",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "RequestHeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

#: Values of ``error.code``: one of OpenAI's strings, which clients compare, or None (decision
#: 0087).
CODES: Final = (
    "context_length_exceeded",
    "invalid_api_key",
    "invalid_type",
    "invalid_value",
    "missing_required_parameter",
    "model_not_found",
    "rate_limit_exceeded",
    "unsupported_parameter",
)
#: Codes of errors that name none themselves.
_CODES_BY_STATUS: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded"}

#: Anthropic's names of errors; other statuses are an "api_error".
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An HTTP error. ``status``: of HTTP. ``code``: one of :data:`CODES`; None: by the status."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        self.code = code or _CODES_BY_STATUS.get(status)


class ClientDisconnectedError(Exception):
    """The client left: there is no one to answer."""


class UnservedError(InvalidRequestError):
    """A field that is known and not served."""


def not_implemented(what: str, param: str, remedy: str) -> UnservedError:
    """Make the error for a field that may be served later."""
    return UnservedError(f"{what} is not implemented yet: {remedy}", param)


def below_minimum(name: str, least: int, value: int) -> InvalidRequestError:
    """Make an error with pydantic's wording, for a bound that depends on other fields."""
    return InvalidRequestError(
        f"{name} must be at least {least}: Input should be greater than or equal to {least} "
        f"(greater_than_equal), got {value}",
        name,
    )


def to_api_error(error: BaseException) -> ApiError:
    """Convert an exception to the client's error; log details of internal errors."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _from_validation(error)
        case InvalidRequestError():
            return ApiError(400, str(error), error.param, code=_code_of(error))
        case UnsupportedError():
            return ApiError(400, str(error))
        case ChatTemplateError():  # of the model's own: the start has warned of it
            return ApiError(400, str(error), "messages")
        case StarletteHTTPException():
            return _from_routing(error)
        case RankLostError():
            return ApiError(503, f"The engine has stopped and cannot serve requests: {error}.")
        case EngineDeadError():
            return ApiError(503, "The engine has stopped and cannot serve requests.")
        case DeadlineError():
            return ApiError(504, str(error))
        case OutOfMemoryError():
            return ApiError(503, str(error), headers={"retry-after": "1"})
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The server failed to handle this request; its log says why.")


def error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": _shorten(error.message),
            "type": _TYPES.get(error.status) or HTTPStatus(error.status).phrase.replace(" ", ""),
            "param": error.param,
            "code": error.code,
            "status": error.status,
        }
    }


def anthropic_error_body(error: ApiError) -> dict[str, Any]:
    name = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": name, "message": _shorten(error.message)}}


def has_anthropic_errors(path: str) -> bool:
    """Whether errors of the route ``path`` have Anthropic's shape, which its clients read."""
    return path.startswith("/v1/messages")


def error_response(error: BaseException, path: str = "") -> Response:
    """Make the response in the shape of the API of ``path``."""
    found = to_api_error(error)
    shape = anthropic_error_body if has_anthropic_errors(path) else error_body
    return Response(
        dump_json(shape(found)), found.status, headers=found.headers, media_type=JSON_TYPE
    )


def _code_of(error: InvalidRequestError) -> str | None:
    match error:
        case PromptTooLongError():
            return "context_length_exceeded"
        case UnservedError():
            return "unsupported_parameter"
        case _:
            return "invalid_value" if error.param else None


def _shorten(text: str) -> str:
    shortened = text
    while len(dump_json(shortened)) > MAX_MESSAGE_BYTES:
        shortened = shortened[: len(shortened) * 3 // 4]
    return shortened if shortened == text else f"{shortened}…"


def _from_routing(error: StarletteHTTPException) -> ApiError:
    messages = {
        404: "There is no such route; /openapi.json lists those that exist.",
        405: "This route does not have this method.",
    }
    message = messages.get(error.status_code, HTTPStatus(error.status_code).phrase)
    return ApiError(error.status_code, message, headers=error.headers)


def _from_validation(error: ValidationError) -> ApiError:
    details = error.errors(include_url=False)
    names = [_field_name(detail["loc"]) for detail in details]
    texts = [
        _describe(name, dict(detail)) for name, detail in zip(names[:3], details[:3], strict=True)
    ]
    if len(details) > len(texts):
        texts.append(f"and {len(details) - len(texts)} more")
    code = "invalid_value"
    if details[0]["type"] == "missing":
        code = "missing_required_parameter"
    elif details[0]["type"].endswith("_type"):
        code = "invalid_type"
    param = names[0] or None
    return ApiError(400, "; ".join(texts), param, code=code if param else None)


def _field_name(loc: tuple[int | str, ...]) -> str:
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name else ''}{part}"
    return name[:80]


def _describe(name: str, detail: dict[str, Any]) -> str:
    """Field, bound and pydantic's name of the constraint; the value only if it is a number."""
    context = detail.get("ctx", {})
    message = detail["msg"]
    match detail["type"]:
        case "greater_than_equal":
            lead = f"{name} must be at least {_plain(context['ge'])}"
        case "less_than_equal":
            lead = f"{name} must be at most {_plain(context['le'])}"
        case _:
            lead = name
    value = detail.get("input")
    got = f", got {value}" if isinstance(value, int | float) and len(str(value)) < 40 else ""
    text = f"{message} ({detail['type']}){got}"
    return f"{lead}: {text}" if lead else text


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
