"""Model names to directories: paths, the local cache, and no network; and the list of them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from huggingface_hub import constants

from tests.helpers import run_python
from tests.models.gguf_files import add_byte_level, add_llama, llama_tensors, write
from vmserve.cli.main import main
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, resolve_model
from vmserve.models.hub import EMBEDDED_NAME, is_embedded
from vmserve.models.inventory import ListedModel, list_models

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


# -- what ``vmserve models`` lists, of a cache with all kinds of entries -------------------

EMBEDDED = resolve_model(None)
GGUF_CONTEXT = 64


def _metadata(writer: gguf.GGUFWriter) -> None:
    add_llama(writer, context=GGUF_CONTEXT)
    add_byte_level(writer)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of vmserve, and the hub's with an entry of each kind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    entry = partial(cached_model, tmp_path)
    complete = entry("a/complete")
    for name in ("config.json", "model.safetensors"):
        (complete / name).symlink_to(EMBEDDED / name)
    plain = write(entry("a/gguf") / "plain.gguf", "llama",
                      llama_tensors(np.random.default_rng(0), "F32"), _metadata)  # fmt: skip
    (plain.parent / "damaged.gguf").write_bytes(plain.read_bytes()[:-4096])
    other = entry("a/other", "model.safetensors")
    shutil.copy(EMBEDDED / "model.safetensors", other)
    config = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    (other / "config.json").write_text(json.dumps(config))
    entry("b/half", "config.json")
    (entry("b/absent", "config.json") / "model.safetensors").symlink_to("nowhere")
    garbage = entry("b/garbage", "model.safetensors")
    shutil.copy(EMBEDDED / "config.json", garbage)
    (entry("b/no-json", "model.safetensors") / "config.json").write_text("{")
    (entry("b/list", "model.safetensors") / "config.json").write_text("[1]")
    entry("b/readme", "README.md")
    shutil.rmtree(entry("b/started").parent)
    (tmp_path / "hub" / "models--x--y--z").mkdir()
    (tmp_path / "hub" / "version.txt").touch()
    return tmp_path


def test_each_entry_is_listed_with_what_it_is_or_lacks(home: Path) -> None:
    listed = {model.model: model for model in list_models()}
    assert {each.model: (each.status, each.weights, each.context) for each in listed.values()} == {
        "vmserve-embedded": ("ready", "BF16", 8192),
        "smollm2": ("to pull", "", None),
        "a/complete": ("ready", "BF16", 8192),
        "a/gguf:plain.gguf": ("ready", "F32", GGUF_CONTEXT),
        "a/gguf:damaged.gguf": ("unusable", "", None),
        "a/other": ("unchecked", "BF16", None),
        **{
            f"b/{name}": ("unusable", "", None)
            for name in ("absent", "garbage", "half", "list", "no-json", "readme", "started")
        },
        "x/y/z": ("unusable", "", None),
    }  # fmt: skip
    for name, reason in {
        "a/gguf:damaged.gguf": "is truncated or damaged",
        "b/absent": "No such file or directory: ",
        "b/garbage": "model.safetensors is damaged",
        "b/half": "has no *.safetensors files",
        "b/list": "config.json is not a JSON object",
        "b/no-json": "config.json is not valid JSON",
        "b/readme": "it has no config.json with *.safetensors beside it, and no GGUF",
        "b/started": "it was not fetched, or cannot be read: run `hf download b/started`",
    }.items():
        assert reason in listed[name].note
    for model in listed.values():
        assert "\n" not in model.note
        if model.status == "ready" and ":" not in model.model:
            assert str(resolve_model(model.model)) == model.path
    complete = listed["a/complete"]
    assert complete.bytes == (EMBEDDED / "model.safetensors").stat().st_size


def test_what_belongs_to_somebody_else_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as directory:  # which everybody may reach
        home = Path(directory)
        home.chmod(0o755)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        for name in ("repository", "snapshot", "weights"):
            snapshot = cached_model(home, f"o/{name}", "model.safetensors")
            shutil.copy(EMBEDDED / "config.json", snapshot)
            closed = {"repository": snapshot.parents[1], "snapshot": snapshot}
            closed.get(name, snapshot / "model.safetensors").chmod(0)
        (home / "vmserve").mkdir(mode=0)
        with as_nobody():
            listed = {model.model: model for model in list_models()}
        assert listed["smollm2"].status == "to pull"
        for name in ("repository", "snapshot", "weights"):
            assert listed[f"o/{name}"].status == "unusable", name
            assert listed[f"o/{name}"].note


def test_parts_of_a_split_file_are_one_model(home: Path) -> None:
    snapshot = cached_model(home, "a/split")
    for part in (1, 2):
        (snapshot / f"m-0000{part}-of-00002.gguf").touch()
    [model] = [model for model in list_models() if model.model.startswith("a/split")]
    assert model.model == "a/split:m-00001-of-00002.gguf"
    assert "is empty" in model.note


def test_the_command(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["vmserve", "models", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    documents = json.loads(printed("--json"))
    assert [ListedModel(**document) for document in documents] == list(list_models())
    lines = printed().splitlines()
    assert lines[0].split() == ["model", "weights", "context", "size", "where"]
    assert lines[1].split() == ["vmserve-embedded", "BF16", "8,192", "6.508", "MiB", "embedded"]
    assert any("fetch it with `vmserve pull smollm2`" in line for line in lines)


def test_it_imports_neither_torch_nor_transformers(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    ran = run_python("""
import sys
sys.argv = ["vmserve", "models"]
from vmserve.cli.main import main
try:
    main()
finally:
    assert not {"torch", "transformers"} & set(sys.modules)
""")
    assert ran.returncode == 0, ran.stderr
    assert "a/other" in ran.stdout
