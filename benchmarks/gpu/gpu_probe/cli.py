"""The probe's command line, and the run that it starts."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from vmserve_bench.lab.report import replace_text

from vmserve.errors import ConfigurationError
from vmserve.memory.cuda_driver import driver_refusal

from .common import Budget, Options, read_records
from .processes import (
    Ending,
    SectionResult,
    case_main,
    child_main,
    run_process,
    run_sections,
)
from .report import Report, render
from .sections import SECTIONS, choose

SUMMARY = "Answers the riskiest questions about a virtual-memory KV cache on an NVIDIA GPU."
NO_DEVICE = 2
DEFAULT_SECONDS = 450.0
NEEDS = "an NVIDIA GPU and driver, torch >= 2.11 with CUDA, cuda-bindings and NVRTC"
LEAST_TORCH = (2, 11)


def default_out() -> Path:
    """$OUT where it is set, else ``benchmarks/gpu/results``."""
    return Path(os.environ.get("OUT") or Path(__file__).parents[1] / "results")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="probe.py", description=SUMMARY)
    parser.add_argument("--out", type=Path, default=None, help="folder for the results")
    parser.add_argument("--budget-seconds", type=float, default=DEFAULT_SECONDS)
    parser.add_argument("--sections", default="", help="comma-separated names; all by default")
    parser.add_argument("--list", action="store_true", help="list the sections and stop")
    parser.add_argument("--dry-run", action="store_true", help="host memory instead of a GPU")
    parser.add_argument(
        "--compile-check", action="store_true", help="compile the kernels without a GPU and stop"
    )
    parser.add_argument("--fa3-library", default="", help="library with a FlashAttention-3 fwd op")
    parser.add_argument("--case-workers", type=int, default=4, help="hazard processes at a time")
    for name in ("--child", "--seconds", "--records", "--case", "--params"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser


def list_sections() -> None:
    """Print every section with the question it answers."""
    for section in SECTIONS:
        print(f"{section.name:16} {section.question}")


def compile_check() -> int:
    """Compile the kernels for every architecture; print the outcome."""
    kernels: Any = importlib.import_module(".kernels", __package__)
    try:
        print("\n".join(kernels.check_compilation()))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_probe(names: Sequence[str], out: Path, budget_seconds: float, options: Options) -> int:
    """Run the sections, keep results.json and report.txt current, print the report."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    records, log = out / "records.jsonl", out / "probe.log"
    for path in (records, log):
        path.unlink(missing_ok=True)
    report = Report(options.dry_run, budget_seconds)

    def launch(arguments: Sequence[str], timeout_s: float) -> Ending:
        return run_process(["--records", str(records), *arguments], timeout_s, log)

    def finished(result: SectionResult) -> None:
        found = [record for record in read_records(records) if record["section"] == result.name]
        result.records = found
        report.add(result)
        report.seconds = time.monotonic() - start
        write_report(report, out)
        line = f"{result.name}: {result.status} {result.detail}".rstrip()
        print(f"{line} ({result.seconds:.0f} s)", flush=True)

    run_sections(choose(names), launch, Budget(budget_seconds), options, finished)
    print(render(report))
    return 0 if report.complete else 1


def torch_problem() -> str:
    """What is wrong with the installed torch, or nothing. Does not import it."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < LEAST_TORCH:
        return f"torch {version} is older than {'.'.join(map(str, LEAST_TORCH))}"
    if "+cpu" in version:
        return f"torch {version} is built without CUDA"
    return ""


def missing_requirements(
    device: Callable[[], str | None] = driver_refusal, torch: Callable[[], str] = torch_problem
) -> list[str]:
    """Everything that a real run lacks here; empty when it can start."""
    problems = [device(), torch()]
    for name in ("driver", "nvrtc"):
        try:
            importlib.import_module(f"cuda.bindings.{name}")
        except ImportError:
            problems.append(f"cuda.bindings.{name} is not installed (cuda-bindings)")
    return [problem for problem in problems if problem]


def write_report(report: Report, out: Path) -> None:
    """Replace results.json and report.txt whole."""
    texts = {
        "results.json": json.dumps(report.to_json(), indent=1) + "\n",
        "report.txt": render(report) + "\n",
    }
    for name, text in texts.items():
        replace_text(out / name, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    options = Options(arguments.dry_run, arguments.fa3_library, arguments.case_workers)
    if arguments.list:
        list_sections()
        return 0
    if arguments.compile_check:
        return compile_check()
    if arguments.case:
        case_main(arguments.case, json.loads(arguments.params), options)
    if arguments.child:
        seconds = float(arguments.seconds)
        child_main(arguments.child, Path(arguments.records), seconds, options)
    names = [name for name in arguments.sections.split(",") if name]
    try:
        choose(names)
    except ValueError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 1
    problems = [] if options.dry_run else missing_requirements()
    if problems:
        print(f"probe: {'; '.join(problems)}. It needs {NEEDS}.", file=sys.stderr)
        return NO_DEVICE
    out = arguments.out or default_out()
    return run_probe(names, out, arguments.budget_seconds, options)
