from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from vmserve.errors import ConfigurationError
from vmserve.system.cache import user_cache


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
