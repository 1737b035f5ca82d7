"""Section ``tail_hazard``: what each kernel does with the rows past a sequence's length.

Every case runs in a process of its own, since a fault makes the whole CUDA context useless.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .attention_kernels import Work, random_queries, slot_view, stock_kernels
from .machine import READ, READ_WRITE, HostMachine, Region
from .run import WORKERS, Finding, Probe, Row, yes
from .scale import layout

LEAST_TOKENS = 1024
NAN_TOKENS = 512
PREFILL_ROWS = 64
SLACKS = (16, 32, 64, 128, 192, 256)
PATTERN = 77
#: Kernels that check every word while access changes.
READS_UNDER_CHANGE = 64


def tail_pages(page_tokens: int) -> int:
    """Pages of the sequence: over 1024 tokens, and an odd number so that few tiles divide it."""
    return (-(-LEAST_TOKENS // page_tokens) + 1) | 1


def attention_tail(machine: HostMachine, scale: Any, params: Mapping[str, Any]) -> Row:
    """Case: one kernel over one sequence, in slot 1 of two, compared with float64.

    Rows past the length are zero, or NaN; pages that are not needed for them are not mapped.
    """
    page, tail, tokens = scale.page_bytes, params["tail"], layout(scale, params["group"])
    page_tokens = tokens.page_tokens
    pages = tail_pages(page_tokens)
    past_tokens = NAN_TOKENS if tail != "unmapped" else params["slack_tokens"]
    mapped = pages + -(-past_tokens // page_tokens)
    slot_pages = mapped + 2
    region = Region(machine, page, 1, extra=mapped, reserve=2 * slot_pages)
    region.map(region.address + slot_pages * page, region.extra)
    pool = region.tensor(2 * slot_pages * page, torch.bfloat16)
    start = slot_pages * page // 2
    pool[start : start + mapped * page // 2].normal_()
    view = slot_view(pool, tokens, 2, slot_pages * page_tokens)
    length = pages * page_tokens - params["short_by"]
    for [tensor], poison in ((view.keys, "nan_k"), (view.values, "nan_v")):
        tensor[1, length : mapped * page_tokens].fill_(math.nan if tail == poison else 0.0)
    [kernel] = (k for k in stock_kernels(machine.device == "cpu") if k.name == params["kernel"])
    work = Work(view, [1], [length], random_queries(scale, params["q_len"], machine.device))
    machine.synchronize()
    output = work.calls(kernel)[0]()
    machine.synchronize()
    error = work.error(output)
    finite = bool(torch.isfinite(output).all())
    return {
        "result": "ok" if error < 2e-2 else "wrong" if finite else "poisoned",
        "error": None if math.isnan(error) else error,
        "length": length,
        "page_tokens": page_tokens,
    }


def tail_cases(names: Sequence[str], groups: Sequence[int]) -> Iterator[Row]:
    """Kernel x query rows x what lies past the length."""
    for kernel in names:
        for q_len in (1, PREFILL_ROWS):
            common = {"kernel": kernel, "q_len": q_len, "slack_tokens": 0}
            for group in groups:
                yield common | {"group": group, "tail": "unmapped", "short_by": 0}
            for tail in ("unmapped", "nan_k", "nan_v"):
                yield common | {"group": max(groups), "tail": tail, "short_by": 5}


def run_tail(probe: Probe, params: Row) -> Row:
    """One case, its row not written yet; ``result`` is ok, poisoned, wrong, or how it ended."""
    found = probe.run_case("hazard:attention_tail", params)
    ended = "fault" if found["outcome"] in ("error", "signal") else found["outcome"]
    return params | {"result": ended} | found


def tails(probe: Probe) -> Iterator[Finding]:
    """Every case, a few at a time. One that faults is run again alone, where no other process could
    have brought it about, before it is believed; then its slack is searched."""
    names = [kernel.name for kernel in stock_kernels(probe.dry_run)]
    groups = probe.scale.groups
    cases = list(tail_cases(names, groups))

    def first(params: Row) -> Row | None:
        if probe.late(f"tail case {params}"):
            return None
        row = run_tail(probe, params)
        return row if row["result"] == "fault" else probe.emit("tail", **row)

    with ThreadPoolExecutor(WORKERS) as pool:
        rows = list(pool.map(first, cases))
    bad: dict[str, list[str]] = {}
    needy = []
    for params, row in zip(cases, rows, strict=True):
        if row is None:
            continue
        if row["result"] == "fault":
            is_late = probe.late(f"confirming {params}")
            row = probe.emit("tail", **(row if is_late else run_tail(probe, params)))
        found = bad.setdefault(f"{row['kernel']} q{row['q_len']}", [])
        if row["result"] != "ok":
            where = f"{row['tail']}, group {row['group']}, short by {row['short_by']}"
            found.append(f"{row['result']} ({where})")
        if row["result"] == "fault" and row["group"] == max(groups) and not row["short_by"]:
            needy.append(params)
    with ThreadPoolExecutor(WORKERS) as pool:
        slack = dict(pool.map(lambda params: find_slack(probe, params), needy))
    numbers = {name: results or "safe" for name, results in bad.items()}
    numbers |= {f"slack of {name}": tokens for name, tokens in slack.items()}
    question = "May pages past the length be absent or hold NaN?"
    yield Finding(question, yes(not any(bad.values())), numbers)


def find_slack(probe: Probe, params: Row) -> tuple[str, int | None]:
    """The least number of mapped, zeroed tokens past the length with which a kernel is right."""
    name = f"{params['kernel']} q{params['q_len']}"
    for slack in SLACKS:
        if probe.late(f"slack of {name}"):
            break
        row = run_tail(probe, params | {"slack_tokens": slack})
        probe.emit("tail", **row)
        if row["result"] == "ok":
            return name, slack
    return name, None


# -- changes while kernels read --------------------------------------------------------------


def changes_under_readers(probe: Probe) -> Iterator[Finding]:
    access = probe.run_case("hazard:access_under_reader", {})
    safe = access["outcome"] == "completed" and not access["wrong_words"]
    advice = "CudaMemory.seals_under_readers can be turned on." if safe else ""
    question = "May a page become read-only under a kernel that reads it?"
    yield Finding(question, yes(safe), access, advice)
    unmap = probe.run_case("hazard:unmap_under_reader", {})
    safe = unmap["outcome"] == "completed"
    advice = "" if safe else "Fence by events before unmapping."
    question = "Is it safe to unmap under a kernel that reads the page?"
    yield Finding(question, yes(safe), unmap, advice)


def _reader(machine: HostMachine, region: Region, scale: Any) -> Any:
    """A stream on which kernels read all words of the region for a while, and where they count."""
    rounds = torch.zeros(1, dtype=torch.int64, device=machine.device)
    machine.synchronize()
    stream = machine.new_stream()
    words = region.num_bytes // 4
    with machine.on(stream):
        machine.launch("read_until", 4, region.address, words, scale.spin_ns, rounds.data_ptr())
    return stream, rounds


def unmap_under_reader(machine: HostMachine, scale: Any, params: Mapping[str, Any]) -> Row:
    """Case: unmap a page while a kernel reads it; did the call wait, and did the kernel survive?"""
    region = Region(machine, scale.page_bytes, 1)
    stream, _rounds = _reader(machine, region, scale)
    time.sleep(0.002)
    start = time.perf_counter()
    region.unmap()
    unmap_us = (time.perf_counter() - start) * 1e6
    found = {"unmap_us": unmap_us, "kernel_still_running": machine.busy(stream)}
    print(json.dumps(found), flush=True)  # the process may die of what comes
    machine.synchronize()
    return found


def access_under_reader(machine: HostMachine, scale: Any, params: Mapping[str, Any]) -> Row:
    """Case: change the access of every other page while kernels read all of them.

    From writable to read-only and back, until the kernels have ended: is every word right?
    """
    region = Region(machine, scale.page_bytes, 4)
    words = region.tensor(dtype=torch.int32).fill_(PATTERN)
    wrong: Tensor = torch.zeros(1, dtype=torch.int64, device=machine.device)
    stream, _rounds = _reader(machine, region, scale)
    with machine.on(stream):
        for _ in range(READS_UNDER_CHANGE):
            wrong += (words != PATTERN).sum()
    times_us = []
    while not times_us or machine.busy(stream):
        for access in (READ, READ_WRITE):
            for page in (0, 2):
                start = time.perf_counter()
                address = region.address + page * region.page_bytes
                region.driver.set_access([(address, region.page_bytes, access)])
                times_us.append((time.perf_counter() - start) * 1e6)
    machine.synchronize()
    return {
        "wrong_words": int(wrong),
        "num_calls": len(times_us),
        "call_us_median": median(times_us),
        "call_us_most": max(times_us),
    }
