"""``vmserve cache``, and what a directory of ``--kv-persist`` has besides blocks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmserve.cli.cache import app
from vmserve.errors import ConfigurationError
from vmserve.memory.persist import directory_secret, list_spaces, open_stores
from vmserve.models.content import content_digest
from vmserve.server.auth import ApiKey, KeyRing

BLOCK_BYTES = 100


def fill(directory: Path, model: str, num_blocks: int) -> None:
    [store] = open_stores(directory, 1 << 20, {"model": model}, [BLOCK_BYTES], 1)
    for number in range(num_blocks):
        assert store.put(bytes([number]) * 32, bytes([number]) * BLOCK_BYTES)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ConfigurationError):
        raise result.exception
    return result.exit_code, result.output


def test_listing_checking_and_emptying_a_directory(tmp_path: Path) -> None:
    fill(tmp_path, "first", 3)
    fill(tmp_path, "second", 2)
    code, listed = run("list", str(tmp_path))
    assert code == 0
    assert "first" in listed
    assert "second" in listed
    assert run("verify", str(tmp_path)) == (0, "5 blocks, 1.035 KiB: 0 are broken\n")
    file = next(tmp_path.glob("*/*.kv"))
    file.write_bytes(file.read_bytes()[:-1])
    code, told = run("verify", str(tmp_path))
    assert code == 1
    assert "it has 211 bytes, not 212" in told
    assert run("verify", str(tmp_path), "--remove")[0] == 0
    assert run("verify", str(tmp_path))[1].startswith("4 blocks")
    space = next(each.name for each in list_spaces(tmp_path) if each.identity["model"] == "second")
    assert run("clear", str(tmp_path), "--space", space)[1].startswith(("2 blocks", "1 blocks"))
    run("clear", str(tmp_path))
    assert not list(tmp_path.glob("*/*.kv"))
    with pytest.raises(ConfigurationError, match="there is no 'other'"):
        run("clear", str(tmp_path), "--space", "other")
    with pytest.raises(ConfigurationError, match="is not a directory"):
        run("list", str(tmp_path / "none"))


def test_what_is_no_file_is_told_and_stops_nothing(tmp_path: Path) -> None:
    fill(tmp_path, "first", 3)
    [space] = list_spaces(tmp_path)
    pipe, folder = (tmp_path / space.name / f"{name * 32}.kv" for name in ("ab", "cd"))
    os.mkfifo(pipe)
    folder.mkdir()
    assert list_spaces(tmp_path)[0].num_blocks == 3
    code, told = run("verify", str(tmp_path))
    assert (code, told.count("it is not a file")) == (1, 2)
    code, told = run("verify", str(tmp_path), "--remove")
    assert (code, told.count("5 blocks")) == (0, 1)
    assert (pipe.exists(), folder.exists()) == (False, True)
    assert run("clear", str(tmp_path))[1].startswith("3 blocks removed")
    assert folder.exists()


def test_tenants_have_the_salts_that_they_had_before_a_restart(tmp_path: Path) -> None:
    keys = [ApiKey.of("anna", "a"), ApiKey.of("bert", "b")]

    def salts(secret: bytes) -> list[str]:
        return [caller.cache_salt("x") for caller in KeyRing(keys, secret=secret).callers]

    first = salts(directory_secret(tmp_path))
    assert salts(directory_secret(tmp_path)) == first
    assert len(set(first)) == 2
    assert salts(b"") != first
    [file] = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="has 5 bytes, not 32"):
        directory_secret(tmp_path)


def test_a_digest_of_weights_follows_their_content(tmp_path: Path) -> None:
    model, memo = tmp_path / "model", tmp_path / "memo"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(b"weights")
    (model / "config.json").write_text("{}")
    first = content_digest(model, memo)
    assert content_digest(model, memo) == content_digest(model) == first
    assert {file.stat().st_mode & 0o777 for file in memo.iterdir()} == {0o600}
    state = weights.stat()
    weights.write_bytes(b"weightz")
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))  # only the time of change tells
    second = content_digest(model, memo)
    assert second == content_digest(model)
    assert second != first
    (model / "config.json").write_text("{ }")
    assert content_digest(model, memo) != second
