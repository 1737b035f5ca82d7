"""The measurements: decoding by context and batch, decoding by block size, prompts, products of
linear layers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vmserve_bench.kernels.products import BASE, FORMS, Products
from vmserve_bench.kernels.rig import DTYPES, SHAPES, Rig
from vmserve_bench.lab.rounds import compare_many
from vmserve_bench.lab.suite import Suite
from vmserve_bench.lab.table import SectionResult, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vmserve_bench.lab.report import Report
    from vmserve_bench.lab.rounds import ManyResult, PairedResult

__all__ = ["SUITE", "Options", "blocks", "decode", "prefill", "products"]

BLOCK_TOKENS = 16
BLOCK_SIZES = (8, 16, 32, 64, 128)
CONTEXTS = (1024, 2048, 4096, 8192)
BATCHES = (1, 4, 32)
#: (tokens computed before, tokens of the prompt's chunk)
CHUNKS = ((0, 512), (0, 2048), (2048, 512))


@dataclass(frozen=True, slots=True)
class Options:
    """``quick``: few repeats, to see that everything runs; ``seed``: of all random draws."""

    quick: bool = False
    seed: int = 0

    @property
    def rounds(self) -> int:
        return 2 if self.quick else 10

    @property
    def least_bytes(self) -> int:
        """K and V that a timed function reads: several times the largest cache."""
        return 1 << 16 if self.quick else 128 << 20

    @property
    def most_bytes(self) -> int:
        """Largest point; larger ones take long and show nothing else."""
        return 1 << 30


def decode(options: Options, report: Report) -> SectionResult:
    """One token for every sequence, by context and batch."""
    contexts, batches = ((64,), (1, 2)) if options.quick else (CONTEXTS, BATCHES)
    points = list(itertools.product(SHAPES, DTYPES, contexts, batches))
    rows: list[dict[str, Any]] = []
    for index, (shape, dtype, context, batch) in enumerate(points):
        report(index / len(points))
        if context * batch * shape.token_bytes(DTYPES[dtype]) > options.most_bytes:
            continue
        rig = Rig(shape, DTYPES[dtype], batch, context, 1, options.least_bytes, options.seed)
        variants = {
            "contiguous": rig.contiguous(),
            "paged": rig.paged(BLOCK_TOKENS),
            "sdpa": rig.sdpa(),
            "read": rig.read(),
        }
        compared = _compare(variants, options)
        rows.append(_described(rig, dtype, compared))
    return SectionResult(
        {"block_tokens": BLOCK_TOKENS, "points": rows}, tuple(_decode_tables(rows))
    )


def blocks(options: Options, report: Report) -> SectionResult:
    """Decoding by block size (PagedAttention, figure 18)."""
    context, batch = (256, 1) if options.quick else (4096, 8)
    rows: list[dict[str, Any]] = []
    points = list(itertools.product(SHAPES, DTYPES))
    for index, (shape, dtype) in enumerate(points):
        report(index / len(points))
        rig = Rig(shape, DTYPES[dtype], batch, context, 1, options.least_bytes, options.seed)
        variants = {"contiguous": rig.contiguous()}
        variants |= {f"blocks of {size}": rig.paged(size) for size in BLOCK_SIZES}
        rows.append(_described(rig, dtype, _compare(variants, options)))
    table = Table(
        f"decode of {batch} sequences of {context:,} tokens: time over contiguous, 99 % interval",
        ("shape", "contiguous, ms a layer", *(f"{size}" for size in BLOCK_SIZES)),
        tuple(
            (
                f"{row['shape']} {row['dtype']}",
                _milliseconds(row, "contiguous"),
                *(_ratio(row, f"blocks of {size}") for size in BLOCK_SIZES),
            )
            for row in rows
        ),
        "Every block lies at a random place; contiguous reads the same bytes in order.",
    )
    return SectionResult({"block_sizes": list(BLOCK_SIZES), "points": rows}, (table,))


def prefill(options: Options, report: Report) -> SectionResult:
    """Chunks of one prompt, some with a past."""
    chunks = ((0, 64), (64, 32)) if options.quick else CHUNKS
    points = list(itertools.product(SHAPES, DTYPES, chunks))
    rows: list[dict[str, Any]] = []
    for index, (shape, dtype, (past, new)) in enumerate(points):
        report(index / len(points))
        rig = Rig(shape, DTYPES[dtype], 1, past + new, new, 1, options.seed)
        variants = {
            "contiguous": rig.contiguous(),
            "paged": rig.paged(BLOCK_TOKENS),
            "sdpa": rig.sdpa(),
        }
        compared = _compare(variants, options)
        rows.append(_described(rig, dtype, compared))
    table = Table(
        "prefill: one layer, one sequence",
        (
            "shape",
            "past + new",
            "contiguous, ms",
            "GFLOP/s",
            "paged / contiguous",
            "sdpa, ms",
            "sdpa / contiguous",
        ),
        tuple(
            (
                f"{row['shape']} {row['dtype']}",
                f"{row['context'] - row['num_new']:,} + {row['num_new']:,}",
                _milliseconds(row, "contiguous"),
                f"{row['layer_products'] / row['layer_ns']['contiguous']:.0f}",
                _ratio(row, "paged"),
                _milliseconds(row, "sdpa"),
                _ratio(row, "sdpa"),
            )
            for row in rows
        ),
        "GFLOP/s counts what causality leaves. Ratios above 1: contiguous is faster.",
    )
    return SectionResult({"block_tokens": BLOCK_TOKENS, "points": rows}, (table,))


def products(options: Options, report: Report) -> SectionResult:
    """Linear layers by the form of their weights: one row, and a prompt's rows."""
    size, num_rows = (256, 8) if options.quick else (2048, 512)
    rows: list[dict[str, Any]] = []
    int8 = Products.pack(BASE, size, 1, options.seed).prompt(num_rows, options.seed)
    for index, form in enumerate(FORMS):
        report(index / len(FORMS))
        made = Products.pack(form, size, options.least_bytes, options.seed)
        decoding = _compare({"one row": made.one_row(), "read": made.read()}, options)
        prompt = _compare({"rows": made.prompt(num_rows, options.seed), "int8": int8}, options)
        against, beside = decoding.against["read"], prompt.against["int8"]
        rows.append(
            {
                "form": form.name,
                "row_type": made.layers[0].row_type,
                "bits_per_weight": made.layers[0].weight_bytes * 8 / size**2,
                "num_bytes": made.num_bytes,
                "one_row_ns": against.median_a_s * 1e9,
                "read_ns": against.median_b_s * 1e9,
                "ratio_to_one_row": [against.ratio, against.ratio_low, against.ratio_high],
                "prompt_ns": beside.median_a_s * 1e9,
                "ratio_of_int8_to_prompt": [beside.ratio, beside.ratio_low, beside.ratio_high],
                "prompt_products": 2 * num_rows * size**2,
                "samples_ns": {
                    "one row": list(against.times_ns_a),
                    "read": list(against.times_ns_b),
                    "prompt": list(beside.times_ns_a),
                    "int8 prompt": list(beside.times_ns_b),
                },
            }
        )
    table = Table(
        f"products: layers of {size:,} x {size:,}",
        (
            "weights",
            "rows of",
            "bits",
            "one row, GB/s",
            "% of read",
            f"{num_rows} rows, GFLOP/s",
            "times int8",
        ),
        tuple(
            (
                row["form"],
                row["row_type"],
                f"{row['bits_per_weight']:.2f}",
                f"{row['num_bytes'] / row['one_row_ns']:.1f}",
                _interval([100 * x for x in row["ratio_to_one_row"]], 0),
                f"{row['prompt_products'] / row['prompt_ns']:.0f}",
                _interval(row["ratio_of_int8_to_prompt"], 2),
            )
            for row in rows
        ),
        "% of read: against a loop that only reads as many bytes. Intervals are of 99 %.",
    )
    return SectionResult({"size": size, "num_rows": num_rows, "points": rows}, (table,))


