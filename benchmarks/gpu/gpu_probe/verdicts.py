"""The design's questions, answered in words from the probe's records."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from vmserve.numbers.sizes import format_size

from .common import one_line
from .findings import (
    UNREADABLE,
    Findings,
    Unanswered,
    Verdict,
    need,
    need_one,
    yes,
)

KV_DEMAND_GBS = 0.75
"""The largest demand for KV memory that vAttention's paper reports while decoding."""
TOLERATED_MEAN, TOLERATED_WORST = 1.05, 1.10
"""A layout is fit when its mean and worst times over dense stay within these."""
TOLERATED_ERROR = 1e-2
"""Relative error below which bf16 attention counts as right."""


def granularity(found: Findings) -> Verdict:
    device = need_one(found.last("device", "device"))
    least, advised = device["granularity_minimum_bytes"], device["granularity_recommended_bytes"]
    return Verdict(
        "Does the driver map pages, and how small?",
        "yes",
        f"{device['name']}: granularity {format_size(least)}, recommended {format_size(advised)}.",
        {"minimum_bytes": least, "recommended_bytes": advised},
    )


def page_reads(found: Findings) -> Verdict:
    rates = need(found.of("device", "rate"))
    plain = need_one(found.last("device", "rate", memory="plain"))["read_gbs"]
    pages = {format_size(r["page_bytes"]): r["read_gbs"] / plain for r in rates if r["page_bytes"]}
    if not pages:
        raise Unanswered
    listed = ", ".join(f"{page} {ratio:.1%}" for page, ratio in pages.items())
    return Verdict(
        "Do pages in random order read as fast as plain memory (within 3 %)?",
        yes(min(pages.values()) >= 0.97),
        f"Of {plain:.0f} GB/s: {listed}.",
        pages,
    )


def map_cost(found: Findings) -> Verdict:
    rows = [r for r in need(found.of("vmm_costs", "call")) if r["operation"] == "map"]
    page = min(row["page_bytes"] for row in rows)
    us_per_page = {
        row["num_pages"]: row["median_ns"] / 1e3 / row["num_pages"]
        for row in rows
        if row["page_bytes"] == page
    }
    longest = max(us_per_page)
    gain = us_per_page[1] / us_per_page[longest]
    return Verdict(
        "Is one set-access over a run of pages much cheaper than one each (2x or more)?",
        yes(gain >= 2),
        f"{format_size(page)}: map and access {us_per_page[1]:.1f} us a page alone, "
        f"{us_per_page[longest]:.1f} us in runs of {longest} ({gain:.1f}x).",
        {"alone_us": us_per_page[1], "gain": gain},
    )


def map_rate(found: Findings) -> Verdict:
    rows = {row["page_bytes"]: row["gb_per_s"] for row in need(found.of("vmm_costs", "bandwidth"))}
    page = min(rows)
    ready = {way: rate for way, rate in rows[page].items() if way.startswith("ready")}
    slowest, fastest = ready["ready, one by one"], max(max(row.values()) for row in rows.values())
    return Verdict(
        f"Does mapping page by page keep up with a demand of {KV_DEMAND_GBS} GB/s?",
        yes(slowest >= KV_DEMAND_GBS),
        f"{format_size(page)} pages one by one: {slowest:.1f} GB/s, new ones "
        f"{rows[page]['new, one by one']:.1f}; best of all sizes and ways {fastest:.1f}.",
        {"one_by_one_gbs": slowest, "best_gbs": fastest},
    )


def waits_for_kernels(found: Findings) -> Verdict:
    records = need([r for r in found.of("vmm_costs", "beside_kernel") if r["load"] != "idle"])
    waiting = list(dict.fromkeys(r["call"] for r in records if r["waits"]))
    medians = {
        r["call"]: r["us"]["median"] for r in records if r["load"] == "all_sms" and not r["waits"]
    }
    listed = ", ".join(f"{call} {us:.1f}" for call, us in medians.items())
    return Verdict(
        "Do driver calls wait for running kernels?",
        yes(bool(waiting)),
        (f"These wait: {', '.join(waiting)}. " if waiting else "None waits. ")
        + f"Medians in us of the others beside a kernel on every SM: {listed}.",
        {"waiting": waiting, "us": medians},
    )


