"""``vmserve bench startup``: the phases of a fresh process, and a server's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmserve.bench.ab.client import RunFailedError
from vmserve.bench.startup import PHASES, document, table
from vmserve.cli_bench import app

# Processes import torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(400)

SMALL = ["--kv-cache-memory", "64MiB", "--max-model-len", "256"]


def test_a_process_and_a_server_from_start_to_first_token(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "s.json"
    args = ["startup", "--repeats", "1", "--serve", "--json", str(path), *SMALL]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert (told["schema"], told["schema_version"]) == ("vmserve-bench-startup", 1)
    assert told["options"] == {"kv_cache_memory": "64MiB", "max_model_len": 256}
    assert list(told["phases"]) == list(PHASES)
    times = [one["seconds"][0] for one in told["phases"].values()]
    offline, http = times[:5], times[5:]
    assert offline == sorted(offline)
    assert http == sorted(http)
    assert 0 < offline[0] < http[0]
    assert "first token over HTTP" in result.output


def test_what_the_process_said_is_told(tmp_path: Path) -> None:
    args = ["startup", "--repeats", "1", "--model", str(tmp_path / "none")]
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, RunFailedError)
    assert "none" in str(result.exception)


def test_medians_and_samples() -> None:
    seconds = {"imports": [3.0, 1.0, 2.0], "first_token": [4.0, 9.0, 5.0]}
    assert table(seconds).rows == (
        ("imports done", "2 s", "1 s", "3 s"),
        ("first token", "5 s", "4 s", "9 s"),
    )
    assert document({}, seconds)["phases"]["imports"] == {
        "title": "imports done",
        "seconds": [3.0, 1.0, 2.0],
    }
