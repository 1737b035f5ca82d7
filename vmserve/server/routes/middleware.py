"""What every HTTP request passes on its way to a route, outermost first.

All three are plain ASGI: a streaming response runs inside them until its last byte.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections import Counter
from typing import Final
from urllib.parse import urlsplit

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vmserve.server.access.admission import BodyBytes, Visit
from vmserve.server.access.origins import OriginPolicy
from vmserve.server.access.scope import route_path
from vmserve.server.auth import Caller, KeyRing
from vmserve.server.errors import ApiError, ClientDisconnectedError, error_response
from vmserve.server.lifecycle import Lifecycle
from vmserve.server.limits import MAX_HEADER_BYTES, SIZES
from vmserve.server.net.idle import IdleWork
from vmserve.server.routes.admin import ADMIN_PATHS, ENGINE_PATHS, MODEL_PATHS
from vmserve.server.routes.live import LIVE_PAGE_PATHS
from vmserve.system.logs import request_id as log_request_id

__all__ = ["GENERATION_PATHS", "Boundary", "Gate", "RequestScope"]

logger = logging.getLogger(__name__)

GENERATION_PATHS: Final = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
        "/invocations",
    }
)
#: Routes that clients with a base URL without ``/v1`` ask for.
_WITHOUT_VERSION: Final = frozenset(
    {
        "/chat/completions",
        "/completions",
        "/embeddings",
        "/messages",
        "/messages/count_tokens",
        "/models",
        "/responses",
        "/responses/input_tokens",
    }
)
_BELOW_WITHOUT_VERSION: Final = ("/models/", "/responses/")
#: Paths for operators, which must be answered while requests drain.
_ANSWERED_WHILE_DRAINING: Final = (
    frozenset({"/live", "/metrics", "/load", "/v1/kv", "/v1/kv/live", "/version"}) | LIVE_PAGE_PATHS
)
_ALWAYS_OPEN: Final = frozenset({"/health", "/live"}) | LIVE_PAGE_PATHS
#: Headers that identify the caller.
_ONCE: Final = (b"authorization", b"x-api-key", b"host", b"origin")
_STATUS_PATHS: Final = frozenset({"/ping", "/ready", "/version"})


class Boundary:
    """Names the request (``x-request-id``), and turns whatever escapes into a JSON error.

    Routes are found with ``root_path`` before them and without. Counts failures in ``lifecycle``.
    """

    def __init__(self, app: ASGIApp, *, root_path: str, lifecycle: Lifecycle) -> None:
        self._app = app
        self._root_path = root_path
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not scope["path"].startswith("/"):
            _take_apart(scope)
        if self._root_path and scope["path"] == self._root_path:
            # Without the slash, what the live page asks for would leave out the root path.
            await RedirectResponse(f"{self._root_path}/", 308)(scope, receive, send)
            return
        given = _header(scope, b"x-request-id")
        usable = given is not None and _usable_id(given)
        request_id = given if given is not None and usable else uuid.uuid4().hex
        scope["root_path"] = self._root_path
        if route_path(scope) != "/" and scope["path"].endswith("/"):
            # Clients append one to a base URL.
            scope["path"] = scope["path"].rstrip("/") or "/"
        path = route_path(scope)
        if path in _WITHOUT_VERSION or path.startswith(_BELOW_WITHOUT_VERSION):
            scope["path"] = f"{scope['path'].removesuffix(path)}/v1{path}"
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}
        log_request_id.set(request_id)  # in this task alone: each request has its own
        began = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = (b"x-request-id", request_id.encode()), *scope["state"].get("headers", ())
                headers = [*message.get("headers", []), *ours]
                message = {**message, "headers": headers}
            await send(message)

        try:
            if given is not None and not usable:
                raise ApiError(
                    400,
                    f"x-request-id must have 1 to {SIZES['request_id'][1]} "
                    "printable ASCII characters.",
                    "x-request-id",
                )
            await self._app(scope, receive, send_with_id)
        except ClientDisconnectedError:
            return
        except Exception as error:  # the server's boundary: nothing above it can answer
            if status:
                raise
            await error_response(error, route_path(scope))(scope, receive, send_with_id)
        finally:
            outcome = scope["state"].get("stream_error", status)
            if outcome >= 500 and route_path(scope) in GENERATION_PATHS:
                self._lifecycle.num_failed += 1
                if (served := scope["state"].get("model")) is not None:
                    served.lifecycle.num_failed += 1
            _log(scope, status, time.monotonic() - began)


class Gate:
    """Lets in whoever has a key and comes from where one may, while the server takes requests.

    Their :class:`Visit` ends here.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        admin_keys: KeyRing | None,
        lifecycle: Lifecycle,
        origins: OriginPolicy,
        bodies: BodyBytes,
        idle: IdleWork,
        open_status_routes: bool,
    ) -> None:
        self._app = app
        self._origins = origins
        self._keys = keys
        self._admin_keys = admin_keys or keys
        self._bodies = bodies
        self._idle = idle
        self._lifecycle = lifecycle
        self._open_paths = _ALWAYS_OPEN | (_STATUS_PATHS if open_status_routes else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._check(scope)
        visit = scope["state"]["visit"] = Visit(_tenant(scope))
        try:
            await self._app(scope, receive, send)
        finally:
            if visit.num_bytes:
                self._idle.note()
            self._bodies.release(visit)

    def _check(self, scope: Scope) -> None:
        path = route_path(scope)
        _check_head(scope)
        self._origins.check(scope)
        # A preflight carries no key; an OPTIONS request to a route gets a 405 like any other.
        if scope["method"] != "OPTIONS" and path not in self._open_paths:
            headers = dict(scope["headers"])
            authorization = headers.get(b"authorization")
            if authorization is None and b"x-api-key" in headers:  # as Anthropic's clients send it
                authorization = b"Bearer " + headers[b"x-api-key"]
            is_admin = (
                path in ADMIN_PATHS
                or path.startswith(ENGINE_PATHS)
                or (path in MODEL_PATHS and scope["method"] == "POST")
            )
            caller = (self._admin_keys if is_admin else self._keys).caller(authorization)
            if caller is None:
                raise ApiError(
                    401,
                    f"This {'route needs the admin' if is_admin else 'server needs an API'} key: "
                    "send it as 'Authorization: Bearer <key>'.",
                    headers={"www-authenticate": "Bearer"},
                )
            scope["state"]["caller"] = caller
        if self._lifecycle.draining and path not in _ANSWERED_WHILE_DRAINING:
            raise ApiError(
                503,
                "The server is shutting down and takes no new requests.",
                headers={"retry-after": "5", "connection": "close"},
            )


class RequestScope:
    """Counts generation requests, and closes at their end what they opened.

    Handlers put what must end with the request on ``request.state.exit_stack``.
    """

    def __init__(self, app: ASGIApp, *, lifecycle: Lifecycle) -> None:
        self._app = app
        self._lifecycle = lifecycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            if route_path(scope) in GENERATION_PATHS:
                stack.enter_context(self._lifecycle.serving())
            scope["state"]["exit_stack"] = stack
            await self._app(scope, receive, send)


def _take_apart(scope: Scope) -> None:
    """Of a request line with a whole URL, as for a proxy: the path, and the host, which counts in
    place of the header (RFC 9112, section 3.2.2)."""
    url = urlsplit(scope["path"])
    if url.scheme in ("http", "https") and url.netloc:
        scope["path"] = url.path or "/"
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [*others, (b"host", url.netloc.encode("latin-1"))]


def _tenant(scope: Scope) -> str:
    caller: Caller | None = scope["state"].get("caller")
    if caller is not None and caller.name:
        return caller.name
    client = scope.get("client")
    return client[0] if client else ""


def _log(scope: Scope, status: int, seconds: float) -> None:
    """One line per request: at level INFO for what generates and what fails, else DEBUG."""
    outcome = "left" if status == 0 else str(status)
    matters = status >= 400 or status == 0 or route_path(scope) in GENERATION_PATHS
    # The path is the client's: as ASCII, nothing in it can pass for a line of ours.
    path = ascii(scope["path"][:200])
    level = logging.INFO if matters else logging.DEBUG
    logger.log(level, "%s %s: %s after %.3f s", scope["method"], path, outcome, seconds)


def _check_head(scope: Scope) -> None:
    size = sum(len(name) + len(value) for name, value in scope["headers"])
    size += len(scope["raw_path"]) + len(scope["query_string"])
    if size > MAX_HEADER_BYTES:
        raise ApiError(431, f"The request's head is larger than {MAX_HEADER_BYTES} bytes.")
    names = Counter(name for name, _ in scope["headers"])
    for name in _ONCE:
        if names[name] > 1:
            # What stands between us and the client may have gone by the other one.
            raise ApiError(400, f"There are {names[name]} {name.decode()} headers: send one.")
    if {b"content-length", b"transfer-encoding"} <= names.keys():
        raise ApiError(
            400,
            "Content-Length and Transfer-Encoding exclude each other.",
            headers={"connection": "close"},
        )


def _header(scope: Scope, name: bytes) -> str | None:
    value: bytes | None = dict(scope["headers"]).get(name)
    return None if value is None else value.decode("latin-1")


def _usable_id(text: str) -> bool:
    least, most = SIZES["request_id"]
    return least <= len(text) <= most and text.isascii() and text.isprintable()
