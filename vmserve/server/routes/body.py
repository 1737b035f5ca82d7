"""Read and check a request's body: media type, size, time, JSON, model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from vmserve.errors import InvalidRequestError
from vmserve.server.access.admission import Visit
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError, ClientDisconnectedError
from vmserve.server.limits import BODY_TIMEOUT_SECONDS, MAX_BODY_BYTES
from vmserve.server.wire import JSON_TYPE, parse_json
from vmserve.server.words.protocol import RequestModel

__all__ = ["MOST_BYTES_ON_LOOP", "read_json", "read_model"]

Model = TypeVar("Model", bound=RequestModel)
T = TypeVar("T")

#: Bytes above which bodies are parsed by a thread, or by another process.
MOST_BYTES_ON_LOOP: Final = 16 * 1024


async def read_model(request: Request, model: type[Model]) -> Model:
    """Read the body as ``model``.

    Raises :class:`ApiError` (408, 413, 415), :class:`InvalidRequestError` and pydantic's
    ``ValidationError``.
    """
    return await _understand(request, lambda value: model.model_validate(_object(value)))


async def read_json(request: Request) -> dict[str, Any]:
    """Read the body, which must be a JSON object. Errors: those of :func:`read_model`."""
    return await _understand(request, _object)


async def _understand(request: Request, parse: Callable[[Any], T]) -> T:
    """Parse the body's JSON; a large one in another process, so that streams go on."""
    context: ServerContext = request.app.state.context
    body = await _receive(request, context)
    if len(body) <= MOST_BYTES_ON_LOOP:
        return parse(parse_json(body))
    return await context.run_aside(request, lambda: parse(context.processes.parse(body)))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError("The request body must be a JSON object")
    return value


async def _receive(request: Request, context: ServerContext) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_TYPE:
        raise ApiError(415, f"Send the request body as {JSON_TYPE}: no other type is read.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        # Unpacked, a small body could be of any size.
        raise ApiError(415, "Send the request body without Content-Encoding: it is not unpacked.")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _read(request, context)
    except TimeoutError as error:
        raise ApiError(
            408,
            f"The request body did not arrive within {BODY_TIMEOUT_SECONDS:g} seconds.",
            headers={"connection": "close"},
        ) from error
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error


async def _read(request: Request, context: ServerContext) -> bytes:
    visit: Visit = request.state.visit
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        if int(length) > MAX_BODY_BYTES:
            raise _too_large()
        context.bodies.grow(visit, int(length))
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if len(body) > visit.num_bytes:
            context.bodies.grow(visit, len(body) - visit.num_bytes)
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.")