SUITE = Suite[Options](
    name="kernels",
    sections={"decode": decode, "blocks": blocks, "prefill": prefill, "products": products},
    packages=("vmserve", "numpy", "torch"),
    plots="vmserve_bench.kernels.plots",
)


def _compare(variants: dict[str, Callable[[], object]], options: Options) -> ManyResult:
    return compare_many(variants, rounds=options.rounds, warmup=1, seed=options.seed)


def _described(rig: Rig, dtype: str, compared: ManyResult) -> dict[str, Any]:
    """One point: what was measured, medians a layer, and every sample."""
    pairs: Mapping[str, PairedResult] = compared.against
    first = next(iter(pairs.values()))
    medians = {compared.baseline: first.median_a_s}
    medians |= {name: pair.median_b_s for name, pair in pairs.items()}
    return {
        "shape": rig.shape.name,
        "q_heads": rig.shape.q_heads,
        "kv_heads": rig.shape.kv_heads,
        "head_dim": rig.shape.head_dim,
        "dtype": dtype,
        "num_seqs": rig.num_seqs,
        "context": rig.context,
        "num_new": rig.num_new,
        "num_layers": rig.num_layers,
        "layer_bytes": rig.layer_bytes,
        "layer_products": rig.layer_products,
        "layer_ns": {name: seconds * 1e9 / rig.num_layers for name, seconds in medians.items()},
        "ratio_to_contiguous": {
            name: [pair.ratio, pair.ratio_low, pair.ratio_high] for name, pair in pairs.items()
        },
        "samples_ns": {compared.baseline: list(first.times_ns_a)}
        | {name: list(pair.times_ns_b) for name, pair in pairs.items()},
    }


