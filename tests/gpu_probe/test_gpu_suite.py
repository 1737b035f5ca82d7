"""How ``tests/gpu`` goes on in another process, on the processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACK = "tests/gpu/test_memory.py::test_memory_goes_back_to_the_device"
TENANTS = "tests/gpu/test_memory.py::test_no_tenant_reads_a_byte_of_another"


def test_what_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    progress.write_text(TENANTS + "\n")  # of a process that died of it
    chosen = ["tests/gpu/test_memory.py", "-k", "goes_back or tenant"]
    options = ["--gpu-tests-on", "cpu", "--gpu-tests-progress", str(progress)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *chosen, *options],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert progress.read_text().splitlines() == [TENANTS, BACK, "all told"]
