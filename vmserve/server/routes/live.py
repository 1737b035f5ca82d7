"""The pages: the live one at ``/`` with its ``/v1/kv/live``, the API's description at ``/docs``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from importlib import resources
from typing import Any, Final
from weakref import WeakKeyDictionary

from starlette.requests import Request
from starlette.responses import Response

from vmserve.client.client import Client
from vmserve.errors import EngineDeadError
from vmserve.server.auth import Caller
from vmserve.server.context import ServerContext
from vmserve.server.models.rows import engine_rows, group_rows, model_row, pool_row
from vmserve.server.models.served import ServedModel
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.telemetry.kinds import kinds_in
from vmserve.telemetry.snapshot import (
    PAGE_MAPPED,
    PAGE_SHARED,
    PAGE_USES,
    EngineSnapshot,
    PoolMap,
    RequestSnapshot,
)
from vmserve.version import __version__

__all__ = ["LIVE_PAGE_PATHS", "LiveView", "Pages"]

#: Pages and their files, which are open and reveal nothing of the server: a page asks for the key.
LIVE_PAGE_PATHS: Final = frozenset(
    {"/", "/live.css", "/chat.css", "/live.js", "/chat.js", "/text.js", "/docs", "/docs.js"}
)
#: Least seconds between two questions to the engine, however many look on.
REFRESH_SECONDS: Final = 0.25
_FIRST_CELL: Final = ord("0")
#: Pool of a model that sleeps.
_NO_POOL: Final = PoolMap(0, 1, b"", {}, [])
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class _Snapshots:
    """One snapshot for all who look on, at most every :data:`REFRESH_SECONDS`."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine
        self._taken: tuple[float, EngineSnapshot] | None = None
        self._asked: asyncio.Task[EngineSnapshot] | None = None

    async def newest(self) -> tuple[float, EngineSnapshot]:
        """``time.monotonic()`` when it came, and the snapshot."""
        if self._taken is not None and time.monotonic() - self._taken[0] < REFRESH_SECONDS:
            return self._taken
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(self._engine.snapshot())
        # Shielded: whoever leaves must not take the answer from the others.
        snapshot = await asyncio.shield(self._asked)
        if self._taken is None or self._taken[1] is not snapshot:
            self._taken = (time.monotonic(), snapshot)
        return self._taken


class LiveView:
    """``GET /v1/kv/live``."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._snapshots: WeakKeyDictionary[ServedModel, _Snapshots] = WeakKeyDictionary()
        self._began = time.monotonic()

    async def data(self, request: Request) -> Response:
        """The pool page by page, slots, queues and the requests that have not ended.

        Of requests, only those of the caller's own key are shown; of all others, their number.
        """
        context = self._context
        served = context.models.find(request.query_params.get("model"))
        taken, snapshot = await self._newest(served)
        now = time.monotonic()
        caller: Caller = request.state.caller
        tenant = caller.name
        shown = [each for each in snapshot.requests if not tenant or each.tenant == tenant]
        engines = engine_rows(served) or group_rows(served)
        kinds = [asdict(kind) for kind in kinds_in(snapshot.stats)]
        reply = {
            "version": __version__,
            "model": served.name,
            "max_model_len": served.max_model_len if served.is_loaded else None,
            "uptime_seconds": now - self._began,
            "age_seconds": now - taken,
            "draining": context.lifecycle.draining,
            "num_active": context.lifecycle.num_active,
            "num_rejected": sum(each.num_rejected for each in context.models),
            "num_failed": context.lifecycle.num_failed,
            "latency": served.telemetry.recent.summary(),
            "stats": snapshot.stats,
            "pool": _pool(snapshot.pool),
            **({"kinds": kinds} if kinds else {}),
            **({"engines": engines} if engines else {}),
            **self._all_models(),
            "requests": [_row(each) for each in shown],
            "num_requests": snapshot.num_requests,
            "num_others": len(snapshot.requests) - len(shown),
        }
        return Response(
            dump_json(reply), media_type=JSON_TYPE, headers={"cache-control": "no-store"}
        )

    def _all_models(self) -> dict[str, Any]:
        """A row for each model, and the pool, on a server that may have several."""
        models = self._context.models
        if not models.have_states:
            return {}
        return {"models": [model_row(each) for each in models], "kv_pool": pool_row(models)}

    async def _newest(self, served: ServedModel) -> tuple[float, EngineSnapshot]:
        has_state = self._context.models.have_states
        if served.is_awake or not has_state:
            snapshots = self._snapshots.get(served)
            if snapshots is None:
                snapshots = self._snapshots[served] = _Snapshots(served.engine)
            try:
                return await snapshots.newest()
            except EngineDeadError:
                if not has_state and served.fleet is None:
                    raise
        return time.monotonic(), EngineSnapshot(served.stats(), _NO_POOL, [], 0)


def _row(request: RequestSnapshot) -> dict[str, Any]:
    row = asdict(request)
    del row["tenant"]  # whoever reads this knows their own
    return row


def _pool(pool: PoolMap) -> dict[str, Any]:
    """A cell is one character: its code, counted from "0"."""
    counts = dict.fromkeys(PAGE_USES, 0)
    for code, count in pool.codes.items():
        counts[PAGE_USES[code & 15]] += count
    return {
        "num_pages": pool.num_pages,
        "pages_per_cell": pool.pages_per_cell,
        "uses": PAGE_USES,
        "cells": bytes(code + _FIRST_CELL for code in pool.cells).decode(),
        "counts": counts,
        "num_shared": _marked(pool, PAGE_SHARED),
        "num_mapped": _marked(pool, PAGE_MAPPED),
        "slots": pool.slots,
    }


def _marked(pool: PoolMap, bit: int) -> int:
    return sum(count for code, count in pool.codes.items() if code & bit)


class Pages:
    """The pages' files by path; ``needs_key``: whether a page asks for a key before anything."""

    _FILES: Final = {
        "/": ("index.html", "text/html"),
        "/live.css": ("live.css", "text/css"),
        "/chat.css": ("chat.css", "text/css"),
        "/live.js": ("live.js", "text/javascript"),
        "/chat.js": ("chat.js", "text/javascript"),
        "/text.js": ("text.js", "text/javascript"),
        "/docs": ("docs.html", "text/html"),
        "/docs.js": ("docs.js", "text/javascript"),
    }

    def __init__(self, *, needs_key: bool) -> None:
        self._replies = {
            path: (_read(name, needs_key), media_type)
            for path, (name, media_type) in self._FILES.items()
        }

    def handlers(self) -> Iterator[tuple[str, Callable[[Request], Awaitable[Response]]]]:
        for path, (content, media_type) in self._replies.items():
            yield path, _file(content, media_type)


def _file(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return answer


def _read(name: str, needs_key: bool) -> bytes:
    content = resources.files("vmserve").joinpath("assets", "live", name).read_bytes()
    return content.replace(b'data-key="none"', b'data-key="required"', 1) if needs_key else content
