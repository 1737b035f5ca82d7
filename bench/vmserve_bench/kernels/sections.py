"""``vmserve bench kernels``: decoding by context and batch, decoding by block size, prompts,
products of linear layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer

from vmserve.attention.cpu import CpuBackend
from vmserve.attention.sdpa import SdpaBackend
from vmserve_bench import options as opt
from vmserve_bench.kernels.rig import FORMS, SHAPES, Products, Rig
from vmserve_bench.lab.report import Report
from vmserve_bench.lab.rounds import compare, compare_many
from vmserve_bench.lab.statistics import CONFIDENCE
from vmserve_bench.lab.suite import Suite, chosen
from vmserve_bench.lab.table import SectionResult, interval, table_of

__all__ = ["SUITE", "Options", "blocks", "decode", "kernels_command", "prefill", "products"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK_TOKENS = 16
BLOCK_SIZES = (8, 16, 32, 64, 128)
CONTEXTS = (1024, 2048, 4096, 8192)
BATCHES = (1, 4, 32)
#: (tokens computed before, tokens of the prompt's chunk)
CHUNKS = ((0, 512), (0, 2048), (2048, 512))
#: K and V of the largest layer; larger ones take long and show nothing else.
MOST_BYTES = 1 << 30

Variants = dict[str, Callable[[], object]]


class Options(NamedTuple):
    """``quick``: few repeats, to see that everything runs; ``seed``: of all random draws."""

    quick: bool = False
    seed: int = 0

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 10

    @property
    def least_bytes(self) -> int:
        """K and V, or weights, that a timed function reads: several times the largest cache."""
        return 1 << 16 if self.quick else 128 << 20


def decode(options: Options, report: Report) -> SectionResult:
    """One token for every sequence, by context and batch."""
    contexts, batches = ((64,), (1, 2)) if options.quick else (CONTEXTS, BATCHES)
    sizes = [(batch, context, 1) for context, batch in product(contexts, batches)]
    return _attention("decode", options, report, sizes, lambda rig: _views(rig, read=rig.read))


def blocks(options: Options, report: Report) -> SectionResult:
    """Decoding by block size (PagedAttention, figure 18)."""
    sizes = [(1, 256, 1) if options.quick else (8, 4096, 1)]

    def variants(rig: Rig) -> Variants:
        paged = {f"blocks of {size}": rig.attention(size) for size in BLOCK_SIZES}
        return {"contiguous": rig.attention(), **paged}

    return _attention("decode by block size", options, report, sizes, variants)


def prefill(options: Options, report: Report) -> SectionResult:
    """Chunks of one prompt, some with a past; of one layer."""
    chunks = ((0, 64), (64, 32)) if options.quick else CHUNKS
    sizes = [(1, past + new, new) for past, new in chunks]
    return _attention("prefill", options, report, sizes, _views, least_bytes=1)


def _views(rig: Rig, **more: Callable[[], object]) -> Variants:
    ours = {"contiguous": rig.attention(), "paged": rig.attention(BLOCK_TOKENS)}
    return {**ours, "sdpa": rig.attention(backend=SdpaBackend()), **more}


def _attention(
    title: str,
    options: Options,
    report: Report,
    sizes: Sequence[tuple[int, int, int]],
    variants: Callable[[Rig], Variants],
    least_bytes: int | None = None,
) -> SectionResult:
    """Every shape and type in every size: medians a layer, ratios to the contiguous view, and
    every sample."""
    every = list(product(SHAPES, DTYPES, sizes))
    points, rows = [], []
    for index, (shape, dtype, (num_seqs, context, num_new)) in enumerate(every):
        report(index / len(every))
        if num_seqs * context * shape.token_numbers * DTYPES[dtype].itemsize > MOST_BYTES:
            continue
        least = least_bytes or options.least_bytes
        rig = Rig(shape, DTYPES[dtype], (num_seqs, context, num_new), least, options.seed)
        pairs = compare_many(variants(rig), rounds=options.rounds, warmup=1, seed=options.seed)
        samples = {"contiguous": next(iter(pairs.values())).times_ns_a}
        samples |= {name: pair.times_ns_b for name, pair in pairs.items()}
        layer_ns = {name: median(times) / rig.num_layers for name, times in samples.items()}
        ratios = {name: (one.ratio, one.ratio_low, one.ratio_high) for name, one in pairs.items()}
        points.append(
            {
                **shape._asdict(),
                "dtype": dtype,
                "num_seqs": num_seqs,
                "context": context,
                "num_new": num_new,
                "num_layers": rig.num_layers,
                "layer_bytes": rig.layer_bytes,
                "layer_products": rig.layer_products,
                "layer_ns": layer_ns,
                "ratio_to_contiguous": ratios,
                "samples_ns": samples,
            }
        )
        ours = layer_ns["contiguous"]
        rows.append(
            {
                "shape": f"{shape.shape} {dtype}",
                "sequences x past + new": f"{num_seqs} x {context - num_new:,} + {num_new:,}",
                "contiguous, ms": f"{ours / 1e6:.3g}",
                "GB/s": f"{rig.layer_bytes / ours:.1f}",
                "GFLOP/s": f"{rig.layer_products / ours:.0f}",
                **{name: interval(*ratio, 2) for name, ratio in ratios.items()},
            }
        )
    table = table_of(
        f"{title}: one layer, and times of the contiguous view",
        rows,
        note="Medians; times are of neighbouring runs, with their 99 % interval. Above 1: "
        f"contiguous is faster. Blocks have {BLOCK_TOKENS} tokens, where not said otherwise, and "
        "lie at random places. GFLOP/s counts what causality leaves.",
    )
    return SectionResult({"confidence": CONFIDENCE, "points": points}, (table,))


def products(options: Options, report: Report) -> SectionResult:
    """Linear layers by the form of their weights: one row, and a prompt's rows."""
    size, num_rows = (256, 8) if options.quick else (2048, 512)
    prompt = np.random.default_rng(options.seed).standard_normal((num_rows, size), np.float32)
    int8 = partial(Products(FORMS[1], size, 1, options.seed).layers[0].multiply, prompt)
    timed = partial(compare, pairs=options.rounds, warmup=1, seed=options.seed)
    points, rows = [], []
    for index, form in enumerate(FORMS):
        report(index / len(FORMS))
        made = Products(form, size, options.least_bytes, options.seed)
        layer, num_bytes = made.layers[0], made.memory.nbytes
        row, many = timed(made.one_row, made.read), timed(partial(layer.multiply, prompt), int8)
        points.append(
            {
                "form": form.name,
                "row_type": layer.row_type,
                "bits_per_weight": layer.weight_bytes * 8 / size**2,
                "num_bytes": num_bytes,
                "one_row_ns": row.median_a_s * 1e9,
                "read_ns": row.median_b_s * 1e9,
                "ratio_to_one_row": [row.ratio, row.ratio_low, row.ratio_high],
                "prompt_ns": many.median_a_s * 1e9,
                "ratio_of_int8_to_prompt": [many.ratio, many.ratio_low, many.ratio_high],
                "prompt_products": 2 * num_rows * size**2,
                "samples_ns": {
                    "one row": row.times_ns_a,
                    "read": row.times_ns_b,
                    "prompt": many.times_ns_a,
                    "int8 prompt": many.times_ns_b,
                },
            }
        )
        rate = 2 * num_rows * size**2 / many.median_a_s / 1e9
        rows.append(
            {
                "weights": form.name,
                "rows of": layer.row_type,
                "bits": f"{layer.weight_bytes * 8 / size**2:.2f}",
                "one row, GB/s": f"{num_bytes / row.median_a_s / 1e9:.1f}",
                "of read": interval(row.ratio, row.ratio_low, row.ratio_high, 2),
                f"{num_rows} rows, GFLOP/s": f"{rate:.0f}",
                "times int8": interval(many.ratio, many.ratio_low, many.ratio_high, 2),
            }
        )
    note = "of read: the rate of a loop that only reads as many bytes. Intervals are of 99 %."
    table = table_of(f"products: layers of {size:,} x {size:,}", rows, note=note)
    data = {"size": size, "num_rows": num_rows, "confidence": CONFIDENCE, "points": points}
    return SectionResult(data, (table,))


SUITE = Suite[Options](
    name="kernels",
    sections={"decode": decode, "blocks": blocks, "prefill": prefill, "products": products},
    packages=("vmserve", "numpy", "torch"),
)


def kernels_command(
    section: Annotated[
        str | None,
        typer.Option(
            help=f"Some of {','.join(SUITE.sections)}, with commas between. Default: all."
        ),
    ] = None,
    quick: opt.Quick = False,
    seed: Annotated[int, typer.Option(min=0, help="Draws places and orders.")] = 0,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
) -> None:
    """Measure the attention kernels against memory bandwidth and the stock kernel. No model."""
    before = os.getloadavg()[0]
    SUITE.measure(
        chosen("section", section, list(SUITE.sections)),
        Options(quick, seed),
        lambda: {
            "quick": quick,
            "seed": seed,
            "isa": CpuBackend().isa,
            "num_threads": torch.get_num_threads(),
            # The load shows how quiet the machine was: 0 before is quiet.
            "load_average_before": round(before, 2),
            "load_average_after": round(os.getloadavg()[0], 2),
        },
        json_path=json_path,
        markdown_path=markdown_path,
    )
