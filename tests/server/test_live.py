"""The live page's files, and the data behind it."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.helpers import until
from tests.server.conftest import Running
from tests.support.serving import COMPLETIONS, Patch, Start, bearer, later, pause, refused
from vmserve.server.observe.recent import RecentLatencies
from vmserve.server.routes.live import LIVE_PAGE_PATHS
from vmserve.telemetry.snapshot import PAGE_USES
from vmserve.testing import ScriptedTransport
from vmserve.types import RequestMetrics

LIVE = "/v1/kv/live"


def live(server: Running, key: str = "") -> dict[str, Any]:
    response = server.http.get(LIVE, headers=bearer(key) if key else {})
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "no-store"
    data: dict[str, Any] = response.json()
    return data


class _Links(HTMLParser):
    """What a page loads, and whether it has code or style of its own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads |= {given[name] or "" for name in ("src", "href") if name in given}
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name[:2] == "on"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


def test_pages_load_their_own_files_only(shared: Running) -> None:
    for path, loads in (
        ("/", {"live.css", "chat.css", "live.js", "data:,", "docs"}),
        ("/docs", {"live.css", "docs.js", "data:,", "openapi.json"}),
    ):
        links = _Links(shared.http.get(path).text)
        assert (links.loads, links.inline) == (loads, [])
    assert 'data-key="none"' in shared.http.get("/").text
    assert "http" not in shared.http.get("/docs.js").text


def test_files_have_a_type_and_a_policy(shared: Running) -> None:
    kinds = {"css": "text/css", "js": "text/javascript"}
    files = {"/", "/docs", "/docs.js", "/live.css", "/live.js", "/chat.css", "/chat.js", "/text.js"}
    assert files == LIVE_PAGE_PATHS
    for path in files:
        response = shared.http.get(path)
        media_type = kinds.get(path.rpartition(".")[2], "text/html")
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
    refused(server.http.get(LIVE), 401)


def test_under_a_root_path(start: Start) -> None:
    server = start(root_path="/llm")
    redirect = server.http.get("/llm")
    assert (redirect.status_code, redirect.headers["location"]) == (308, "/llm/")
    assert server.http.get("/llm/").text == server.http.get("/").text
    for path in ("/live.js", LIVE):
        assert server.http.get(f"/llm{path}").status_code == 200


def test_the_data(start: Start) -> None:
    server = start()
    server.complete()
    data = live(server)
    assert data["stats"] == server.http.get("/v1/kv").json()
    seen = dict.fromkeys(("absent", "free", "virtual", "cached"), 1)
    assert data["pool"] == {
        "num_pages": 4,
        "pages_per_cell": 1,
        "uses": list(PAGE_USES),
        "cells": "01b5",
        "counts": {**dict.fromkeys(PAGE_USES, 0), **seen},
        "num_shared": 1,
        "num_mapped": 1,
        "slots": [[2, 1]],
    }
    assert (data["model"], data["max_model_len"], data["draining"]) == ("fake", 256, False)
    # The toy's requests arrive at 10.0 s, have a token at 11.0 s and six by 13.0 s.
    latencies = dict.fromkeys(("ttft_p50", "ttft_p95", "ttft_p99"), 1.0)
    latencies |= dict.fromkeys(("itl_p50", "itl_p95", "itl_p99"), pytest.approx(0.4))
    assert data["latency"] == {"window_seconds": 60, "num_requests": 1, **latencies}
    assert (data["requests"], data["num_requests"], data["num_others"]) == ([], 0, 0)


def test_kinds_of_layers_where_there_are_several(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    assert "kinds" not in live(server)
    figures = {"page_bytes": 4096, "used_pages": 3, "cached_pages": 2, "free_pages": 1}
    kinds = {f"kv_kind:window 32:{name}": number for name, number in figures.items()}
    told = engine.stats() | kinds
    engine.stats = lambda: told  # type: ignore[method-assign]
    until(lambda: "kinds" in live(server))
    assert live(server)["kinds"] == [{"name": "window 32", **figures}]


@pytest.fixture
def hold(start: Start) -> Callable[..., tuple[Running, Callable[..., None], Callable[[], None]]]:
    """Starts a server; returns it, what sends requests that it holds, and what lets them go on."""

    def begin(**options: Any) -> tuple[Running, Callable[..., None], Callable[[], None]]:
        engine = ScriptedTransport()
        server = start(engine, **options)
        go_on = pause(server, engine, after=0)

        def ask(key: str = "", **body: Any) -> None:
            before = len(engine.running)
            headers = bearer(key) if key else {}
            later(server.post, COMPLETIONS, {"prompt": "Hi", **body}, headers=headers)
            until(lambda: len(engine.running) > before)

        return server, ask, go_on

    return begin


def test_requests_are_listed_without_their_text(hold: Any) -> None:
    server, ask, go_on = hold()
    ask(request_id="mine", prompt="a very secret prompt", user="someone")
    text = server.http.get(LIVE).text
    [request] = live(server)["requests"]
    go_on()
    assert request["request_id"].startswith("cmpl-mine")
    assert (request["regime"], request["reason"]) == ("virtual", "kernels")
    assert request["costs"] == {"virtual": 0.001, "paged": 0.002}
    assert request["num_prompt_tokens"] == 21
    assert "tenant" not in request
    assert "secret" not in text
    assert "someone" not in text


def test_a_key_sees_its_own_requests_only(hold: Any) -> None:
    server, ask, go_on = hold(api_keys=("one", "two"))
    ask("one", request_id="of-one")
    ask("two", request_id="of-two-a", user="key-0")
    ask("two", request_id="of-two-b")
    one, two = (live(server, key) for key in ("one", "two"))
    go_on()
    for seen, ids, num_others in ((one, ["of-one"], 2), (two, ["of-two"] * 2, 1)):
        assert [row["request_id"][5:11] for row in seen["requests"]] == ids
        assert (seen["num_others"], seen["num_requests"]) == (num_others, 3)
    assert "of-two" not in str(one)


def test_many_who_look_on_cost_one_snapshot(start: Start, monkeypatch: Patch) -> None:
    monkeypatch.setattr("vmserve.server.routes.live.REFRESH_SECONDS", 1000.0)
    engine = ScriptedTransport()
    server = start(engine)
    for _ in range(5):
        live(server)
    assert engine.num_snapshots == 1


def test_failures_are_counted_in_streams_too_and_a_dead_engine_is_an_error(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    server.complete()
    server.error(COMPLETIONS, {"prompt": "x", "n": 0})  # the client's own fault
    assert live(server)["num_failed"] == 0
    engine.fail = RuntimeError("a defect")
    server.error(COMPLETIONS, {"prompt": "x"}, 500)
    assert "error" in list(server.events(COMPLETIONS, {"prompt": "x"}))[-1]
    until(lambda: live(server)["num_failed"] == 2)
    metrics = server.http.get("/metrics").text
    assert 'vmserve:request_failures_total{engine="0",model_name="fake"} 2.0' in metrics
    engine.facts.is_dead = True
    until(lambda: server.http.get(LIVE).status_code == 503)  # after what was kept of before
    refused(server.http.get(LIVE), 503)
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
