"""``vmserve bench quality``: what do quantization and number types cost in answers?"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import numpy as np
import typer

from vmserve.attention.cpu import CpuBackend
from vmserve.cli.options import with_engine_options
from vmserve.config import Quantization
from vmserve_bench import options as opt
from vmserve_bench.ab.variants import Variant, parse_variants
from vmserve_bench.lab.statistics import CONFIDENCE, paired_effects
from vmserve_bench.lab.suite import Suite
from vmserve_bench.lab.table import SectionResult, Table, table_of
from vmserve_bench.quality.scoring import Subject, without_paths
from vmserve_bench.quality.text import Text, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vmserve_bench.lab.report import Report
    from vmserve_bench.quality.scoring import Scores

__all__ = ["HELP", "KNOWN", "SUITE", "Options", "quality_command", "run"]

#: Variants that need no options on the command line: values of --quantization, --dtype and
#: --kv-cache-dtype.
KNOWN: Mapping[str, Variant] = {
    **{name: Variant(name, {"quantization": name}) for name in get_args(Quantization)},
    **{name: Variant(name, {"dtype": name}) for name in ("float32", "bfloat16")},
    "kv-int8": Variant("kv-int8", {"kv_cache_dtype": "int8"}),
}
_DEFAULT = "none,int8,int8-dynamic"
#: Share of the progress that loading takes.
_LOADING = 0.1
#: Bound of the mean loss, which broken weights may exceed: the perplexity stays a number of JSON.
_MOST_NATS = 700.0

HELP = f"""Measure what quantization costs: perplexity, and agreement with the first variant.

Every variant reads the same text in windows and scores the same tokens, from the logits that it
serves. Differences are taken window by window, with {CONFIDENCE * 100:g} % intervals. All variants
are in memory together. Options of the engine hold for all of them.

\b
Variants: {", ".join(KNOWN)}, or name=option=value,option=value.

\b
Examples:
  vmserve bench quality --model PATH
  vmserve bench quality --model PATH --variants float32,none,int8 --text mine.txt --markdown t.md
  vmserve bench quality --model PATH --variants none --variants q4=model=OTHER
