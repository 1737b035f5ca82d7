"""The live page's files, and the data behind it."""

import asyncio
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Running, error_of
from vmserve.server.observe.recent import RecentLatencies
from vmserve.server.routes.live import LIVE_PAGE_PATHS
from vmserve.telemetry.snapshot import PAGE_USES
from vmserve.testing import ScriptedTransport
from vmserve.types import RequestMetrics

Start = Callable[..., Running]


def live(server: Running, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = server.http.get("/v1/kv/live", headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    data: dict[str, Any] = response.json()
    return data


class _Links(HTMLParser):
    """What a page loads, and whether it has code or style of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads |= {given[name] or "" for name in ("src", "href") if name in given}
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name[:2] == "on"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_the_page_loads_its_own_files_only(shared: Running) -> None:
    page = shared.http.get("/")
    links = _Links()
    links.feed(page.text)
    assert links.loads == {"live.css", "chat.css", "live.js", "data:,", "docs"}
    assert links.inline == []
    assert 'data-key="none"' in page.text


def test_the_description_of_the_api_needs_nothing_from_elsewhere(shared: Running) -> None:
    page = shared.http.get("/docs")
    links = _Links()
    links.feed(page.text)
    assert links.loads == {"live.css", "docs.js", "data:,", "openapi.json"}
    assert links.inline == []
    assert "http" not in shared.http.get("/docs.js").text


def test_files_have_a_type_and_a_policy(shared: Running) -> None:
    types = {"/": "text/html", "/live.css": "text/css", "/live.js": "text/javascript"}
    types |= {"/chat.css": "text/css", "/chat.js": "text/javascript", "/text.js": "text/javascript"}
    types |= {"/docs": "text/html", "/docs.js": "text/javascript"}
    assert types.keys() == LIVE_PAGE_PATHS
    for path, media_type in types.items():
        response = shared.http.get(path)
        assert response.headers["content-type"] == f"{media_type}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy


def test_the_page_of_a_server_with_keys_asks_for_one(start: Start) -> None:
    server = start(api_keys=("secret-one", "secret-two"))
    for path in LIVE_PAGE_PATHS:
        response = server.http.get(path)
        assert response.status_code == 200
        assert "secret" not in response.text
    for page in ("/", "/docs"):
        assert 'data-key="required"' in server.http.get(page).text
    assert error_of(server.http.get("/v1/kv/live"))["status"] == 401


def test_under_a_root_path(start: Start) -> None:
    server = start(root_path="/llm")
    redirect = server.http.get("/llm")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "/llm/")
    assert server.http.get("/llm/").text == server.http.get("/").text
    assert server.http.get("/llm/live.js").status_code == 200
    assert server.http.get("/llm/v1/kv/live").status_code == 200


def test_the_data(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    server.complete()
    data = live(server)
    assert data["stats"] == server.http.get("/v1/kv").json()
    assert data["pool"] == {
        "num_pages": 4,
        "pages_per_cell": 1,
        "uses": list(PAGE_USES),
        "cells": "01b5",
        "counts": {
            **dict.fromkeys(PAGE_USES, 0),
            "absent": 1,
            "free": 1,
            "virtual": 1,
            "cached": 1,
        },
        "num_shared": 1,
        "num_mapped": 1,
        "slots": [[2, 1]],
    }
    assert (data["model"], data["max_model_len"], data["draining"]) == ("fake", 256, False)
    # The toy's requests arrive at 10.0 s, have a token at 11.0 s and six by 13.0 s.
    assert data["latency"] == {
        "window_seconds": 60,
        "num_requests": 1,
        "ttft_p50": 1.0,
        "ttft_p95": 1.0,
        "ttft_p99": 1.0,
        "itl_p50": pytest.approx(0.4),
        "itl_p95": pytest.approx(0.4),
        "itl_p99": pytest.approx(0.4),
    }
    assert (data["requests"], data["num_requests"], data["num_others"]) == ([], 0, 0)


def test_kinds_of_layers_where_there_are_several(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    assert "kinds" not in live(server)
    plain = engine.stats()
    figures = {"page_bytes": 4096, "used_pages": 3, "cached_pages": 2, "free_pages": 1}
    kinds = {f"kv_kind:window 32:{name}": number for name, number in figures.items()}
    engine.stats = lambda: {**plain, **kinds}  # type: ignore[method-assign]
    until(lambda: "kinds" in live(server))
    assert live(server)["kinds"] == [{"name": "window 32", **figures}]


class _Held:
    """Servers whose requests stay until the test has looked at them."""

    def __init__(self, start: Start, **options: Any) -> None:
        self.engine = ScriptedTransport()
        self.engine.pause_after = 0
        self.server = start(self.engine, **options)
        self.engine.pause = self.server.on_loop(asyncio.Event)
        self._clients: list[httpx.Client] = []

    def ask(self, key: str = "", **body: Any) -> None:
        client = httpx.Client(base_url=self.server.url, timeout=30)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = client.build_request(
            "POST",
            "/v1/completions",
            json={"prompt": "Hi", "stream": True, **body},
            headers=headers,
        )
        before = len(self.engine.running)
        client.send(request, stream=True)
        until(lambda: len(self.engine.running) > before)
        self._clients.append(client)

    def close(self) -> None:
        self.server.on_loop(self.engine.pause.set)
        for client in self._clients:
            client.close()


def test_requests_are_listed_without_their_text(start: Start) -> None:
    held = _Held(start)
    held.ask(request_id="mine", prompt="a very secret prompt", user="someone")
    text = held.server.http.get("/v1/kv/live").text
    [request] = live(held.server)["requests"]
    held.close()
    assert request["request_id"].startswith("cmpl-mine")
    assert (request["regime"], request["reason"]) == ("virtual", "kernels")
    assert request["costs"] == {"virtual": 0.001, "paged": 0.002}
    assert request["num_prompt_tokens"] == 21
    assert "tenant" not in request
    assert "secret" not in text
    assert "someone" not in text


def test_a_key_sees_its_own_requests_only(start: Start) -> None:
    held = _Held(start, api_keys=("one", "two"))
    held.ask("one", request_id="of-one")
    held.ask("two", request_id="of-two-a", user="key-0")
    held.ask("two", request_id="of-two-b")
    seen = {key: live(held.server, key) for key in ("one", "two")}
    held.close()
    ids = {key: [row["request_id"][:11] for row in seen[key]["requests"]] for key in seen}
    assert ids == {"one": ["cmpl-of-one"], "two": ["cmpl-of-two", "cmpl-of-two"]}
    assert [seen[key]["num_others"] for key in ("one", "two")] == [2, 1]
    assert [seen[key]["num_requests"] for key in ("one", "two")] == [3, 3]
    assert "of-two" not in str(seen["one"])


def test_many_who_look_on_cost_one_snapshot(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmserve.server.routes.live.REFRESH_SECONDS", 1000.0)
    engine = ScriptedTransport()
    server = start(engine)
    for _ in range(5):
        live(server)
    assert engine.num_snapshots == 1


def test_failures_are_counted_in_streams_too(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    server.complete()
    server.error("/v1/completions", {"prompt": "x", "n": 0})  # the client's own fault
    assert live(server)["num_failed"] == 0
    engine.fail = RuntimeError("a defect")
    server.error("/v1/completions", {"prompt": "x"}, 500)
    assert "error" in list(server.events("/v1/completions", {"prompt": "x"}))[-1]
    until(lambda: live(server)["num_failed"] == 2)
    metrics = server.http.get("/metrics").text
    assert 'vmserve:request_failures_total{engine="0",model_name="fake"} 2.0' in metrics


def test_a_dead_engine_is_an_error(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    engine.facts.is_dead = True
    assert error_of(server.http.get("/v1/kv/live"))["status"] == 503
    assert server.http.get("/").status_code == 200


def test_latencies_of_the_last_minute() -> None:
    now = 0.0
    recent = RecentLatencies(lambda: now)

    def ended(ttft: float, gap: float) -> RequestMetrics:
        last = 5.0 + ttft + 10 * gap
        return RequestMetrics(5.0, first_token_time=5.0 + ttft, last_token_time=last)

    assert recent.summary()["ttft_p50"] is None
    recent.observe(ended(100.0, 100.0), 11)
    now = 60.5
    for ttft in range(1, 102):
        recent.observe(ended(float(ttft), ttft / 100), 11)
    recent.observe(RequestMetrics(5.0), 0)  # it was aborted before its first token
    assert recent.summary() == {
        "window_seconds": 60,
        "num_requests": 102,
        "ttft_p50": 51.0,
        "ttft_p95": pytest.approx(96.0),
        "ttft_p99": pytest.approx(100.0),
        "itl_p50": pytest.approx(0.51),
        "itl_p95": pytest.approx(0.96),
        "itl_p99": pytest.approx(1.0),
    }