def unmap_under_reader(found: Findings) -> Verdict:
    case = need_one(found.last("tail_hazard", "fault", case="unmap_under_reader"))
    survived = case["outcome"] == "completed"
    said = "; ".join(case.get("said", [])) or case.get("error", case["outcome"])
    return Verdict(
        "Is it safe to unmap under a kernel that reads the page?",
        yes(survived),
        (
            f"The unmap took {case.get('unmap_us', 0):.0f} us and the kernel finished."
            if survived
            else f"{said}: {case.get('error', case['outcome'])}. Fence by events before unmapping."
        ),
    )


def access_under_reader(found: Findings) -> Verdict:
    case = need_one(found.last("tail_hazard", "fault", case="access_under_reader"))
    survived = case["outcome"] == "completed" and case["wrong_words"] == 0
    if case["outcome"] != "completed":
        detail = f"{case.get('error', case['outcome'])}. Pages stay writable in slots."
    else:
        detail = (
            f"{case['num_calls']} calls, {case['call_us_median']:.1f} us at the median and "
            f"{case['call_us_most']:.0f} at most; {case['wrong_words']} words were read wrong."
        )
    return Verdict(
        "May a page become read-only under a kernel that reads it?",
        yes(survived),
        detail + (" CudaMemory.seals_under_readers can be turned on." if survived else ""),
    )


def zeroing(found: Findings) -> Verdict:
    rates = {
        f"{format_size(r['page_bytes'])} {r['mode']}": r["gbs"]
        for r in need(found.of("vmm_costs", "zeroing"))
    }
    listed = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    return Verdict("How fast are pages zeroed?", "measured", f"GB/s: {listed}.", rates)


def coherence(found: Findings) -> Verdict:
    records = need(found.of("aliasing", "coherence"))
    wrong = {r["how"]: r["different"] for r in records}
    return Verdict(
        "Does ordered later work see a write through the other alias?",
        yes(not any(wrong.values())),
        f"Wrong words of {records[0]['words_checked']}: {wrong}.",
        wrong,
    )


def inside_kernel(found: Findings) -> Verdict:
    records = need(found.of("aliasing", "inside_kernel"))
    stale = {("fenced" if r["fenced"] else "unfenced"): r["stale"] for r in records}
    return Verdict(
        "Does a kernel see its own write through the other alias without a fence?",
        yes(not stale.get("unfenced", 1)),
        f"Stale reads of {records[0]['words']}: {stale}.",
        stale,
    )


def remapping(found: Findings) -> Verdict:
    record = need_one(found.last("aliasing", "remap"))
    names = ("other_alias_changed", "new_pages_wrong", "old_pages_wrong_after_return")
    wrong = {name: record[name] for name in names}
    return Verdict(
        "Does remapping one alias leave data and the other alias alone?",
        yes(not any(wrong.values())),
        f"Wrong words: {wrong}.",
        wrong,
    )


def read_only(found: Findings) -> Verdict:
    record = need_one(found.last("aliasing", "read_only"))
    case = found.last("aliasing", "fault", case="readonly_write")
    if not record["accepted"]:
        return Verdict("Can a slot map pages read-only?", "no", f"Refused: {record['error']}.")
    trapped = case is not None and case["outcome"] in ("error", "signal")
    ended = "was not tried" if case is None else case.get("error", case["outcome"])
    return Verdict(
        "Can a slot map pages read-only, so that a write through it traps?",
        yes(trapped and record["readable"] and record["other_alias_writable"]),
        f"Readable: {record['readable']}, other alias writable: "
        f"{record['other_alias_writable']}; a write through it: {ended}.",
    )