def _decode_tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    columns = (
        "context x batch",
        "MiB",
        "read, GB/s",
        "contiguous, ms",
        "GB/s",
        "% of read",
        "paged, ms",
        "paged / contiguous",
        "sdpa, ms",
        "sdpa / contiguous",
    )
    for name in dict.fromkeys((row["shape"], row["dtype"]) for row in rows):
        chosen = [row for row in rows if (row["shape"], row["dtype"]) == name]
        heads = f"{chosen[0]['q_heads']} x {chosen[0]['kv_heads']} heads of {chosen[0]['head_dim']}"
        yield Table(
            f"decode, {name[0]} ({heads}), {name[1]}: one layer",
            columns,
            tuple(
                (
                    f"{row['context']:,} x {row['num_seqs']}",
                    f"{row['layer_bytes'] / 2**20:.0f}",
                    f"{_rate(row, 'read'):.1f}",
                    _milliseconds(row, "contiguous"),
                    f"{_rate(row, 'contiguous'):.1f}",
                    _share(row, "read"),
                    _milliseconds(row, "paged"),
                    _ratio(row, "paged"),
                    _milliseconds(row, "sdpa"),
                    _ratio(row, "sdpa"),
                )
                for row in chosen
            ),
            "Medians; ratios are those of neighbouring runs, with their 99 % interval. Above 1: "
            "contiguous is faster.",
        )


def _milliseconds(row: dict[str, Any], name: str) -> str:
    return f"{row['layer_ns'][name] / 1e6:.3g}"


def _rate(row: dict[str, Any], name: str) -> float:
    """10^9 bytes of K and V a second."""
    return float(row["layer_bytes"] / row["layer_ns"][name])


def _interval(values: Sequence[float], digits: int) -> str:
    ratio, low, high = (f"{x:.{digits}f}" for x in values)
    return f"{ratio} [{low}, {high}]"


def _ratio(row: dict[str, Any], name: str) -> str:
    ratio, low, high = row["ratio_to_contiguous"][name]
    return f"{ratio:.2f} [{low:.2f}, {high:.2f}]"


def _share(row: dict[str, Any], name: str) -> str:
    ratio, low, high = (100 * x for x in row["ratio_to_contiguous"][name])
    return f"{ratio:.0f} [{low:.0f}, {high:.0f}]"
