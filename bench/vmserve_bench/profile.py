"""``vmserve bench profile``: what work costs here for a model, as a file.

The file is what ``--regime-profile`` takes, and what a simulation of this machine is made of. With
the native decoder, also how near a decoded token comes to the memory's rate.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from vmserve import _core
from vmserve.attention.cpu import ISA_VARIABLE
from vmserve.cli.options import with_engine_options
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError
from vmserve.models.native import NativeDecoder
from vmserve.runner.model_runner import ModelRunner
from vmserve.sampling import SamplingParams
from vmserve.system.threads import num_threads
from vmserve_bench.lab.report import check_writable, make_console, progress, write_text
from vmserve_bench.lab.table import Table, print_table, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from vmserve.scheduler.profile import DeviceProfile

__all__ = ["DecodedTokens", "decoded_tokens", "measured_profile", "profile_command"]

_PROMPT_TOKENS = 256
_DECODE_STEPS = 32
_TRIES = 5


@with_engine_options
def profile_command(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the profile to this file.", callback=check_writable
        ),
    ] = None,
    **engine_options: Any,
) -> None:
    """Measure what --kv-regime auto goes by: kernels of both regimes, map calls, copies, layers.
    On a CPU also how fast one stream decodes, against a loop that only reads the weights.

    Example: vmserve bench profile --model PATH -o profile.json, then
    vmserve serve --model PATH --regime-profile profile.json
    """
    options = {**engine_options, "kv_regime": "auto", "enable_prefix_caching": False}
    engine = LLMEngine(EngineConfig.from_options(options))
    try:
        with progress("profile") as report:
            profile = measured_profile(engine, report)
        tokens = decoded_tokens(engine)
    finally:
        engine.close()
    console = make_console()
    print_table(console, _table(profile))
    if tokens is not None:
        print_table(console, _decode_table(tokens))
    if output is not None:
        write_text(output, profile.to_json() + "\n")


def measured_profile(
    engine: LLMEngine, report: Callable[[float], None] = lambda done: None
) -> DeviceProfile:
    """Add the costs of the model's layers to the profile that the engine measured at start.

    The engine must be idle, choose regimes itself and cache no prefixes.
    """
    profile = engine.profile
    if profile is None:
        raise ConfigurationError("a profile is measured where the regime is chosen: use auto")
    num_prompt = min(_PROMPT_TOKENS, engine.resolved.max_model_len - _DECODE_STEPS - 1)
    num_prompt = min(num_prompt, engine.resolved.max_num_batched_tokens)
    if num_prompt < 2:
        raise ConfigurationError(
            f"max_model_len: {engine.resolved.max_model_len} leaves no room for {_DECODE_STEPS} "
            "steps behind a prompt: raise it"
        )
    prompts, decodes = [], []
    for attempt in range(_TRIES):
        report(attempt / _TRIES)
        prompt, *steps = _timed_steps(engine, num_prompt)
        prompts.append(prompt)
        decodes += steps
    return dataclasses.replace(
        profile,
        name=f"measured with {engine.model_config.architecture}",
        step=min(around for _, _, around in decodes),
        weights=min(layers for layers, _, _ in decodes),
        token=min(layers for layers, _, _ in prompts) / num_prompt,
    )


class DecodedTokens(NamedTuple):
    """Tokens of one stream; seconds of each, and of the loop that ran before it."""

    num_bytes: int  # packed weights
    read: NDArray[np.float64]  # a loop that reads as many bytes with as many threads
    layers: NDArray[np.float64]
    attention: NDArray[np.float64]
    around: NDArray[np.float64]  # the step outside the model


def decoded_tokens(engine: LLMEngine) -> DecodedTokens | None:
    """Decode one stream in turns with a loop that reads the weights' bytes; None if the model
    does not run in the native decoder. The engine must be idle."""
    runner = engine.runner
    network = runner.model.network if isinstance(runner, ModelRunner) else None
    if not isinstance(network, NativeDecoder):
        return None
    memory = np.ones(network.row_bytes, np.uint8)
    reader = _core.CpuAttention(num_threads(), os.environ.get(ISA_VARIABLE, ""))

    def read() -> float:
        began = time.perf_counter()
        reader.fold(memory.ctypes.data, memory.nbytes)
        return time.perf_counter() - began

    read()
    found = []
    for _ in range(_TRIES):
        steps = _timed_steps(engine, num_prompt=2)
        next(steps)  # the prompt
        while engine.has_unfinished:
            found.append((read(), *next(steps)))
    return DecodedTokens(memory.nbytes, *np.array(found).T)


def _timed_steps(engine: LLMEngine, num_prompt: int) -> Iterator[tuple[float, float, float]]:
    """A request: each step's seconds in layers, in attention, and outside the model."""

    def spent() -> NDArray[np.float64]:
        phases = engine.counters.phase_seconds
        attention = sum(engine.counters.attention_seconds.values())
        return np.array([phases["model"], attention, sum(phases.values())])

    prompt = [index % engine.model_config.vocab_size for index in range(num_prompt)]
    params = SamplingParams(
        temperature=0, max_tokens=_DECODE_STEPS, ignore_eos=True, detokenize=False
    )
    engine.add_request("profile", prompt, params)
    while engine.has_unfinished:
        before = spent()
        for failure in engine.step().failures:
            raise failure.error
        model, attention, whole = (spent() - before).tolist()
        yield model - attention, attention, whole - model


def _table(profile: DeviceProfile) -> Table:
    def row(text: str, first: float, paged: float | None = None) -> dict[str, str]:
        other = "" if paged is None else f"{paged * 1e6:,.4g}"
        return {"": text, "virtual, or either": f"{first * 1e6:,.4g}", "paged": other}

    attention = {
        "call": "a step that has any",
        "sequence": "each sequence",
        "read": "each token read in decode",
        "pair": "each pair of query and key in prefill",
    }
    rows = [
        row(f"attention: {text}", getattr(profile.virtual, name), getattr(profile.paged, name))
        for name, text in attention.items()
    ]
    rows += [
        row("mapping a page that the step waits for", profile.map_page),
        row("mapping a page behind a step", profile.map_page_hidden),
        row("a step outside the model", profile.step),
        row("reading the weights once", profile.weights),
        row("each token outside attention", profile.token),
    ]
    copies = f"Copies {profile.copy_bytes_per_second / 1e9:.1f} GB/s."
    return table_of(f"{profile.name}: microseconds, all layers", rows, note=copies)


def _decode_table(tokens: DecodedTokens) -> Table:
    num_bytes, read, layers, attention, around = tokens

    def row(text: str, seconds: NDArray[np.float64], *, rate: bool = True) -> dict[str, str]:
        least, median = float(seconds.min()), float(np.median(seconds))
        return {
            "": text,
            "least, ms": f"{1e3 * least:.3g}",
            "median, ms": f"{1e3 * median:.3g}",
            "most, GB/s": f"{num_bytes / least / 1e9:.1f}" if rate else "",
            "median, GB/s": f"{num_bytes / median / 1e9:.1f}" if rate else "",
            "% of read": f"{100 * np.median(read / seconds):.0f}" if rate else "",
        }

    return table_of(
        f"decoding one stream: {num_bytes / 1e6:,.1f} MB of packed weights a token, "
        f"{num_threads()} threads",
        [
            row("a loop that reads as many bytes", read),
            row("a token", layers + attention + around),
            row("its layers", layers),
            row("its attention", attention, rate=False),
            row("around the model", around, rate=False),
        ],
        note=f"{len(read)} tokens in turns with the loop; % of read: median of the pairs.",
    )
