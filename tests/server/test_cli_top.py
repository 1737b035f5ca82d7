"""``vmserve top``: what it prints of a running server, and how it says that one is away."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from rich.console import Console

from tests.server.conftest import Running
from tests.support.serving import Patch, Said, Start, drawn, http_server
from vmserve.cli.top import Monitor, Screen, top_command
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.telemetry.snapshot import PAGE_USES
from vmserve.testing import ScriptedTransport


def test_json_is_what_the_server_says(shared: Running, capsys: Said) -> None:
    top_command(shared.url, once=True, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["stats"] == shared.http.get("/v1/kv").json()
    assert data.keys() == shared.http.get("/v1/kv/live").json().keys()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_once(shared: Running, suffix: str, capsys: Said) -> None:
    top_command(shared.url + suffix, once=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fake, vmserve ")
    assert "·░█▓" in lines
    assert "of 4 pages, 1 shared" in "".join(lines)
    assert lines[-1] == "no requests"


def test_a_server_that_does_not_tell(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, api_keys=("k",))

    def fails(told: str, key: str | None) -> None:
        with pytest.raises(VmserveError, match=told):
            top_command(server.url, key, once=True)

    for wrong in (None, "j"):
        fails("--api-key", wrong)
    engine.facts.is_dead = True
    fails("503: The engine has stopped", "k")
    engine.facts.is_dead = False
    with contextlib.closing(Monitor(server.url, "k")) as monitor:
        assert monitor.ask()["model"] == "fake"
    server.close()
    fails(f"no answer from {server.url}: .*refused", "k")


@pytest.mark.parametrize(
    "reply", [(404, b"no"), (200, b"<html>"), (200, b"[]"), (200, b'{"stats": {}}')]
)
def test_another_kind_of_server(reply: tuple[int, bytes]) -> None:
    with (
        http_server(lambda path, body: reply) as url,
        pytest.raises(VmserveError, match="is it a vmserve server"),
    ):
        top_command(url, once=True)


def test_wrong_options() -> None:
    for wrong in ("localhost:8000", "http://", "http://[::1", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigurationError, match="not a URL"):
            top_command(wrong, once=True)
    with pytest.raises(ConfigurationError, match="--once"):
        top_command("http://127.0.0.1:1", as_json=True)


def test_a_reader_that_has_seen_enough(shared: Running, monkeypatch: Patch) -> None:
    def closed(*args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Console, "print", closed)
    with pytest.raises(BrokenPipeError):  # which main() ends with, without a word
        top_command(shared.url, once=True)


REQUEST: dict[str, Any] = {
    "request_id": "evil\x1b[2J\nid",
    "state": "running",
    "regime": "paged",
    "reason": "kernels",
    "costs": {"virtual": 0.0301, "paged": 0.02},
    "slots": [],
    "num_prompt_tokens": 1200,
    "num_output_tokens": 7,
    "max_tokens": 16,
    "num_branches": 2,
    "age_seconds": 3.21,
    "ttft_seconds": 0.25,
    "itl_seconds": None,
}
STATS: dict[str, Any] = {
    "num_requests_running": 2,
    "kv_cache_usage_perc": 0.5,
    "limit_pages": 64,
    "page_bytes": 1 << 20,
    "num_preemptions_total": 5,
}


def document(cells: str = "1", **changes: object) -> dict[str, Any]:
    return {
        "version": "1",
        "model": "m",
        "uptime_seconds": 600.0,
        "draining": False,
        "num_rejected": 3,
        "num_failed": 0,
        "stats": STATS,
        "latency": {"ttft_p50": 0.2, "ttft_p99": 1.5, "itl_p50": None, "itl_p99": None},
        "pool": {
            "cells": cells,
            "uses": PAGE_USES,
            "counts": {"free": cells.count("1"), "paged": cells.count("3")},
            "num_pages": len(cells),
            "num_shared": 0,
        },
        "requests": [REQUEST],
        "num_requests": 4,
        "num_others": 2,
        **changes,
    }


def test_the_screen() -> None:
    lines = drawn(document("3" * 30 + "1" * 30), 140)
    assert lines[0] == "m, vmserve 1, up 10 min"
    assert "tokens/s –   run/wait 2/0   KV in use 50.0% of 64 MiB   TTFT p50/p99" in lines[1]
    assert "200 ms/1.5 s" in lines[1]
    assert "rejected 3   failed 0   preempted 5   swapped 0   restarts 0" in lines[2]
    assert "█" * 30 + "░" * 30 in lines
    [row] = [line for line in lines if line.startswith("evil")]
    assert row.split()[:5] == ["evil?[2J?id", "running", "paged", "kernels:", "virtual"]
    assert row.endswith("1,200       7/32  –      3.2 s  250 ms    –")
    assert lines[-1] == "1 more, 2 of other keys"
    assert "\x1b" not in "".join(lines)


DRAFTS = {"spec_decode_num_draft_tokens_total": 80, "spec_decode_num_accepted_tokens_total": 60}
DISK = {
    "persist_bytes": 3 << 30,
    "persist_written_bytes_total": 5 << 20,
    "persist_read_bytes_total": 2 << 20,
    "persist_restored_blocks_total": 1234,
    "persist_evicted_blocks_total": 7,
    "persist_hidden_seconds_total": 3.0,
    "persist_wait_seconds_total": 1.0,
}
KIND = {"name": "window 32", "page_bytes": 1 << 20}
KIND |= {"used_pages": 3, "cached_pages": 2, "free_pages": 0}


@pytest.mark.parametrize(
    ("what", "empty", "there", "told"),
    [
        (
            "drafts",
            {},
            {"stats": {**STATS, **DRAFTS, "generation_tokens_total": 100}},
            "drafts accepted 75%   tokens a step 2.50",
        ),
        (
            "on disk 3 GiB   ",
            {"stats": {**STATS, "persist_bytes": 0, "persist_written_bytes_total": 0}},
            {"stats": {**STATS, **DISK}},
            "written/read 5 MiB/2 MiB   blocks hit/evicted 1,234/7   reading hidden 75%",
        ),
        ("window", {}, {"kinds": [KIND]}, "KV window 32 3 MiB used, 2 MiB cached, 0 B free"),
    ],
)
def test_what_not_every_engine_has_is_shown_where_it_is(
    what: str, empty: dict[str, Any], there: dict[str, Any], told: str
) -> None:
    assert what not in " ".join(drawn(document(**empty), 300))
    text = " ".join(drawn(document(**there), 300))
    assert what in text
    assert told in text


def test_a_narrow_terminal_cuts_reasons_and_ids_but_no_number() -> None:
    request_id = f"chatcmpl-{'0123456789abcdef' * 2}-0"
    data = document(requests=[{**REQUEST, "request_id": request_id}])
    [row] = [line for line in drawn(data, 90) if "running" in line]
    assert row.split() == [
        *("0123456789a…", "running", "paged", "kernels:", "v…"),
        *("1,200", "7/32", "–", "3.2", "s", "250", "ms", "–"),
    ]
    [row] = [line for line in drawn(data, 60) if "1,200" in line]
    assert row.split() == ["0123456…", "paged", "1,200", "7/32", "3.2", "s", "250", "ms", "–"]
    assert any(line.startswith(f"{request_id}  running") for line in drawn(data, 170))
    for width in (50, 90):
        figures = " | ".join(drawn(data, width)[1:6])
        assert "TTFT p50/p99 200 ms/1.5 s" in figures  # not broken into two lines


def test_a_large_pool_fits_in_eight_lines() -> None:
    lines = drawn(document("3" * 8000 + "1" * 8000), 50)
    assert [line for line in lines if line and set(line) <= {"█", "░"}] == (
        ["█" * 50] * 4 + ["░" * 50] * 4
    )


def test_tokens_per_second_of_the_last_seconds() -> None:
    screen = Screen()
    for second, tokens in enumerate([0, 900, 1000, 1100, 1200, 1300]):
        screen.take(document(stats={"generation_tokens_total": tokens}), now=float(second))
    assert screen.tokens_per_second == 100.0
    screen.note = "gone"
    assert drawn(screen)[0] == "gone"
