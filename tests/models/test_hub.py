"""Model names to directories: paths, the local cache, and no network."""

from __future__ import annotations

import contextlib
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, resolve_model
from vmserve.models.hub import EMBEDDED_NAME, is_embedded

NOBODY = 65534
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_model(home: Path, name: str, *files: str) -> Path:
    """Lay out a repository in the cache as the hub client does."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that refuses connections: port 9 (discard) of this machine."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


@pytest.mark.parametrize(
    ("offline", "reason"), [(True, "HF_HUB_OFFLINE is set"), (False, "the hub did not answer")]
)
def test_hub_ids_without_a_network(
    hub_home: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, reason: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    complete = cached_model(hub_home, "some/model", "config.json", "model.safetensors")
    assert resolve_model("some/model") == complete
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("never/seen")
    assert str(caught.value) == (
        "model never/seen is neither a directory here nor in the local Hugging Face cache, and "
        f"{reason}: give a directory, or fetch it where there is a network with "
        "`hf download never/seen`"
    )


MISSING = "does not exist: check --model"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("half/fetched", r"has no config\.json with \*\.safetensors beside"),
        ("no such:name", "'no such:name' is neither a directory .* hub id"),
        ("{home}/file", "is a file: --model needs the directory"),
        *((name, MISSING) for name in ("/no/such/dir", "./none", "../none", "a/b/c", "~/none")),
    ],
)
def test_names_of_no_model(hub_home: Path, name: str, told: str) -> None:
    cached_model(hub_home, "half/fetched", "config.json")
    (hub_home / "file").touch()
    with pytest.raises(ConfigurationError, match=told) as caught:
        resolve_model(name.format(home=hub_home))
    assert name in str(caught.value) or told != MISSING


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "relative").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("relative") == Path("relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/relative") == tmp_path / "relative"


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, who may read everything."""
    was_root = os.geteuid() == 0
    if was_root:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)
            os.setegid(0)


@pytest.fixture
def others_model() -> Iterator[Path]:
    """A directory that everybody may reach, which those of ``tmp_path`` are not."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        model = Path(directory) / "model"
        model.mkdir(mode=0o755)
        for name in ("config.json", "model.safetensors", "chat_template.jinja", "notes.md"):
            (model / name).write_text("{}")
        yield model


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("model.safetensors", "a+r"),
        ("config.json", "a+r"),
        ("chat_template.jinja", "a+r"),
        (".", "a+rx"),
        ("..", "a+rx"),
    ],
)
def test_what_belongs_to_somebody_else(others_model: Path, path: str, wanted: str) -> None:
    closed = Path(os.path.normpath(others_model / path))
    mode = closed.stat().st_mode & 0o777
    closed.chmod(0)
    try:
        with as_nobody(), pytest.raises(ConfigurationError) as caught:
            resolve_model(str(others_model))
    finally:
        closed.chmod(mode)
    owner = pwd.getpwuid(closed.stat().st_uid).pw_name
    told = str(caught.value)
    assert told.startswith(f"{closed} cannot be read: it belongs to {owner} with mode 0000, and ")
    assert told.endswith(f": chmod {wanted} it, or run as its owner")


def test_links_and_what_is_not_read(others_model: Path) -> None:
    (others_model / "notes.md").chmod(0)
    others_model.parent.chmod(0o711)
    blobs = others_model.parent / "blobs"
    blobs.mkdir(mode=0o755)
    (others_model / "model.safetensors").rename(blobs / "weights")
    (others_model / "model.safetensors").symlink_to("../blobs/weights")
    with as_nobody():
        assert resolve_model(str(others_model)) == others_model
    blobs.chmod(0)
    with as_nobody(), pytest.raises(ConfigurationError, match=r"/blobs cannot be read.*a\+rx"):
        resolve_model(str(others_model))
    blobs.chmod(0o700)


def test_the_embedded_model_has_the_name_that_a_server_gives_it(
    hub_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = resolve_model(None)
    assert ModelConfig.from_directory(embedded).architecture == "LlamaForCausalLM"
    assert EMBEDDED_NAME == "vmserve-embedded"
    other = "vmserve-embedded-2"
    assert not is_embedded(other)
    with pytest.raises(ConfigurationError, match=f"model {other} is neither a directory here"):
        resolve_model(other)
    monkeypatch.chdir(hub_home)
    for name in (EMBEDDED_NAME, "embedded"):
        assert is_embedded(name)
        assert resolve_model(name) == embedded
        # A directory of that name is what the user means.
        (hub_home / name).mkdir()
        assert not is_embedded(name)
        assert resolve_model(name) == Path(name)
