"""A model with several engines: health, figures of each, and routes that change them."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from tests.client.test_fleet import Engine, fleet_of
from tests.server.conftest import Running, error_of
from vmserve.cli.top import Screen

Start = Callable[..., Running]
ADMIN = {"authorization": "Bearer admin"}
BODY = {"prompt": "hi", "max_tokens": 20}


def test_health_is_good_while_one_engine_serves_and_says_which_are_down(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other))
    one.kill()
    reply = server.http.get("/health")
    assert (reply.status_code, reply.json()) == (
        200,
        {"engines": {"fake": {"0": "down", "1": "ready"}}},
    )
    assert server.ok("/v1/completions", BODY)["choices"][0]["text"] == "hello"
    other.kill()
    assert server.http.get("/health").status_code == 503


def test_figures_are_told_of_each_engine_and_of_the_router(start: Start) -> None:
    server = start(fleet_of(Engine(), Engine()))
    server.ok("/v1/completions", BODY)
    found = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    }
    assert found["vmserve:prompt_tokens_total", "0"] == 7
    assert found["vmserve:prompt_tokens_total", "1"] == 7
    assert found["vmserve:router_choices_total", ""] == 1
    assert found["vmserve:engine_up", "1"] == 1
    assert found["vmserve:e2e_request_latency_seconds_count", ""] == 1
    live = server.http.get("/v1/kv/live").json()
    assert [(row["id"], row["state"]) for row in live["engines"]] == [
        ("0", "ready"),
        ("1", "ready"),
    ]
    assert live["stats"]["prompt_tokens_total"] == 14
    screen = Screen()
    screen.take(live, 0.0)
    written = io.StringIO()
    Console(width=100, file=written).print(screen)
    assert "engine  state" in written.getvalue()


def test_engines_are_drained_resumed_and_removed_with_the_admin_key(start: Start) -> None:
    one, other = Engine(), Engine()
    server = start(fleet_of(one, other), admin_api_key="admin", api_keys=("user",))

    def post(what: str, headers: dict[str, str] = ADMIN) -> tuple[int, list[str]]:
        reply = server.http.post(f"/v1/engines/{what}", headers=headers)
        rows = reply.json().get("engines", ())
        return reply.status_code, [row["state"] for row in rows]

    assert post("0/drain", {"authorization": "Bearer user"}) == (401, [])
    assert post("0/drain") == (200, ["draining", "ready"])
    for _ in range(3):
        reply = server.post("/v1/completions", BODY, headers={"authorization": "Bearer user"})
        assert reply.status_code == 200
    assert (len(one.requests), len(other.requests)) == (0, 3)
    refused = server.http.post("/v1/engines/1/drain", headers=ADMIN)
    assert refused.status_code == 400
    assert "no other engine takes requests" in error_of(refused)["message"]
    assert post("0/resume") == (200, ["ready", "ready"])
    assert post("7/drain")[0] == 404
    assert post("1/remove") == (200, ["ready"])
    assert other.stopped
    assert post("0/remove")[0] == 400
    assert not one.stopped


@pytest.mark.parametrize("what", ["drain", "resume", "remove"])
def test_a_model_of_one_engine_has_none_by_id(start: Start, what: str) -> None:
    server = start(admin_api_key="admin")
    assert server.http.post(f"/v1/engines/0/{what}", headers=ADMIN).status_code == 404
    assert server.http.get("/health").content == b""
