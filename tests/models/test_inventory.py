"""What ``vmserve models`` lists, of a cache with all kinds of entries."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from huggingface_hub import constants

from tests.helpers import run_python
from tests.models.gguf_files import add_byte_level, add_llama, llama_tensors, write
from tests.models.test_hub import as_nobody, cached_model
from vmserve.cli.main import main
from vmserve.models import resolve_model
from vmserve.models.inventory import ListedModel, list_models

EMBEDDED = resolve_model(None)
CONTEXT = 64


def _metadata(writer: gguf.GGUFWriter) -> None:
    add_llama(writer, context=CONTEXT)
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
        "a/gguf:plain.gguf": ("ready", "F32", CONTEXT),
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


def test_what_belongs_to_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
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