"""


class Options(NamedTuple):
    """``engine``: options of all variants."""

    variants: Sequence[Variant]
    engine: Mapping[str, Any]
    text: Text
    window: int
    stride: int


@with_engine_options
def quality_command(
    variants: Annotated[
        list[str] | None,
        typer.Option(
            help="Some of the above, with commas between; or name=option=value,option=value with "
            "any engine option, as model. Repeatable; the first is what others are compared "
            f"with. Default: {_DEFAULT}.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A file of UTF-8 text. Default: a short one of the package.")
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens from one window to the next; that many are scored of each, the last ones. "
            "Default: half a window.",
        ),
    ] = None,
    json_path: opt.JsonPath = None,
    markdown_path: opt.MarkdownPath = None,
    **engine_options: Any,
) -> None:
    options = Options(
        parse_variants(variants or [_DEFAULT], KNOWN, least=1),
        engine_options,
        read_text(text),
        window,
        stride or window // 2,
    )
    SUITE.measure(
        ["quality"],
        options,
        lambda: {
            "options": without_paths(engine_options),
            "isa": CpuBackend().isa,
            "load_average": [round(one, 2) for one in os.getloadavg()],
        },
        json_path=json_path,
        markdown_path=markdown_path,
    )


def run(options: Options, report: Report) -> SectionResult:
    """Load all variants, then give each window to all of them in turn."""
    subjects: list[Subject] = []
    with ExitStack() as opened:
        for variant in options.variants:
            report(_LOADING * len(subjects) / len(options.variants))
            subject = Subject(variant, options.engine)
            opened.callback(subject.engine.close)
            subjects.append(subject)
            if len(subjects) == 1:
                windows = subject.windows(options.text, size=options.window, stride=options.stride)
            else:
                subject.check_like(subjects[0], options.text)
        # Of each variant and window: means over the scored tokens.
        found = np.zeros((len(subjects), len(windows.prompts), 3))
        for index, prompt in enumerate(windows.prompts):
            reference: Scores | None = None
            for place, subject in enumerate(subjects):
                keep = reference is None and len(subjects) > 1
                scores = subject.score(prompt, windows.num_scored, reference, keep=keep)
                reference = reference or scores
                same = np.equal(scores.likeliest, reference.likeliest)
                divergence = scores.divergence or [0.0]  # the reference's, from itself
                found[place, index] = [np.mean(scores.nats), same.mean(), np.mean(divergence)]
            report(_LOADING + (1 - _LOADING) * (index + 1) / len(windows.prompts))
        rows = [_row(each, found[place], found[0]) for place, each in enumerate(subjects)]
    data = {
        "text": options.text.described(),
        "window": options.window,
        "stride": options.stride,
        "num_windows": len(windows.prompts),
        "num_scored": len(windows.prompts) * windows.num_scored,
        "leading_tokens": windows.leading,
        "confidence": CONFIDENCE,
        "rows": rows,
    }
    return SectionResult(data, (_table(data),))


SUITE = Suite[Options]("quality", {"quality": run}, ("vmserve", "numpy", "tokenizers"))


def _row(
    subject: Subject, found: NDArray[np.float64], first: NDArray[np.float64]
) -> dict[str, Any]:
    nats, same, divergence = found.T
    perplexity = math.exp(min(float(nats.mean()), _MOST_NATS))
    above = nats - first[:, 0]
    [effect] = paired_effects(above[None])  # of a ratio of perplexities
    low, high = (
        math.log(end) if end is not None and 0 < end < math.inf else None
        for end in (effect.low, effect.high)
    )
    return {
        **subject.described(),
        "perplexity": perplexity,
        "perplexity_error": perplexity * _error(nats),
        "nats_above_first": {"mean": float(above.mean()), "low": low, "high": high},
        "same_argmax": float(same.mean()),
        "same_argmax_error": _error(same),
        "divergence": float(divergence.mean()),
        "seconds": subject.seconds,
        "window_nats": nats.tolist(),
        "window_same_argmax": same.tolist(),
        "window_divergence": divergence.tolist(),
    }


def _error(windows: NDArray[np.float64]) -> float:
    """Standard error of the mean over windows; NaN is no JSON, so 0 for a single one."""
    return float(windows.std(ddof=1) / math.sqrt(len(windows))) if len(windows) > 1 else 0.0


def _table(data: Mapping[str, Any]) -> Table:
    rows, leading = data["rows"], data["leading_tokens"]
    begin = f"each begins with {leading}" if leading else "without BOS"
    return table_of(
        f"quality of {rows[0]['model']} on {data['text']['name']}",
        [_cells(row, rows[0]) for row in rows],
        note=f"{data['num_scored']:,} tokens are scored: the last {data['stride']} of each of "
        f"{data['num_windows']} windows of {data['window']} ({begin}). After ±: the interval of "
        f"{CONFIDENCE * 100:g} %, by pairs of windows; the first perplexity itself has a standard "
        f"error of {rows[0]['perplexity_error']:.2f}. MB: of weights in memory. Bits: of a weight "
        "in products, so without an embedding that is looked up, even where it is tied.",
    )


def _cells(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, str]:
    above = row["nats_above_first"]
    difference = f"{above['mean']:.4f}"
    if above["low"] is not None:
        difference += f" ± {above['mean'] - above['low']:.4f}"
    return {
        "variant": row["name"],
        "MB": f"{row['weight_bytes'] / 1e6:,.0f}",
        "bits": f"{row['bits_per_weight']:.2f}",
        "perplexity": f"{row['perplexity']:.2f}",
        f"nats above {first['name']}": "" if row is first else difference,
        "same argmax, %": "" if row is first else f"{100 * row['same_argmax']:.1f}",
        # Rounding may leave less than nothing if a variant differs by its order of sums alone.
        "KL, nats": "" if row is first else f"{max(0.0, row['divergence']):.5f}",
        "time, s": f"{row['seconds']:.1f}",
    }
