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
from vmserve_bench.lab.table import Table, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vmserve.scheduler.profile import DeviceProfile

__all__ = ["DecodedToken", "decoded_tokens", "measured_profile", "profile_command"]

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
    if tokens:
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
    tries = []
    for attempt in range(_TRIES):
        report(attempt / _TRIES)
        tries.append(_time_steps(engine, num_prompt))
    decode = min(layers for steps in tries for layers, _ in steps[1:])
    prefill = min(steps[0][0] for steps in tries)
    around = min(rest for steps in tries for _, rest in steps[1:])
    return dataclasses.replace(
        profile,
        name=f"measured with {engine.model_config.architecture}",
        step=around,
        weights=decode,
        token=prefill / num_prompt,
    )


class DecodedToken(NamedTuple):
    """A token of one stream, and the loop that ran before it; seconds."""

    num_bytes: int  # packed weights
    read: float  # of a loop that reads as many bytes with as many threads
    attention: float
    layers: float  # the rest of the model
    around: float  # the step outside the model

    @property
    def whole(self) -> float:
        return self.attention + self.layers + self.around


def decoded_tokens(engine: LLMEngine) -> list[DecodedToken]:
    """Decode one stream in turns with a loop that reads the weights' bytes; nothing if the model
    does not run in the native decoder. The engine must be idle."""
    runner = engine.runner
    network = runner.model.network if isinstance(runner, ModelRunner) else None
    if not isinstance(network, NativeDecoder):
        return []
    memory = np.ones(network.row_bytes, np.uint8)
    reader = _core.CpuAttention(num_threads(), os.environ.get(ISA_VARIABLE, ""))

    def read() -> float:
        began = time.perf_counter()
        reader.fold(memory.ctypes.data, memory.nbytes)
        return time.perf_counter() - began

    read()
    tokens = []
    for _ in range(_TRIES):
        _add_request(engine, num_prompt=2)
        steps = iter(_timed_steps(engine))
        next(steps)  # the prompt
        while engine.has_unfinished:
            seconds = read()
            layers, attention, around = next(steps)
            tokens.append(DecodedToken(memory.nbytes, seconds, attention, layers, around))
    return tokens


def _time_steps(engine: LLMEngine, num_prompt: int) -> list[tuple[float, float]]:
    """Run a request; return each step's seconds in layers, and outside the model."""
    _add_request(engine, num_prompt)
    return [(layers, around) for layers, _, around in _timed_steps(engine)]


def _add_request(engine: LLMEngine, num_prompt: int) -> None:
    engine.add_request(
        "profile",
        [index % engine.model_config.vocab_size for index in range(num_prompt)],
        SamplingParams(temperature=0, max_tokens=_DECODE_STEPS, ignore_eos=True, detokenize=False),
    )


def _timed_steps(engine: LLMEngine) -> Iterator[tuple[float, float, float]]:
    """Each step's seconds in layers, in attention, and outside the model."""
    while engine.has_unfinished:
        before = _spent(engine)
        failures = engine.step().failures
        if failures:
            raise failures[0].error
        after = _spent(engine)
        model, attention, whole = (b - a for a, b in zip(before, after, strict=True))
        yield model - attention, attention, whole - model


def _spent(engine: LLMEngine) -> tuple[float, float, float]:
    phases = engine.counters.phase_seconds
    attention = sum(engine.counters.attention_seconds.values())
    return phases["model"], attention, sum(phases.values())


def _table(profile: DeviceProfile) -> Table:
    def microseconds(seconds: float) -> str:
        return f"{seconds * 1e6:,.4g}"

    rows: list[Sequence[str]] = [
        (f"attention: {text}", *(microseconds(getattr(kernels, name)) for kernels in both))
        for both in [(profile.virtual, profile.paged)]
        for name, text in (
            ("call", "a step that has any"),
            ("sequence", "each sequence"),
            ("read", "each token read in decode"),
            ("pair", "each pair of query and key in prefill"),
        )
    ]
    rows += [
        ("mapping a page that the step waits for", microseconds(profile.map_page), ""),
        ("mapping a page behind a step", microseconds(profile.map_page_hidden), ""),
        ("a step outside the model", microseconds(profile.step), ""),
        ("reading the weights once", microseconds(profile.weights), ""),
        ("each token outside attention", microseconds(profile.token), ""),
    ]
    return Table(
        f"{profile.name}: microseconds, all layers",
        ("", "virtual, or either", "paged"),
        tuple(tuple(row) for row in rows),
        f"Copies {profile.copy_bytes_per_second / 1e9:.1f} GB/s.",
    )


def _decode_table(tokens: list[DecodedToken]) -> Table:
    def row(text: str, seconds: list[float], rate: bool = True) -> tuple[str, ...]:
        reads = [token.read for token in tokens]
        least, median = min(seconds), float(np.median(seconds))
        cells = [f"{1e3 * least:.3g}", f"{1e3 * median:.3g}"]
        if not rate:
            return (text, *cells, "", "", "")
        shares = [read / own for read, own in zip(reads, seconds, strict=True)]
        num_bytes = tokens[0].num_bytes
        cells += [f"{num_bytes / least / 1e9:.1f}", f"{num_bytes / median / 1e9:.1f}"]
        return (text, *cells, f"{100 * np.median(shares):.0f}")

    return Table(
        f"decoding one stream: {tokens[0].num_bytes / 1e6:,.1f} MB of packed weights a token, "
        f"{num_threads()} threads",
        ("", "least, ms", "median", "most, GB/s", "median", "% of read"),
        (
            row("a loop that reads as many bytes", [token.read for token in tokens]),
            row("a token", [token.whole for token in tokens]),
            row("its layers", [token.layers for token in tokens]),
            row("its attention", [token.attention for token in tokens], rate=False),
            row("around the model", [token.around for token in tokens], rate=False),
        ),
        f"{len(tokens)} tokens in turns with the loop; % of read: median of the pairs.",
    )
