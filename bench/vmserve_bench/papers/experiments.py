"""Experiments of the two papers: which are repeated here, how, and what came out.

``docs/experiments.md`` is :func:`document`, word for word; a test holds it to that. Results are
those of the committed files that each row links to.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["EXPERIMENTS", "Experiment", "document"]

_PAGED: Final = "PagedAttention"
_VIRTUAL: Final = "vAttention"
_PREPRINT: Final = "vAttention, preprint"
_PAPERS: Final = "benchmarks/papers/results/2026-11-21-amd-epyc/tables.md"
_PAPERS_AGAIN: Final = "benchmarks/papers/results/2026-11-22-amd-epyc/tables.md"
_REAL: Final = "benchmarks/papers/results/2026-11-22-amd-epyc-2/tables.md"
_SHARING: Final = "benchmarks/sharing/results/2026-11-21-amd-epyc/tables.md"
_KERNELS: Final = "benchmarks/kernels/results/2026-11-21-amd-epyc-2/tables.md"
_ALLOC: Final = "benchmarks/alloc/results/2026-11-21-amd-epyc/tables.md"
_STEPS: Final = "benchmarks/alloc/results/2026-11-21-amd-epyc-steps/tables.md"
_H100: Final = "benchmarks/gpu/results/2026-11-27-nvidia-h100-80gb-hbm3/README.md"


class Experiment(NamedTuple):
    """``state``: "measured" (on the host's CPU), "counted" (by the real memory core, without
    times), "simulated" (its times are computed) or "needs a GPU". ``result``: where it is kept.
    ``real``: the figure's name for ``vmserve bench papers --engine real``; ``found``: what came
    out by that, where ``ours`` is of another command.
    """

    paper: str
    what: str
    about: str
    state: str
    command: str
    ours: str = "–"
    theirs: str = "–"
    result: str | None = None
    real: str | None = None
    found: str | None = None

    @property
    def of_real(self) -> str:
        """Last column: the real engine."""
        if self.real is None:
            return "–"
        return self.real if self.found is None else f"{self.real}: {self.found}"


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
        real="2",
        found="38.3, 28.1, 19.6 % for Oracle, Pow2, Max; 86.2 % paged, 90.0 % virtual, of the "
        "whole pool",
    ),
    Experiment(
        _PAGED,
        "Figure 12",
        "request rate against normalized latency, OPT-13B",
        "simulated",
        "vmserve bench papers --figure 12",
        "ShareGPT: 2.00 times the rate of Orca (Oracle), 3.52 times that of Orca (Max)",
        "1.7 to 2.7 times, 2.7 to 8 times",
        _PAPERS_AGAIN,
        real="12",
        found="at the highest rate 0.74 (paged) and 0.80 ms (virtual) a token; Orca 1.17, 2.29, "
        "3.45 ms (Oracle, Pow2, Max)",
    ),
    Experiment(
        _PAGED,
        "Figure 13",
        "requests that run at once, OPT-13B",
        "simulated",
        "vmserve bench papers --figure 13",
        "ShareGPT, saturated: 2.36 times Orca (Oracle), 4.71 times Orca (Max)",
        "2.2 times, 4.3 times",
        _PAPERS_AGAIN,
        real="13",
        found="2.18 times Orca (Oracle), 4.39 times Orca (Max); 30.7 at once, Orca 14.1 / 10.2 / "
        "7.0 (the paper: 30.4, 13.6 / 9.8 / 7.0)",
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
        real="14",
        found="over Orca (Oracle), at once: 2.67 in basic sampling, 2.98 to 3.46 with samples, "
        "3.18 to 3.60 with beams; rates: 0.94, 1.10 to 1.50, 0.98 to 1.80",
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
        real="15",
        found="12 requests. Alpaca: 7.1 / 10.6 / 11.8 %, 26.0 / 40.4 / 48.7 %; ShareGPT: "
        "15.5 / 23.3 / 25.9 %, 45.5 / 63.6 / 67.7 %",
    ),
    Experiment(
        _PAGED,
        "Figure 16",
        "requests with a common prefix (there LLaMA-13B)",
        "measured",
        "vmserve bench papers --engine real --figure 16",
        "one example: 1.50 times the rate of Orca (Oracle) in the paged view, 1.34 in the virtual; "
        "five: 2.77, 2.06",
        "1.67 times the rate with one example, 3.58 times with five, over Orca (Oracle)",
        _REAL,
        real="16",
    ),
    Experiment(
        _PAGED,
        "Figure 17",
        "conversations, rate against latency",
        "measured",
        "vmserve bench papers --engine real --figure 17",
        "at 0.85 of the highest rate 1.15 (paged) and 1.70 ms (virtual) a token, Orca 6.52, 2.76, "
        "3.36 (Oracle, Pow2, Max); at the highest 3.44, 4.53 and 7.99, 3.45, 3.30",
        result=_REAL,
        real="17",
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
        real="18",
        found="blocks of 4 to 128: 132 to 150 requests/s, ranges that overlap",
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
        real="19",
        found="recomputing over swapping: 1.13, 1.19, 0.97 with blocks of 4, 16, 64",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 2",
        "a prompt's attention, paged kernels over the others (here the CPU's)",
        "measured",
        "vmserve bench kernels --section prefill",
        "medians of 0.96 to 1.11, all but one interval around 1",
        "24 to 28 % slower, on an A100",
        _KERNELS,
        real="v2",
        found="medians of 0.99 to 1.02, no interval apart from 1",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 3",
        "decoding's paged kernel by block size (here the CPU's)",
        "measured",
        "vmserve bench kernels --section blocks",
        "blocks of 8 to 128 over contiguous: medians of 0.98 to 1.08",
        result=_KERNELS,
        real="v3",
        found="medians of 0.99 to 1.08; 1.12 with blocks of 8, 125M in bfloat16",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 4",
        "decoding throughput by batch, and the KV memory that it asks for",
        "measured",
        "vmserve bench papers --engine real --figure v4",
        "5,045 tokens/s alone, 15,509 with 16, 11,570 with 128; at most 63.5 MB/s",
        "at most 600 to 750 MB/s",
        _REAL,
        real="v4",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 6",
        "prompts alone, tokens/s by length, paged and virtual",
        "measured",
        "vmserve bench papers --engine real --figure v6",
        "256 to 4,096 tokens: virtual over paged 0.94, 0.97, 0.93, 1.00",
        result=_REAL,
        real="v6",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 7",
        "decoding tokens/s by batch behind long contexts, paged and virtual",
        "measured",
        "vmserve bench papers --engine real --figure v7",
        "batches of 1 to 16: virtual over paged 1.06, 1.02, 1.04, 0.99",
        "preprint: up to 1.99 times vLLM's kernel",
        _REAL,
        real="v7",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 8",
        "long prompts, all there at once, requests a minute",
        "measured",
        "vmserve bench papers --engine real --figure v8",
        "virtual over paged 0.99, ranges that overlap",
        "preprint: 1.22 and 1.29 times paged FlashAttention-2 and FlashInfer",
        _REAL,
        real="v8",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 9",
        "long prompts as they come, end-to-end latency",
        "measured",
        "vmserve bench papers --engine real --figure v9",
        "medians at 0.6 of the most: 23 ms paged, 29 ms virtual; at 0.8: 64 and 68, ranges that "
        "overlap",
        result=_REAL,
        real="v9",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 11",
        "decoding steps while pages are mapped (here the host's driver)",
        "measured",
        "vmserve bench alloc --section steps",
        "overlapped over mapped ahead of time: +1.3 % [+0.2, +3.0] with 64-token pages; "
        "synchronous: 3.5 to 9.8 ms in the worst hundredth of the steps",
        "synchronous mapping gives spikes of 5 to 20 ms, overlapping hides them",
        _STEPS,
        real="v11",
        found="decoding steps wait for 352 driver calls instead of 2,304; p99 2.5 and 2.4 ms, so "
        "no spikes to hide",
    ),
    Experiment(
        _VIRTUAL,
        "Figure 6, on a GPU",
        "time to the first token of one prompt by length, paged and virtual, on an H100",
        "measured",
        "benchmarks/gpu/run.sh engine --parts ttft",
        "512, 2,048, 8,192 tokens: virtual over paged 1.01, 0.96, 0.93",
        result=_H100,
    ),
    Experiment(
        _VIRTUAL,
        "Figure 7, on a GPU",
        "decoding tokens/s by batch behind 1,060 tokens, paged and virtual, on an H100",
        "measured",
        "benchmarks/gpu/run.sh engine --parts decode",
        "batches of 1, 8, 32, 128: virtual over paged 1.02, 1.01, 1.01, 1.00 by our kernels in "
        "both, 1.02, 0.97, 0.95, 0.88 by stock FlashAttention",
        "preprint: up to 1.99 times vLLM's kernel",
        _H100,
    ),
    Experiment(
        _VIRTUAL,
        "Figure 11, on a GPU",
        "decoding steps while pages are mapped, on an H100",
        "measured",
        "benchmarks/gpu/run.sh engine --parts mapping",
        "all of 32 sequences grow in one step: slowest 13.1 ms synchronous, 7.8 overlapped, 6.9 "
        "without growth; with 16 mappings a page 58 and 8.4",
        "synchronous mapping gives spikes of 5 to 20 ms, overlapping hides them",
        _H100,
    ),
    Experiment(
        _VIRTUAL,
        "Figures 2 to 4, 8 and 9, on a GPU",
        "kernels and whole systems on A100s",
        "needs a GPU",
        "benchmarks/gpu/run.sh engine",
    ),
    Experiment(
        _PREPRINT,
        "Figure 10",
        "time until a prompt's pages can be written (here the host's driver)",
        "measured",
        "vmserve bench alloc --section prefill",
        "1k to 16k tokens: 0.08 to 0.15 ms in a parked slot, 2.3 to 40 ms from free pages",
        result=_ALLOC,
    ),
    Experiment(
        _PREPRINT,
        "Table 7",
        "bytes of pages that become usable a second (here the host's driver)",
        "measured",
        "vmserve bench alloc --section bandwidth",
        "2.3 GB/s with 64 KiB pages one by one, 7.3 with 2 MiB; an H100 (benchmarks/gpu/run.sh "
        "probe): 86 with 2 MiB, 23 if they are made anew",
        "A100: 7.59 GB/s with 64 KiB, 35.17 with 2 MiB",
        _ALLOC,
    ),
    Experiment(
        _PREPRINT,
        "Table 8",
        "tokens a page and the most that a request wastes, by page size",
        "counted",
        "vmserve plan --paper",
        "the paper's table exactly, from the layout planner",
        "4 to 15 MB a request with 64 KiB, 128 to 480 MB with 2 MiB",
        _ALLOC,
    ),
    Experiment(
        _PREPRINT,
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

The experiments of "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023) and of "vAttention: Dynamic Memory Management for
Serving LLMs without PagedAttention" (Prabhu et al., ASPLOS 2025; arXiv 2405.04437) that are
repeated here, the commands, and the results next to the papers' figures. `vmserve bench papers
--list` prints this table.

- **measured**: ran on the host's CPU and memory driver, or where it says so on a GPU; its times.
- **counted**: the real memory core did the work, and pages or blocks were counted; no times.
- **simulated**: the real scheduler and memory core with a simulated clock; no GPU was used.
- **needs a GPU**: not repeated. The command would run it there.

The last column is the same experiment with the real engine on two cores, with the embedded
model and smaller sizes: `vmserve bench papers --engine real --figure NAME`, or `--all`; [how,
and all tables](../benchmarks/papers/README.md#on-the-real-engine). Results that depend on
memory (requests at once, shares, hits) can be compared with the papers; rates of a processor
cannot.

vAttention's figures are numbered as in the scripts of its published artifact
(`scripts/artifact_asplos25` of microsoft/vattention), which has figures 2 to 4, 6 to 9 and 11
with their experiments. Captions of the paper's other figures and of its tables were not
available. Rows of the preprint have the numbers of a version on arXiv, whose figure 9 is figure
11 here; its figures 2 to 8 and 11 and its tables 2, 5, 6 and 9 were not available either.

| paper | experiment | | state | command | ours | the paper's | real engine |
|---|---|---|---|---|---|---|---|
"""


def document() -> str:
    """Text of ``docs/experiments.md``."""
    lines = []
    for each in EXPERIMENTS:
        ours = each.ours if each.result is None else f"{each.ours} ([tables](../{each.result}))"
        cells = (each.paper, each.what, each.about, each.state, f"`{each.command}`", ours)
        lines.append(f"| {' | '.join(cells)} | {each.theirs} | {each.of_real} |")
    return _HEAD + "\n".join(lines) + "\n"
