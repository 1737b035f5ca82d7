"""What runs on a machine that is lent starts without what a plain image with CUDA lacks.

msgspec is not among it: values of the engine are made of it, so its wheel travels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import run_python

ROOT = Path(__file__).resolve().parents[2]
BACK = "tests/gpu/test_memory.py::test_memory_goes_back_to_the_device"
TENANTS = "tests/gpu/test_memory.py::test_no_tenant_reads_a_byte_of_another"

LACKED = ("cryptography", "fastapi", "flash_attn", "llguidance", "pydantic", "starlette", "uvicorn")
#: In front of code that is run as on such a machine, where nothing finds these packages.
LACKING = f"""
import importlib.util, os, sys

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LACKED}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Lacking(finder) for finder in sys.meta_path]
assert not any(importlib.util.find_spec(name) for name in {LACKED})
"""


def test_what_is_measured_with_is_imported() -> None:
    modules = (
        "benchmarks.gpu.engine",
        "benchmarks.gpu.gpu_probe.cli",
        "benchmarks.gpu.gpu_probe.memory",
        "benchmarks.gpu.gpu_probe.bench_kernels",
        "benchmarks.gpu.compile_matrix",
        "benchmarks.gpu.serve",
        "vmserve_bench.alloc",
    )
    done = run_python(LACKING + f"for module in {modules}: importlib.import_module(module)")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(240)
def test_the_tests_of_a_gpu_start_and_what_has_begun_is_not_begun_again(tmp_path: Path) -> None:
    """All are collected, on the processor; another process goes on behind one that died."""
    progress = tmp_path / "progress"
    progress.write_text(TENANTS + "\n")  # of a process that died of it
    arguments = ["-m", "gpu", "tests/gpu", "--gpu-tests-on", "cpu", "-k", "goes_back or tenant"]
    arguments += ["--gpu-tests-progress", str(progress), "-q", "-W", "default"]
    arguments += ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
    code = f"""
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.chdir({str(ROOT)!r})
import pytest
sys.exit(pytest.main({arguments}))
"""
    done = run_python(LACKING + code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
    assert progress.read_text().splitlines() == [TENANTS, BACK, "all told"]
