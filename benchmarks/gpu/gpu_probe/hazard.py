"""Section ``tail_hazard``: what each kernel does with the rows past a sequence's length.

Every case runs in a process of its own, since a fault makes the whole CUDA context useless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vmserve.memory.layout import KVLayout

from .attention import announce_kernels, fill_random, reference_error, slot_views
from .attention_kernels import AttentionKernel, SlotBatch, available_kernels
from .common import Context, Options, Record
from .machine import HostMachine, Region, open_machine
from .scale import Scale, scale_for

LEAST_TOKENS = 1024
NAN_TOKENS = 512
PREFILL_ROWS = 64
CASE_TIMEOUT_S = 75.0
SLACKS = (16, 32, 64, 128, 192, 256)
FAULT_CASES = (
    "unmapped_read",
    "access_under_reader",
    "unmap_under_reader",
)

Params = dict[str, Any]


def tail_pages(page_tokens: int) -> int:
    """Pages of the sequence: over 1024 tokens, and an odd number so that few tiles divide it."""
    pages = -(-LEAST_TOKENS // page_tokens) + 1
    return pages | 1


@dataclass(frozen=True)
class TailSlot:
    """One sequence in slot 1 of two, its pages mapped, and some more past them."""

    batch: SlotBatch
    layout: KVLayout
    length: int
    #: Keeps the pages.
    region: Region


def build_slot(machine: HostMachine, scale: Scale, params: Mapping[str, Any]) -> TailSlot:
    """Map and fill what the case asks for; rows past the length are NaN or zero."""
    page, shape = scale.hazard_page, scale.hazard_shape
    layout = shape.layout(page, int(params["group"]))
    page_tokens = layout.page_tokens
    pages = tail_pages(page_tokens)
    poisoned = str(params["tail"]).startswith("nan")
    past_tokens = NAN_TOKENS if poisoned else int(params["slack_tokens"])
    mapped = pages + -(-past_tokens // page_tokens)
    slot_pages = mapped + 2
    region = Region(machine, page, 1, extra=mapped, reserve=2 * slot_pages)
    region.map(region.address + slot_pages * page, region.extra)
    pool = region.tensor(2 * slot_pages * page, torch.bfloat16)
    start = slot_pages * page // 2
    fill_random(pool[start : start + mapped * page // 2])
    max_len = slot_pages * page_tokens
    keys, values = slot_views(pool, layout, layout.layers_per_group - 1, 2, max_len)
    length = pages * page_tokens - int(params["short_by"])
    mapped_tokens = mapped * page_tokens
    poison(keys[1, length:mapped_tokens], values[1, length:mapped_tokens], str(params["tail"]))
    size = (1, int(params["q_len"]), shape.q_heads, shape.head_dim)
    queries = torch.randn(size, dtype=torch.bfloat16, device=machine.device)
    return TailSlot(SlotBatch(queries, keys, values, (1,), (length,)), layout, length, region)


def poison(keys: Tensor, values: Tensor, tail: str) -> None:
    """Fill the rows past the length: NaN in K, V or both as ``tail`` says, else zero."""
    keys.fill_(float("nan") if tail in ("nan_k", "nan_kv") else 0.0)
    values.fill_(float("nan") if tail in ("nan_v", "nan_kv") else 0.0)


def attention_tail(params: Mapping[str, Any], options: Options) -> Record:
    """Case: run one kernel over one sequence and compare with float64 attention."""
    scale = scale_for(options.dry_run)
    machine = open_machine(options)
    kernels, _ = available_kernels(options)
    kernel = next(kernel for kernel in kernels if kernel.name == params["kernel"])
    slot = build_slot(machine, scale, params)
    machine.synchronize()
    output = kernel.prepare(slot.batch)()
    machine.synchronize()
    error = reference_error(output, slot.batch)
    return {
        "trapped": False,
        "finite": bool(torch.isfinite(output).all()),
        "rel_err": error,
        "length": slot.length,
        "page_tokens": slot.layout.page_tokens,
    }


def tail_cases(kernels: list[AttentionKernel], scale: Scale) -> Iterator[Params]:
    """Every case of the section: kernel x query rows x what lies past the length."""
    for kernel in kernels:
        for q_len in (1, PREFILL_ROWS):
            if kernel.name == "sdpa_flash" and q_len > 1:
                continue
            common: Params = {"kernel": kernel.name, "q_len": q_len, "slack_tokens": 0}
            for group in scale.hazard_groups:
                yield {**common, "group": group, "tail": "unmapped", "short_by": 0}
            largest = max(scale.hazard_groups)
            yield {**common, "group": largest, "tail": "unmapped", "short_by": 5}
            for tail in ("nan_k", "nan_v"):
                yield {**common, "group": largest, "tail": tail, "short_by": 5}


def outcome_of(record: Record) -> str:
    """One word for a finished case: ``ok``, ``poisoned``, ``wrong``, or how it ended."""
    if record["outcome"] != "completed":
        return "fault" if record["outcome"] in ("error", "signal") else str(record["outcome"])
    if not record["finite"]:
        return "poisoned"
    error = record["rel_err"]
    return "ok" if isinstance(error, float) and error < 2e-2 else "wrong"


def try_tail(context: Context, params: Params) -> Record:
    """Run one case; its record with the outcome in one word, not written yet."""
    record = context.run_case("hazard:attention_tail", params, CASE_TIMEOUT_S)
    return {**params, **record, "result": outcome_of(record)}


def run_tail(context: Context, params: Params) -> str:
    """Run one case, record it, and return its outcome in one word."""
    return str(context.emit("tail", **try_tail(context, params))["result"])


def run_together(context: Context, cases: list[Params], pool: Executor) -> list[Params]:
    """Run cases a few at a time; the ones that fault twice, the second time alone.

    A fault is believed only alone, where no other process could have brought it about.
    """

    def first_try(params: Params) -> Record | None:
        if context.cut(f"tail case {params}"):
            return None
        record = try_tail(context, params)
        if record["result"] != "fault":
            context.emit("tail", **record)
        return record

    faulted = []
    for params, record in zip(cases, list(pool.map(first_try, cases)), strict=True):
        if record is None or record["result"] != "fault":
            continue
        if context.cut(f"confirming {params}"):
            context.emit("tail", **record, confirmed=False)
            faulted.append(params)
        elif run_tail(context, params) == "fault":
            faulted.append(params)
    return faulted


def find_slack(context: Context, params: Params) -> None:
    """The least number of mapped, zeroed tokens past the length with which a kernel is right."""
    for slack in SLACKS:
        if context.cut("slack search"):
            return
        if run_tail(context, {**params, "slack_tokens": slack}) == "ok":
            context.emit("slack", kernel=params["kernel"], q_len=params["q_len"], tokens=slack)
            return
    context.emit("slack", kernel=params["kernel"], q_len=params["q_len"], tokens=None)


def run_fault(context: Context, name: str) -> None:
    """Run one case of faults.py and record it."""
    record = context.run_case(f"faults:{name}", {}, CASE_TIMEOUT_S)
    context.emit("fault", **{**record, "case": name})


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Run every case, a few at a time, then search the slack of kernels that faulted."""
    del machine
    kernels, absent = available_kernels(context.options)
    announce_kernels(context, kernels, absent)
    cases = list(tail_cases(kernels, scale))
    largest = max(scale.hazard_groups)
    with ThreadPoolExecutor(max_workers=context.options.case_workers) as pool:
        faulted = run_together(context, cases, pool)
        list(pool.map(lambda name: run_fault(context, name), FAULT_CASES))
        needy = [p for p in faulted if p["group"] == largest and not p["short_by"]]
        list(pool.map(lambda params: find_slack(context, params), needy))
    run_fault(context, "nothing")
