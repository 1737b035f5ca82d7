"""The server's benchmark asks all its questions of an engine on the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "serve.py"


def test_the_server_answers(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())
    assert (rows[0]["what"], rows[-1]["what"]) == ("start", "end")
    assert all(row["right"] for row in rows)
