"""Lines on standard error, as text and as JSON, and the user's cache directory."""

from __future__ import annotations

import json
import logging
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from vmserve.errors import ConfigurationError
from vmserve.system.cache import user_cache

SCRIPT = """
import logging
from vmserve.system.logs import configure_logging, request_id
configure_logging(logging.INFO, {format!r}, {process!r})
log = logging.getLogger("vmserve.some")
log.info("one %d", 1)
log.debug("hidden")
request_id.set("id-7")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("two")
"""


def said(log_format: str, process: str) -> list[str]:
    script = SCRIPT.format(format=log_format, process=process)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_text() -> None:
    first, second, *trace = said("text", "engine")
    assert first.endswith(" INFO engine: one 1")
    assert second.endswith(" ERROR engine: two (request id-7)")
    assert trace[-1] == "ZeroDivisionError: division by zero"


def test_json() -> None:
    first, second = map(json.loads, said("json", "engine"))
    assert set(first) == {"time", "level", "logger", "message", "process"}
    assert (first["message"], first["process"]) == ("one 1", "engine")
    assert first["time"].endswith("Z")
    assert (second["level"], second["request_id"]) == (logging.getLevelName(40), "id-7")
    assert "ZeroDivisionError" in second["traceback"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_without_a_name(log_format: str) -> None:
    assert "engine" not in said(log_format, "")[0]


def test_it_follows_xdg_and_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("kind") == tmp_path / "vmserve" / "kind"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("kind") == tmp_path / ".cache" / "vmserve" / "kind"


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container runs that is given a number for a user."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert os.path.expanduser("~") == "~"  # noqa: PTH111
    with pytest.raises(ConfigurationError, match="no home directory: set XDG_CACHE_HOME"):
        user_cache("kind")
