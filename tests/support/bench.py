"""Commands of ``vmserve bench`` as users give them, and jobs by their lengths."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from vmserve.errors import VmserveError
from vmserve_bench.ab.jobs import Job
from vmserve_bench.command import app
from vmserve_bench.compare_cases import SCHEMAS
from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["bench", "compared_with_itself", "job", "refusal"]


def job(num_in: int, num_out: int, index: int = 0, at: float = 0.0, **more: Any) -> Job:
    return Job(RequestShape(num_in, num_out, at, index), **more)


def bench(line: str, *words: str | Path, status: int = 0, columns: int = 80) -> str:
    """The standard output of the command ``line`` and further words; it ends with ``status``."""
    args, env = [*shlex.split(line), *map(str, words)], {"COLUMNS": str(columns)}
    done = CliRunner().invoke(app, args, env=env, catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


def refusal(line: str, *words: str | Path, kind: type[VmserveError] = VmserveError) -> str:
    """What the command says instead of measuring."""
    done = CliRunner().invoke(app, [*shlex.split(line), *map(str, words)])
    assert isinstance(done.exception, kind), done.output
    return str(done.exception)


def compared_with_itself(path: Path, command: str) -> dict[str, Any]:
    """The results that ``bench command`` wrote, which ``bench compare`` reads and finds equal."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert SCHEMAS[document["schema"]][0] == f"bench {command}"
    output = bench("compare", path, path)
    assert "1.000" in output
    assert "differ in more" not in output
    return document
