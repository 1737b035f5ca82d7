"""The report of a probe run: results as JSON, tables, and the verdicts in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmserve.numbers.sizes import format_size

from .common import Record, one_line
from .findings import UNREADABLE, Findings, Verdict
from .processes import SectionResult
from .verdicts import all_verdicts

SCHEMA = 2
DRY_RUN = "DRY RUN on host memory: the figures below mean nothing about any GPU"


@dataclass
class Report:
    """What a run has found so far."""

    dry_run: bool
    budget_seconds: float
    seconds: float = 0.0
    sections: list[SectionResult] = field(default_factory=list)

    def add(self, result: SectionResult) -> None:
        """Take a finished section in."""
        self.sections.append(result)

    @property
    def complete(self) -> bool:
        """True when every section that was asked for ended by itself without an error."""
        return bool(self.sections) and all(item.status == "done" for item in self.sections)

    def findings(self) -> Findings:
        """Every record, for the tables and the verdicts."""
        status = {item.name: f"{item.status} {item.detail}".strip() for item in self.sections}
        return Findings([record for item in self.sections for record in item.records], status)

    def verdicts(self) -> list[Verdict]:
        """One verdict for each question of the design."""
        return all_verdicts(self.findings())

    def to_json(self) -> Record:
        """Everything, as written to results.json."""
        return {
            "schema": SCHEMA,
            "dry_run": self.dry_run,
            "budget_seconds": self.budget_seconds,
            "seconds": round(self.seconds, 1),
            "sections": [item.to_json() for item in self.sections],
            "verdicts": [verdict.to_json() for verdict in self.verdicts()],
        }


def cell(value: Any) -> str:
    """A table cell: three significant figures for floats, ``-`` for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def format_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Columns padded to their widest cell, the first to the left and the others to the right."""
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def rate_table(findings: Findings) -> str:
    """Copy and read rates by kind of memory."""
    rows = [
        (
            format_size(record["page_bytes"]) + " pages" if record["page_bytes"] else "plain",
            record["copy_gbs"],
            record["read_gbs"],
        )
        for record in findings.of("device", "rate")
    ]
    return format_table(("memory", "copy GB/s", "read GB/s"), rows)


def call_table(findings: Findings) -> str:
    """Median microseconds of each driver call, by page size and run."""
    found = {
        ((record["page_bytes"], record["num_pages"]), record["operation"]): record["median_ns"]
        for record in findings.of("vmm_costs", "call")
    }
    sizes = sorted({size for size, _ in found})
    rows = [
        (call, *(found[size, call] / 1e3 for size in sizes))
        for call in dict.fromkeys(call for _, call in found)
    ]
    headers = (f"{format_size(page)} x {run}" for page, run in sizes)
    return format_table(("us a call", *headers), rows)


def beside_table(findings: Findings) -> str:
    """Median microseconds of each driver call, idle and beside a kernel."""
    loads = ("idle", "one_block", "all_sms")
    found = {
        (record["call"], record["load"]): record["us"]["median"]
        for record in findings.of("vmm_costs", "beside_kernel")
    }
    calls = dict.fromkeys(call for call, _ in found)
    rows = [(call, *(found.get((call, load)) for load in loads)) for call in calls]
    return format_table(("us beside a kernel", *loads), rows)


def attention_table(findings: Findings, page_bytes: int) -> str:
    """Dense time, then the ratio to it of each layout, for one page size."""
    records = [
        record
        for record in findings.of("attention", "attention")
        if record["page_bytes"] == page_bytes
    ]
    dense = {
        (record["case"], record["kernel"]): record
        for record in findings.of("attention", "dense")
        if record["page_bytes"] == page_bytes
    }
    layouts = list(dict.fromkeys(record["layout"] for record in records))
    ratios = {(r["case"], r["kernel"], r["layout"]): r["ratio"] for r in records}
    rows = [
        (
            f"{case} {kernel}",
            record["us"],
            record["gbs"],
            *(ratios.get((case, kernel, layout)) for layout in layouts),
        )
        for (case, kernel), record in dense.items()
    ]
    headers = (f"{format_size(page_bytes)} pages", "dense us", "GB/s", *layouts)
    return format_table(headers, rows)


def attention_tables(findings: Findings) -> str:
    """One table for each page size that was measured."""
    pages = dict.fromkeys(r["page_bytes"] for r in findings.of("attention", "dense"))
    return "\n\n".join(attention_table(findings, page_bytes) for page_bytes in pages)


def tail_table(findings: Findings) -> str:
    """The result of each tail case."""
    rows = [
        (
            f"{record['kernel']} q{record['q_len']}",
            record["tail"],
            record["group"],
            record["short_by"],
            record["slack_tokens"],
            record["result"],
        )
        for record in findings.of("tail_hazard", "tail")
    ]
    return format_table(("kernel", "tail", "group", "short by", "slack", "result"), rows)


def section_table(report: Report) -> str:
    """How each section ended."""
    rows = [
        (item.name, item.status, item.seconds, len(item.records), item.detail)
        for item in report.sections
    ]
    return format_table(("section", "status", "s", "records", "detail"), rows)


def problem_lines(findings: Findings) -> list[str]:
    """What failed, was cut short or skipped, one line each."""
    lines = []
    for record in findings.records:
        if record["kind"] in ("failed", "section_error"):
            lines.append(f"{record['section']}: {record.get('what', '')} {record['error']}")
        elif record["kind"] == "cut":
            lines.append(f"{record['section']}: no time for {record['what']}")
    return lines


def render(report: Report) -> str:
    """The whole report as text: tables, problems, verdicts."""
    findings = report.findings()
    parts = [DRY_RUN] if report.dry_run else []
    parts.append(section_table(report))
    for table in (rate_table, call_table, beside_table, attention_tables, tail_table):
        try:
            text = table(findings)
        except UNREADABLE as error:
            text = f"\n{table.__name__}: records unreadable: {one_line(error)}"
        if "\n" in text:
            parts.append(text.strip("\n"))
    problems = problem_lines(findings)
    if problems:
        parts.append("PROBLEMS\n" + "\n".join(problems))
    verdicts = "\n".join(f"- {verdict.text()}" for verdict in report.verdicts())
    parts.append(f"VERDICTS ({report.seconds:.0f} s)\n{verdicts}")
    return "\n\n".join(parts)
