"""The probe's command line: runs the sections, and keeps results.json and report.txt current."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vmserve.errors import ConfigurationError
from vmserve.memory.cuda_driver import driver_refusal
from vmserve_bench.lab.report import replace_text
from vmserve_bench.lab.table import Table

from .kernels import ARCHITECTURES, compile_for
from .run import (
    SECTIONS,
    Row,
    case_main,
    child_main,
    read_records,
    run_section,
    run_sections,
)

NO_DEVICE = 2
NEEDS = "an NVIDIA GPU and driver, torch >= 2.11 with CUDA, cuda-bindings and NVRTC"
DRY_RUN = "DRY RUN on host memory: the figures below mean nothing about any GPU"


def missing_requirements() -> list[str]:
    """Everything that a real run lacks here; empty when it can start."""
    problems = [driver_refusal()]
    if torch.version.cuda is None:
        problems.append(f"torch {torch.__version__} is built without CUDA")
    if importlib.util.find_spec("cuda") is None:
        problems.append("cuda-bindings is not installed")
    return [problem for problem in problems if problem]


def compile_check() -> int:
    """Compile the kernels for every architecture, without a GPU."""
    try:
        for target in ARCHITECTURES:
            print(f"nvrtc {target}: {len(compile_for(target))} bytes")
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_probe(names: Sequence[str], out: Path, budget_seconds: float, dry_run: bool) -> int:
    out.mkdir(parents=True, exist_ok=True)
    for name in ("records.jsonl", "probe.log"):
        (out / name).unlink(missing_ok=True)
    began = time.monotonic()
    report: Row = {"dry_run": dry_run, "budget_seconds": budget_seconds, "sections": []}
    for section in run_sections(
        names, budget_seconds, lambda name, seconds: run_section(name, seconds, out, dry_run)
    ):
        records = read_records(out / "records.jsonl")
        section["records"] = [row for row in records if row["section"] == section["name"]]
        report["sections"].append(section)
        report["seconds"] = round(time.monotonic() - began, 1)
        replace_text(out / "results.json", json.dumps(report, indent=1) + "\n")
        replace_text(out / "report.txt", render(report) + "\n")
        print(f"{section['name']}: {section['status']} {section['detail']}".rstrip(), flush=True)
    print(render(report))
    return 0 if all(section["status"] == "done" for section in report["sections"]) else 1


def cell(value: Any) -> str:
    """Three significant figures for floats, ``-`` for nothing."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return " / ".join(map(cell, value))
    return "-" if value is None else str(value)


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    cells = tuple(tuple(cell(row.get(name)) for name in names) for row in rows)
    return Table(title, names, cells).to_markdown().strip()


def sentence(finding: Row) -> str:
    question, answer, numbers, advice = finding.values()
    return f"- {question} {answer.upper()}. {cell(numbers)}. {advice}".strip()


def render(report: Row) -> str:
    """Tables of the rows by kind, then what went wrong, and the findings."""
    records = [row for section in report["sections"] for row in section["records"]]
    kinds: dict[str, list[Row]] = {}
    for row in records:
        fields = {name: value for name, value in row.items() if name not in ("section", "kind")}
        kinds.setdefault(row["kind"], []).append(fields)
    findings = kinds.pop("finding", [])
    summary = [
        {name: value if name != "records" else len(value) for name, value in section.items()}
        for section in report["sections"]
    ]
    parts = [DRY_RUN] if report["dry_run"] else []
    parts += [table(kind, rows) for kind, rows in kinds.items()]
    parts.append(table("sections", summary))
    parts += ["\n".join(map(sentence, findings))]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="probe.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--budget-seconds", type=float, default=450.0)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma-separated names")
    parser.add_argument("--list", action="store_true", help="list the sections and stop")
    parser.add_argument("--dry-run", action="store_true", help="host memory instead of a GPU")
    parser.add_argument("--compile-check", action="store_true", help="compile, without a GPU")
    for name in ("--child", "--seconds", "--case", "--params"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name:16} {section.about}" for name, section in SECTIONS.items()))
        return 0
    if options.compile_check:
        return compile_check()
    if options.case:
        case_main(options.case, json.loads(options.params), options.dry_run)
    out = options.out or Path(os.environ.get("OUT") or Path(__file__).parents[1] / "results")
    if options.child:
        child_main(options.child, out, float(options.seconds), options.dry_run)
    wanted = options.sections.split(",")
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    problems = [] if options.dry_run else missing_requirements()
    if problems:
        print(f"probe: {'; '.join(problems)}. It needs {NEEDS}.", file=sys.stderr)
        return NO_DEVICE
    names = [name for name in SECTIONS if name in wanted]
    return run_probe(names, out, options.budget_seconds, options.dry_run)