def limits(found: Findings) -> Verdict:
    count = found.last("aliasing", "mapping_count")
    sizes = [r["tib"] for r in need(found.of("aliasing", "reservation")) if r["accepted"]]
    largest = max(sizes, default=0)
    held = found.last("aliasing", "reservations_of_1_tib")
    parts = [f"Largest reservation tried that works: {largest:g} TiB"]
    if held:
        parts.append(f"{held['count']} of 1 TiB at once {held['error']}".strip())
    enough = largest >= 1
    if count:
        growth = count["us_per_page"]
        cost = f", {growth[0][1]:.1f} us a page at first, {growth[-1][1]:.1f} at last"
        parts.append(
            f"{count['num_mapped']} of {count['wanted']} mappings{cost if growth else ''} "
            f"{count['error']}".strip()
        )
        enough = enough and not count["error"]
    return Verdict(
        "Are address space and mapping count large enough (1 TiB, no failure)?",
        yes(enough),
        "; ".join(parts) + ".",
    )


def _ratios(found: Findings, key: str) -> dict[Any, list[float]]:
    groups: dict[Any, list[float]] = {}
    for record in need(found.of("attention", "attention")):
        groups.setdefault(record[key], []).append(record["ratio"])
    return groups


def grouping(found: Findings) -> Verdict:
    groups = _ratios(found, "layout")
    means = {layout: geometric_mean(ratios) for layout, ratios in groups.items()}
    worst = {layout: max(ratios) for layout, ratios in groups.items()}
    fit = [
        layout
        for layout in groups
        if means[layout] <= TOLERATED_MEAN and worst[layout] <= TOLERATED_WORST
    ]
    listed = ", ".join(f"{k}: mean {means[k]:.3f}, worst {worst[k]:.2f}" for k in groups)
    return Verdict(
        "Which layers per group keep stock FlashAttention level with dense "
        f"(mean {TOLERATED_MEAN}, worst {TOLERATED_WORST})?",
        ", ".join(fit) if fit else "none",
        f"Time over dense by layout: {listed}.",
        {"mean": means, "worst": worst, "fit": fit},
    )


def attention_pages(found: Findings) -> Verdict:
    groups = _ratios(found, "page_bytes")
    means = {format_size(page): geometric_mean(ratios) for page, ratios in groups.items()}
    spread = max(means.values()) / min(means.values())
    listed = ", ".join(f"{page} {mean:.3f}" for page, mean in means.items())
    return Verdict(
        "Does the page size matter to attention (over 2 %)?",
        yes(spread > 1.02),
        f"Mean time over dense: {listed}.",
        means,
    )


def attention_right(found: Findings) -> Verdict:
    records = need(found.of("attention", "attention"))
    wrong = [
        f"{r['kernel']} {r['case']} {r['layout']}"
        for r in records
        if not isinstance(r["rel_err"], float) or r["rel_err"] > TOLERATED_ERROR
    ]
    exact = sum(r["max_abs_from_dense"] == 0 for r in records)
    numbers = [r["rel_err"] for r in records if isinstance(r["rel_err"], float)]
    return Verdict(
        "Is stock FlashAttention right on slot views?",
        yes(not wrong),
        f"{len(records)} cases, largest relative error {max(numbers, default=math.nan):.1e}, "
        f"{exact} bit-equal to a contiguous copy"
        + (f"; wrong: {', '.join(wrong[:5])}" if wrong else "")
        + ".",
    )


def tails(found: Findings) -> Verdict:
    records = need(found.of("tail_hazard", "tail"))
    bad: dict[str, list[str]] = {}
    for record in records:
        name = f"{record['kernel']} q{record['q_len']}"
        bad.setdefault(name, [])
        if record["result"] != "ok" and not record["slack_tokens"]:
            where = f"{record['tail']}, group {record['group']}, short by {record['short_by']}"
            bad[name].append(f"{record['result']} ({where})")
    slack = {f"{r['kernel']} q{r['q_len']}": r["tokens"] for r in found.of("tail_hazard", "slack")}
    lines = [
        f"{name}: {'; '.join(results) if results else 'safe'}"
        + (f", needs {slack[name]} tokens of slack" if name in slack else "")
        for name, results in bad.items()
    ]
    return Verdict(
        "May pages past the length be absent or hold NaN?",
        yes(not any(bad.values())),
        " | ".join(lines) + ".",
        {"slack_tokens": slack},
    )


