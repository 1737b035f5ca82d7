"""Experiments of the two papers: which are repeated here, how, and what came out.

``docs/experiments.md`` is :func:`document`, word for word; a test holds it to that. Results are
those of the committed files that each row links to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["EXPERIMENTS", "Experiment", "document"]

_PAGED: Final = "PagedAttention"
_VIRTUAL: Final = "vAttention"
_PAPERS: Final = "benchmarks/papers/results/2026-11-21-amd-epyc/tables.md"
_SHARING: Final = "benchmarks/sharing/results/2026-11-21-amd-epyc/tables.md"
_PREFIX: Final = "benchmarks/sharing/results/2026-11-21-amd-epyc-prefix/tables.md"
_KERNELS: Final = "benchmarks/kernels/results/2026-11-21-amd-epyc-2/tables.md"
_ALLOC: Final = "benchmarks/alloc/results/2026-11-21-amd-epyc/tables.md"
_STEPS: Final = "benchmarks/alloc/results/2026-11-21-amd-epyc-steps/tables.md"


class Experiment(NamedTuple):
    """``state``: "measured" (on the host's CPU), "counted" (by the real memory core, without
    times), "simulated" (its times are computed) or "needs a GPU". ``result``: where it is kept."""

    paper: str
    what: str
    about: str
    state: str
    command: str
    ours: str = "–"
    theirs: str = "–"
    result: str | None = None


EXPERIMENTS: Final = (
    Experiment(
        _PAGED,
        "Figure 2",
        "share of KV memory that holds token states",
        "counted",
        "vmserve bench alloc --section waste",
        "22.4, 29.0, 41.0 % for Max, Pow2, Oracle; 96.3 % in blocks of 16",
        "20.4 to 38.2 % for the three; above 96 %",
        _ALLOC,
    ),
    Experiment(
        _PAGED,
        "Figure 12",
        "request rate against normalized latency, OPT-13B",
        "simulated",
        "vmserve bench papers --figure 12",
        "ShareGPT: 1.91 times the rate of Orca (Oracle), 3.36 times that of Orca (Max)",
        "1.7 to 2.7 times, 2.7 to 8 times",
        _PAPERS,
    ),
    Experiment(
        _PAGED,
        "Figure 13",
        "requests that run at once, OPT-13B",
        "simulated",
        "vmserve bench papers --figure 13",
        "ShareGPT, saturated: 2.27 times Orca (Oracle), 4.54 times Orca (Max)",
        "2.2 times, 4.3 times",
        _PAPERS,
    ),
    Experiment(
        _PAGED,
        "Figure 14",
        "rate with parallel samples and beams, Alpaca",
        "simulated",
        "vmserve bench papers --figure 14",
        "over Orca (Oracle): 1.21 in basic sampling, 1.88 with 6 beams",
        "1.3 in basic sampling, 2.3 with 6 beams",
        _PAPERS,
    ),
    Experiment(
        _PAGED,
        "Figure 15",
        "KV memory saved by sharing within a request, widths 2 / 4 / 6",
        "measured",
        "vmserve bench sharing --section blocks",
        "Alpaca: samples 8.1 / 11.9 / 13.0 %, beams 30.6 / 48.8 / 54.1 %; "
        "ShareGPT: 22.2 / 33.0 / 36.6 %, 43.7 / 66.3 / 73.5 %",
        "Alpaca: 6.1 to 9.8 %, 37.6 to 55.2 %; ShareGPT: 16.2 to 30.5 %, 44.3 to 66.3 %",
        _SHARING,
    ),
    Experiment(
        _PAGED,
        "Figure 16",
        "requests with a common prefix (there LLaMA-13B against Orca, here the prefix cache "
        "against none)",
        "measured",
        "vmserve bench sharing --section prefix",
        "another comparison than the paper's: see the tables",
        "1.67 times the rate with one example, 3.58 times with five, over Orca (Oracle)",
        _PREFIX,
    ),
    Experiment(
        _PAGED,
        "Figure 17",
        "conversations, rate against latency",
        "needs a GPU",
        "vmserve bench ab --workload sessions",
    ),
    Experiment(
        _PAGED,
        "Figure 18",
        "what block tables cost the attention kernel, and block sizes (here the CPU's kernels)",
        "measured",
        "vmserve bench kernels --section decode,blocks",
        "paged over contiguous: medians of 0.94 to 1.15; at most 1.05 with blocks of 16 at random",
        "on an A100: blocks of 16 to 128 are best on ShareGPT, 16 to 32 on Alpaca",
        _KERNELS,
    ),
    Experiment(
        _PAGED,
        "Figure 19",
        "recomputing against swapping, by block size",
        "simulated",
        "vmserve bench papers --figure 19",
        "one victim of 256 tokens: recomputing 21.5 ms at any size, swapping 18 merged, "
        "140 to 18 a copy for each block",
        "recomputing never takes more than 20 % over swapping",
        _PAPERS,
    ),
    Experiment(
        _VIRTUAL,
        "Figures 2 to 8 and 11; Tables 2, 5, 6, 9",
        "kernels and whole systems on A100s, and illustrations",
        "needs a GPU",
        "python benchmarks/gpu/probe.py",
        theirs="decode up to 1.99 times vLLM's kernel; end to end 1.22 and 1.29 times paged "
        "FlashAttention-2 and FlashInfer",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 9",
        "decoding steps while pages are mapped (here the host's driver)",
        "measured",
        "vmserve bench alloc --section steps",
        "overlapped over mapped ahead of time: +1.3 % [+0.2, +3.0] with 64-token pages; "
        "synchronous: 3.5 to 9.8 ms in the worst hundredth of the steps",
        "synchronous mapping gives spikes of 5 to 20 ms, overlapping hides them",
        _STEPS,
    ),
    Experiment(
        _VIRTUAL,
        "Figure 10",
        "time until a prompt's pages can be written (here the host's driver)",
        "measured",
        "vmserve bench alloc --section prefill",
        "1k to 16k tokens: 0.08 to 0.15 ms in a parked slot, 2.3 to 40 ms from free pages",
        result=_ALLOC,
    ),
    Experiment(
        _VIRTUAL,
        "Table 7",
        "bytes of pages that become usable a second (here the host's driver)",
        "measured",
        "vmserve bench alloc --section bandwidth",
        "2.3 GB/s with 64 KiB pages one by one, 7.3 with 2 MiB",
        "A100: 7.59 GB/s with 64 KiB, 35.17 with 2 MiB",
        _ALLOC,
    ),
    Experiment(
        _VIRTUAL,
        "Table 8",
        "tokens a page and the most that a request wastes, by page size",
        "counted",
        "vmserve plan --paper",
        "the paper's table exactly, from the layout planner",
        "4 to 15 MB a request with 64 KiB, 128 to 480 MB with 2 MiB",
        _ALLOC,
    ),
    Experiment(
        _VIRTUAL,
        "Figure 12",
        "largest batch by page size (here another pool and trace)",
        "counted",
        "vmserve bench alloc --section batch",
        "35.8 requests with 16-token pages, 34.0 with 64, 27.5 with 256, 7.0 with 2,048",
        "three models: 240 / 258 / 68 with 64 KiB, 187 / 203 / 56 with 2 MiB",
        _ALLOC,
    ),
)

_HEAD: Final = """\
# Experiments of the papers

What of the evaluations of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023) and of "vAttention: Dynamic Memory Management for Serving
LLMs without PagedAttention" (Prabhu et al., arXiv 2405.04437) is repeated here, by which command,
and what came out beside the papers' figures. `vmserve bench papers --list` prints this table.

- **measured**: ran on the host's CPU and memory driver; times are those of that machine.
- **counted**: the real memory core did the work, and pages or blocks were counted; no times.
- **simulated**: the real scheduler and memory core under a computed clock; no GPU was used.
- **needs a GPU**: not repeated. The command is what would run there, or does on a CPU today.

| paper | experiment | | state | command | ours | the paper's |
|---|---|---|---|---|---|---|
"""


def document() -> str:
    """All of ``docs/experiments.md``."""
    lines = []
    for each in EXPERIMENTS:
        ours = each.ours if each.result is None else f"{each.ours} ([tables](../{each.result}))"
        cells = (each.paper, each.what, each.about, each.state, f"`{each.command}`", ours)
        lines.append(f"| {' | '.join(cells)} | {each.theirs} |")
    return _HEAD + "\n".join(lines) + "\n"