def graphs(found: Findings) -> Verdict:
    records = need(found.of("graphs", "remap_under_graph"))
    names = ("rel_err_at_capture", "rel_err_after_remap", "rel_err_after_return")
    wrong = [
        f"{r['kernel']} {name}"
        for r in records
        for name in names
        if not isinstance(r[name], float) or r[name] > TOLERATED_ERROR
    ]
    for name in ("changed_by_remap", "same_after_return"):
        wrong += [f"{r['kernel']} not {name}" for r in records if not r[name]]
    exchange = max(float(r["exchange_us"]) for r in records)
    return Verdict(
        "Do captured graphs follow remapped pages?",
        yes(not wrong),
        f"{len(records)} kernels; exchanging {records[0]['pages']} pages took {exchange:.0f} us"
        + (f"; wrong: {', '.join(wrong)}" if wrong else "")
        + ".",
    )


def capture_beside_mapping(found: Findings) -> Verdict:
    records = need(found.of("graphs", "map_during_capture"))
    broken = [
        f"{r['mode']}/{r['where']}: {'; '.join(r['errors'])}"
        for r in records
        if not r["captured"] or r["errors"]
    ]
    return Verdict(
        "May pages be mapped while a graph is being captured?",
        yes(not broken),
        (" | ".join(broken) or "In every capture mode, from the same and another thread") + ".",
    )


def elastic(found: Findings) -> Verdict:
    record = need_one(found.last("torch_interplay", "exhaustion"))
    recovered = bool(record["torch_error_when_full"]) and not record["torch_error_after_shrink"]
    lost = record["free_before_bytes"] - record["free_after_bytes"]
    return Verdict(
        "Does memory move between the pool and torch, out of memory included?",
        yes(recovered and bool(record["pool_error"])),
        f"Pool refused by {record['pool_error'] or 'nothing'} with "
        f"{format_size(record['left_free_bytes'])} left; torch when full: "
        f"{record['torch_error_when_full'] or 'no error'}; after the pool shrank: "
        f"{record['torch_error_after_shrink'] or 'works'}; {format_size(lost)} missing at the end.",
    )


def wrapping(found: Findings) -> Verdict:
    record = need_one(found.last("torch_interplay", "wrapping"))
    right = record["first_and_last_slot_right"] and record["clone_right"]
    return Verdict(
        "Can torch hold a strided tensor over a reservation of a TiB?",
        yes(right),
        f"{record['tib']:g} TiB, {record['slots']} slots, wrapped in {record['wrap_us']:.0f} us "
        "before anything was mapped.",
    )


QUESTIONS: tuple[tuple[str, Callable[[Findings], Verdict]], ...] = (
    ("device", granularity),
    ("device", page_reads),
    ("vmm_costs", map_cost),
    ("vmm_costs", map_rate),
    ("vmm_costs", waits_for_kernels),
    ("vmm_costs", zeroing),
    ("tail_hazard", unmap_under_reader),
    ("tail_hazard", access_under_reader),
    ("aliasing", coherence),
    ("aliasing", inside_kernel),
    ("aliasing", remapping),
    ("aliasing", read_only),
    ("aliasing", limits),
    ("attention", grouping),
    ("attention", attention_pages),
    ("attention", attention_right),
    ("tail_hazard", tails),
    ("graphs", graphs),
    ("graphs", capture_beside_mapping),
    ("torch_interplay", elastic),
    ("torch_interplay", wrapping),
)
"""Each question with the section whose records answer it."""


def all_verdicts(found: Findings) -> list[Verdict]:
    """A verdict for each question; ``open``, with the section's fate, where records lack."""
    verdicts = []
    for section, answer in QUESTIONS:
        try:
            verdicts.append(answer(found))
        except Unanswered:
            fate = found.status.get(section, "was not asked for")
            name = answer.__name__.replace("_", " ")
            verdicts.append(Verdict(f"{name}:", "open", f"Section {section}: {fate}."))
        except UNREADABLE as error:
            name = answer.__name__.replace("_", " ")
            verdicts.append(Verdict(f"{name}:", "open", f"Records unreadable: {one_line(error)}."))
    return verdicts
