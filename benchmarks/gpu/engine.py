"""The engine on a GPU: decoding, prompts, whole workloads, memory, mapping, layouts.

    python benchmarks/gpu/engine.py --out DIR              # Llama-3-8B's shapes, 420 s at most
    python benchmarks/gpu/engine.py --out DIR --shape llama-3.2-1b --parts decode,mapping
    python benchmarks/gpu/engine.py --out DIR --dry-run    # tiny shapes on the CPU: its own logic

Weights are random and made on the device: nothing is downloaded, and what is generated means
nothing. ``results.json`` and ``engine.md`` are renewed after each row. A part that fails leaves its
rows; where the device is lost the exit status is 3, and ``--resume`` does the other parts.

Each row names the attention backend that served it, and whether its steps came from graphs: as
counted, not as asked for.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vmserve import SamplingParams  # first: it sets how torch's threads wait

import torch  # isort: skip
import vmserve.runner.computing  # isort: skip
import vmserve.runner.graphs  # isort: skip
from vmserve.config import EngineConfig
from vmserve.engine.build import IDLE_BYTES
from vmserve.engine.engine import LLMEngine
from vmserve.engine.parts import LOOKAHEAD_TOKENS
from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager
from vmserve.models import LoadedModel, ModelConfig, resolve_model
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.plan import tensor_shapes
from vmserve.models.tensor_loader import assemble_on
from vmserve.numbers.dtypes import DType
from vmserve.numbers.torch_dtypes import as_torch
from vmserve.runner.torch_runtime import TorchCpuRuntime
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import replace_text
from vmserve_bench.lab.statistics import percentile
from vmserve_bench.lab.table import Table

Row = dict[str, Any]
MIB = 1 << 20
REGIMES = ("virtual", "paged")
#: What replaying a step is called, by the method of the engine's graphs.
KINDS = {"whole": "captured", "in_pieces": "captured in pieces"}

COMMON: Row = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip
#: :data:`SIZES` of each shape.
SHAPES = {
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128, 128256, 32768),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, 32768),
    "tiny": (64, 96, 4, 4, 2, 16, 2048, 512),
}

#: How much is measured. Lengths are tokens; ``layouts``: layers of a group, and MiB of a page.
FULL = SimpleNamespace(
    batches=(1, 8, 32, 128),
    context=1024,
    steps=64,
    prompts=(512, 2048, 8192),
    requests=128,
    longest=1024,
    layouts=((2, 2), (32, 32), (8, 8), (32, 8), (4, 4), (1, 2)),
    max_len=16384,
    long_slots=32768,
    long_contexts=(1024, 30720),  # far shorter than the slots, and nearly as long
)
TINY = SimpleNamespace(
    batches=(1, 3),
    context=24,
    steps=6,
    prompts=(16, 64),
    requests=5,
    longest=24,
    layouts=((1, 1 / 32), (2, 1 / 32)),
    max_len=256,
    long_slots=512,
    long_contexts=(24, 400),
)


class Bench:
    """What every part needs: the model's files, the options, and the time that is left."""

    def __init__(
        self, directory: Path, device: str, dtype: str, plan: Any, seconds: float, **common: Any
    ) -> None:
        self.directory, self.device, self.dtype, self.plan = directory, device, dtype, plan
        #: Options of every engine.
        self.common = common
        #: Steps that came from a graph, by kind.
        self.replays: Counter[str] = Counter()
        self._deadline = time.monotonic() + seconds

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    @contextmanager
    def engine(self, widths: Sequence[int] = (), **options: Any) -> Iterator[LLMEngine]:
        """An engine. ``widths``: of the only batches that are captured ahead."""
        defaults = {"enable_prefix_caching": False, "max_model_len": self.plan.max_len}
        config = EngineConfig(
            model=str(self.directory),
            device=self.device,
            dtype=self.dtype,
            **(defaults | self.common | options),
        )
        all_widths = vmserve.runner.graphs.widths

        def chosen(most: int) -> list[int]:
            if not widths:
                return list(all_widths(most))
            return sorted({most, *(width for width in widths if width < most)})

        with (
            mock.patch.object(vmserve.runner.computing, "load_model", random_model),
            mock.patch.object(vmserve.runner.graphs, "widths", chosen),
        ):
            # A dry run captures steps, too.
            runtime = TorchCpuRuntime(graphs=True) if self.device == "cpu" else None
            engine = LLMEngine(config, runtime=runtime)
        graphs = engine.runner._graphs
        for name, kind in KINDS.items() if graphs is not None else ():
            setattr(graphs, name, self._counted(kind, getattr(graphs, name)))
        try:
            yield engine
        finally:
            engine.close()
            vars(engine).clear()  # a variable with the engine keeps no weights and pages alive
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def _counted(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            logits = call(*arguments)
            self.replays[kind] += 1  # a capture that failed raises, and the step is eager
            return logits

        return counted

    def served(self, engine: LLMEngine, num_steps: int) -> Row:
        """The backend, and how the steps since ``replays`` was cleared were computed."""
        return {"backend": backend_of(engine), "steps": how(self.replays, num_steps)}

    def device_is_lost(self) -> bool:
        """Whether nothing can be computed in this process any more."""
        try:
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False


def backend_of(engine: LLMEngine, regime: str = "") -> str:
    """The attention backend that serves the regime, by default the engine's; both, for auto."""
    regime = regime or engine.resolved.kv_regime
    chosen = tuple(Regime) if regime == "auto" else (Regime(regime),)
    return " / ".join(dict.fromkeys(engine.runner._kernels[each].backend.name for each in chosen))


def how(replays: Counter[str], num_steps: int) -> str:
    """How steps were computed: as counted, not as asked for."""
    if not replays:
        return "eager"
    [(kind, count), *others] = replays.most_common()
    return kind if count >= num_steps and not others else f"{count} of {num_steps} {kind}"


def random_model(
    path: Path, dtype: DType, device: str, *, config: ModelConfig, max_model_len: int,
    native: bool, quantization: str, **others: Any,
) -> LoadedModel:  # fmt: skip
    """In the place of ``load_model``: small random weights, ones in the norms."""
    if native or quantization != "none":
        raise ValueError("random weights are for torch's layers, which are captured")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in tensor_shapes(config.network).items():
        tensor = torch.empty(shape, dtype=as_torch(dtype), device=device)
        if len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        tensors[name] = tensor
    num_bytes = sum(t.nbytes for t in tensors.values())
    weights = assemble_on(torch.device(device), config.network, tensors)
    return LoadedModel(config, dtype, num_bytes, Decoder(config.network, weights, max_model_len))


def write_model(directory: Path, shape: str, dtype: str) -> None:
    """config.json of the shape, and the embedded model's tokenizer, whose ids all shapes have."""
    config = COMMON | dict(zip(SIZES, SHAPES[shape], strict=True)) | {"dtype": dtype}
    config["tie_word_embeddings"] = shape == "llama-3.2-1b"
    (directory / "config.json").write_text(json.dumps(config))
    embedded = resolve_model(None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((embedded / name).read_bytes())


# -- steps -----------------------------------------------------------------------------------


def add(engine: LLMEngine, index: int, num_prompt: int, num_output: int, **sampling: Any) -> None:
    rng = random.Random(index)
    prompt = [rng.randrange(3, 1000) for _ in range(num_prompt)]
    chosen = {"temperature": 0.0, "seed": index} | sampling
    params = SamplingParams(**chosen, max_tokens=num_output, ignore_eos=True)
    engine.add_request(str(index), prompt, params)


def step(engine: LLMEngine) -> Any:
    result = engine.step()
    if result.failures:
        raise result.failures[0].error
    return result


def sequences_of(engine: LLMEngine) -> list[Any]:
    return [seq for req in engine.requests.values() for seq in req.sequences]


def run_until_decoding(engine: LLMEngine, num: int) -> None:
    """All prompts are read, and each of ``num`` requests has a token or more."""
    while True:
        step(engine)
        sequences = sequences_of(engine)
        if len(sequences) == num and all(seq.num_output > 2 for seq in sequences):
            return


def step_seconds(engine: LLMEngine, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step(engine)
        times.append(time.perf_counter() - began)
    return times


def drain(engine: LLMEngine) -> float:
    """Seconds until every request has ended."""
    began = time.perf_counter()
    while engine.has_unfinished:
        step(engine)
    return time.perf_counter() - began


def empty(engine: LLMEngine) -> None:
    """End every request, and let no page stay mapped for the next ones."""
    for key in engine.request_ids:
        engine.abort(key)
    for _ in range(3):  # what is in flight ends, and then there is nothing to do
        step(engine)
    engine.memory.settle()
    engine.memory.trim(0, drop_idle=True)


def timed(bench: Bench, engine: LLMEngine, count: int) -> Any:
    """So many steps of what runs.

    ``seconds`` of each, and their ``median``; how many ``overlapped``: began while the one before
    ran; ``before``, ``after``: tokens of each sequence; ``changed``: what the statistics gained.
    """
    before = [seq.num_tokens for seq in sequences_of(engine)]
    stats, overlapped = engine.stats(), engine.counters.steps_overlapped
    bench.replays.clear()
    seconds = step_seconds(engine, count)
    after = engine.stats()
    return SimpleNamespace(
        served=bench.served(engine, count),
        seconds=seconds,
        median=statistics.median(seconds),
        overlapped=engine.counters.steps_overlapped - overlapped,
        before=before,
        after=[seq.num_tokens for seq in sequences_of(engine)],
        changed={name: after[name] - value for name, value in stats.items()},
    )


def begin(
    bench: Bench, engine: LLMEngine, batch: int, context: int = 0, sampling: str = "greedy"
) -> None:
    """``batch`` requests that decode behind ``context`` tokens, for all steps that are timed."""
    for index in range(batch):
        num_prompt = context or bench.plan.context
        add(engine, index, num_prompt, 3 * bench.plan.steps + 16, **SAMPLING[sampling])
    run_until_decoding(engine, batch)
    step_seconds(engine, 3)  # whatever is made at first use


SAMPLING: dict[str, Row] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "logprobs": {"temperature": 1.0, "logprobs": 1},
}
#: What a column of a table is called as an option of the engine.
OPTIONS = {
    "regime": "kv_regime",
    "async": "async_scheduling",
    "slot_tokens": "max_model_len",
    "layers_per_group": "kv_layers_per_group",
}


def cases(**columns: Iterable[Any]) -> list[Row]:
    """Every combination."""
    return [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]


def decodes(bench: Bench, chosen: Iterable[Row], steps: int = 0) -> Iterator[Row]:
    """So many steps (by default half of the plan's) for each case; an engine for those that follow
    one another with equal options."""
    steps = steps or bench.plan.steps // 2

    def options_of(case: Row) -> Row:
        options = {OPTIONS[name]: value for name, value in case.items() if name in OPTIONS}
        if "page_mib" in case:
            options["kv_page_size"] = int(case["page_mib"] * MIB)
        return options | {"max_num_seqs": case["batch"]}

    for options, alike in groupby(chosen, options_of):
        [*rows] = alike
        try:
            with bench.engine((options["max_num_seqs"],), **options) as engine:
                for row in rows:
                    asked = {name: row[name] for name in ("context", "sampling") if name in row}
                    begin(bench, engine, row["batch"], **asked)
                    found = timed(bench, engine, steps)
                    yield {
                        **row,
                        **found.served,
                        "step_ms": 1e3 * found.median,
                        "tokens_per_s": row["batch"] / found.median,
                        "overlapped": found.overlapped,
                        "timed": steps,
                    }
                    empty(engine)
        except (ConfigurationError, OutOfMemoryError) as error:
            if "page_mib" not in rows[0]:  # not all layouts can be had
                raise
            yield rows[0] | {"backend": None, "steps": None, "refused": str(error)}


# -- parts -----------------------------------------------------------------------------------


def first_difference(some: list[list[int]], others: list[list[int]]) -> int | None:
    """The least position at which a sequence differs; None if they are equal."""
    pairs = (zip(a, b, strict=True) for a, b in zip(some, others, strict=True))
    return min((i for pair in pairs for i, (x, y) in enumerate(pair) if x != y), default=None)


def part_smoke(bench: Bench) -> Iterator[Row]:
    """Whether it works at all, and where tokens first differ from those of the first row.

    Random weights in 16 bits diverge: a difference proves nothing, nor does its absence. What
    tokens must be is asked by tests/gpu/test_engine.py, of the embedded model.
    """
    expected: list[list[int]] = []
    for regime, eager in product(REGIMES, (True, False)):
        began = time.perf_counter()
        with bench.engine(kv_regime=regime, enforce_eager=eager, max_num_seqs=4) as engine:
            started = time.perf_counter()
            bench.replays.clear()
            for index in range(4):
                add(engine, index, bench.plan.context // 4 + index, 16)
            found: dict[str, list[int]] = {}
            while engine.has_unfinished:
                for output in step(engine).outputs:
                    if output.finished:
                        found[output.request_id] = output.outputs[0].token_ids
            tokens = [found[key] for key in sorted(found)]
            expected = expected or tokens
            graphs = engine.runner._graphs
            yield {
                "regime": regime,
                **bench.served(engine, 15),  # the first token is the prompt's
                "first_difference": first_difference(tokens, expected),
                "start_s": started - began,
                "generate_s": time.perf_counter() - started,
                "graphs": 0 if graphs is None else graphs.num_captured,
                "graphs_mib": 0.0 if graphs is None else graphs.captured_bytes / MIB,
            }


def num_weights(engine: LLMEngine) -> tuple[DecoderConfig, int, int]:
    """The network, the weights of its layers, and those of the LM head."""
    network = engine.runner.model.config.network
    assert isinstance(network, DecoderConfig), "random weights are a decoder's"
    shapes = tensor_shapes(network).items()
    layers = sum(math.prod(shape) for name, shape in shapes if ".layers." in name and shape[1:])
    return network, layers, network.vocab_size * network.hidden_size


def part_decode(bench: Bench) -> Iterator[Row]:
    """Decode tokens/s by batch and regime, and the rate at which K, V and weights are read.

    One engine a regime; eager steps of the smallest and the largest batch alone.
    """
    batches, steps = bench.plan.batches, bench.plan.steps
    for regime in REGIMES:
        with bench.engine(batches, max_num_seqs=max(batches), kv_regime=regime) as engine:
            graphs, layout = engine.runner._graphs, engine.memory.layout
            weights = sum(num_weights(engine)[1:]) * engine.runner.model.dtype.itemsize
            for batch in batches:
                begin(bench, engine, batch)
                ends = batch in (min(batches), max(batches))
                for eager in (False, True) if ends else (False,):
                    engine.runner._graphs = None if eager else graphs
                    step_seconds(engine, 3)  # whatever is made at first use
                    found = timed(bench, engine, steps // 4 if eager else steps)
                    tokens = (sum(found.before) + sum(found.after)) / 2
                    kv = tokens * layout.shape.token_bytes * layout.num_groups
                    yield {
                        "batch": batch,
                        "regime": regime,
                        **found.served,
                        "context": tokens / batch,
                        "step_ms": 1e3 * found.median,
                        "tokens_per_s": batch / found.median,
                        "kv_gb": kv / 1e9,
                        "weights_gb": weights / 1e9,
                        "gb_per_s": (kv + weights) / found.median / 1e9,
                    }
                engine.runner._graphs = graphs
                empty(engine)


def part_profile(bench: Bench) -> Iterator[Row]:
    """Kernels of a decoding step, the longest first, by torch's profiler."""
    steps, on_device = 8, bench.device == "cuda"
    activities = [getattr(torch.profiler.ProfilerActivity, "CUDA" if on_device else "CPU")]
    name = "self_device_time_total" if on_device else "self_cpu_time_total"
    for batch, regime in product((bench.plan.batches[0], bench.plan.batches[-2]), REGIMES):
        with bench.engine((batch,), max_num_seqs=batch, kv_regime=regime) as engine:
            begin(bench, engine, batch)
            bench.replays.clear()
            with torch.profiler.profile(activities=activities) as profile:
                step_seconds(engine, steps)
                if on_device:
                    torch.cuda.synchronize()
            served = bench.served(engine, steps)
            found = sorted(profile.key_averages(), key=lambda e: -getattr(e, name))
        total = sum(getattr(event, name) for event in found)
        for event in found[:15]:
            yield {
                "batch": batch,
                "regime": regime,
                **served,
                "kernel": event.key[:80].replace("|", "/"),
                "calls_a_step": event.count / steps,
                "us_a_step": getattr(event, name) / steps,
                "share": getattr(event, name) / max(total, 1e-9),
            }


def part_sampling(bench: Bench) -> Iterator[Row]:
    """What sampling adds to a decoding step, by how tokens are chosen."""
    return decodes(bench, cases(batch=bench.plan.batches[-2:], sampling=SAMPLING))


def part_long(bench: Bench) -> Iterator[Row]:
    """Decoding in long slots, behind little and much of what they hold."""
    slots, contexts = [bench.plan.long_slots], bench.plan.long_contexts
    columns = {"batch": bench.plan.batches[:2], "slot_tokens": slots, "context": contexts}
    return decodes(bench, cases(regime=REGIMES, **columns))


def part_overlap(bench: Bench) -> Iterator[Row]:
    """Decoding with each step launched while the one before runs, and one after the other."""
    columns = {"batch": bench.plan.batches, "regime": REGIMES, "async": ("off", "on")}
    return decodes(bench, cases(**columns), bench.plan.steps)


def part_layout(bench: Bench) -> Iterator[Row]:
    """What interleaving layers and the size of pages cost a decoding step."""
    chosen = [
        {"layers_per_group": layers, "page_mib": mib} | case
        for layers, mib in bench.plan.layouts
        for case in cases(regime=REGIMES, batch=[bench.plan.batches[-2]])
    ]
    return decodes(bench, chosen)


def part_auto(bench: Bench) -> Iterator[Row]:
    """What --kv-regime auto is told by its calibration, and how long that takes."""
    began = time.perf_counter()
    with bench.engine(kv_regime="auto") as engine:
        seconds = time.perf_counter() - began
        profile = engine.profile
        backends = {regime: backend_of(engine, regime) for regime in REGIMES}
    assert profile is not None, "auto has one"
    for regime in REGIMES:
        costs = getattr(profile, regime)
        yield {
            "regime": regime,
            "backend": backends[regime],
            "steps": None,  # kernels alone
            "call_us": 1e6 * costs.call,
            "sequence_us": 1e6 * costs.sequence,
            "read_ns": 1e9 * costs.read,
            "pair_ps": 1e12 * costs.pair,
            "map_page_us": 1e6 * profile.map_page,
            "start_s": seconds,
        }


def mapping_prompts(kind: str, batch: int, page_tokens: int, steps: int) -> list[int]:
    """Lengths of prompts whose sequences, while ``steps`` are timed, cross into their next page
    never (``none``), all in the same step (``together``), or one after the other, as often as in
    the long run (``apart``)."""
    if kind == "none":
        return [page_tokens // 8] * batch
    last = page_tokens - 8  # some steps are computed before those that are timed
    if kind == "together":
        return [max(1, last - steps // 2)] * batch
    crossings = [index * page_tokens // batch for index in range(batch)]
    # Pages of those that cross soon after are mapped ahead while steps are timed.
    end = min(steps + LOOKAHEAD_TOKENS, last)
    return [last - each if each < end else page_tokens // 8 for each in crossings]


#: What the calls of a part_mapping row are.
CALLS = ("map_calls", "access_calls", "hidden_calls", "unhidden_calls", "pages_committed")


def part_mapping(bench: Bench) -> Iterator[Row]:
    """Latency of captured steps by how sequences grow, mapped by the step or by a mapper.

    Sequences in their first pages; pages that they grow into are mapped anew. ``growth``: by
    :func:`mapping_prompts`.
    """
    batches = bench.plan.batches[-2:]
    # All prompts are read in one step: sequences that shall cross together begin together.
    options = {"kv_regime": "virtual", "max_num_batched_tokens": 256 * max(batches)}
    for mapper in ("off", "auto"):
        with bench.engine(
            batches, max_num_seqs=max(batches), kv_mapper=mapper, **options
        ) as engine:
            layout = engine.memory.layout
            steps = min(4 * bench.plan.steps, layout.page_tokens // 2)
            for batch, kind in product(batches, ("none", "apart", "together")):
                lengths = mapping_prompts(kind, batch, layout.page_tokens, steps)
                for index, length in enumerate(lengths):
                    add(engine, index, length, steps + 32)
                run_until_decoding(engine, batch)
                step_seconds(engine, 2)
                found = timed(bench, engine, steps)
                pages = [sum(map(layout.pages_for, each)) for each in (found.before, found.after)]
                yield {
                    "batch": batch,
                    "growth": kind,
                    "mapper": mapper,
                    **found.served,
                    "median_ms": 1e3 * found.median,
                    "p99_ms": 1e3 * percentile(found.seconds, 99),
                    "max_ms": 1e3 * max(found.seconds),
                    "timed": steps,
                    "lengths_differ_by": max(found.before) - min(found.before),
                    "grown_pages": pages[1] - pages[0],
                    **{name: found.changed[f"{name}_total"] for name in CALLS},
                    "waited_ms": 1e3 * found.changed["mapper_wait_seconds_total"],
                    "map_ms": 1e3 * found.changed["map_seconds_total"],
                }
                empty(engine)


def part_ttft(bench: Bench) -> Iterator[Row]:
    """From a request's arrival to its first token, alone, by prompt length; the best of three."""
    for regime in REGIMES:
        # A prompt is never a captured step.
        with bench.engine(kv_regime=regime, enforce_eager=True) as engine:
            network, layers, head = num_weights(engine)
            for length in bench.plan.prompts:
                samples = []
                bench.replays.clear()
                for attempt in range(4):  # the first one loads what is loaded at first use
                    add(engine, attempt, length, 1)
                    samples.append(drain(engine))
                pairs = length * (length + 1) / 2
                attention = 4 * network.q_heads * network.head_dim * network.num_layers * pairs
                flops = 2 * (layers * length + head) + attention
                yield {
                    "regime": regime,
                    **bench.served(engine, 4),
                    "prompt": length,
                    "chunk": engine.resolved.max_num_batched_tokens,
                    "ttft_ms": 1e3 * min(samples[1:]),
                    "tflop_per_s": flops / min(samples[1:]) / 1e12,
                    "attention_share": attention / flops,
                }


def workload(
    bench: Bench, requests: Sequence[tuple[int, int]], **options: Any
) -> tuple[Row, dict[str, float]]:
    """Prompts and outputs of so many tokens, all there at once, until the last one ends: columns,
    and the engine's statistics."""
    with bench.engine(**options) as engine:
        bench.replays.clear()
        for index, lengths in enumerate(requests):
            add(engine, index, *lengths)
        seconds = drain(engine)
        rate = sum(num_output for _, num_output in requests) / seconds
        row = {"makespan_s": seconds, "output_tokens_per_s": rate}
        return bench.served(engine, engine.counters.steps) | row, engine.stats()


def part_makespan(bench: Bench) -> Iterator[Row]:
    """Requests of many lengths, all there at once, until the last one ends."""
    rng, longest = random.Random(7), bench.plan.longest
    requests = [
        (max(4, int(longest * rng.random() ** 3)), rng.randint(4, longest // 2))
        for _ in range(bench.plan.requests)
    ]
    for regime in ("paged", "virtual", "auto"):
        row, stats = workload(bench, requests, kv_regime=regime)
        yield {
            "regime": regime,
            **row,
            "preemptions": stats["num_preemptions_total"],
            "map_calls": stats["map_calls_total"],
            "unhidden_calls": stats["unhidden_calls_total"],
        }


def part_swap(bench: Bench) -> Iterator[Row]:
    """Too little memory, victims swapped: their copies waited for, and beside the next step."""
    batch, num_output = max(12, bench.plan.batches[-2]), 4 * bench.plan.steps
    with bench.engine(max_num_seqs=batch) as engine:
        layout = engine.memory.layout
    needed, one = (
        count * layout.pages_for(length) * layout.total_page_bytes
        for count, length in ((batch, bench.plan.context + num_output), (1, bench.plan.max_len))
    )
    options = {"preemption": "swap", "kv_cache_memory": max(one, needed // 2), "swap_space": needed}
    swap_out = MemoryManager.swap_out

    def waiting(memory: MemoryManager, seqs: Sequence[int]) -> bool:
        done = swap_out(memory, seqs)
        memory.wait()
        return done

    for copies, regime in product(("waited for", "beside"), REGIMES):
        chosen = waiting if copies == "waited for" else swap_out
        with mock.patch.object(MemoryManager, "swap_out", chosen):
            row, stats = workload(
                bench, [(bench.plan.context, num_output)] * batch,
                max_num_seqs=batch, kv_regime=regime, **options,
            )  # fmt: skip
        yield {
            "copies": copies,
            "regime": regime,
            **row,
            "swaps": stats["num_swapped_out_total"],
            "blocks_out": stats["swapped_out_blocks_total"],
        }


def part_idle(bench: Bench) -> Iterator[Row]:
    """Memory before, while and after requests run: what an idle engine gives back, and how soon.

    What an engine keeps ready is told apart from what it should not hold. Requests end all at once.
    """
    num, on_device = max(bench.plan.batches), bench.device == "cuda"
    with bench.engine((num,), max_num_seqs=num) as engine:
        memory, page_bytes = engine.memory, engine.memory.layout.total_page_bytes
        kept = max(IDLE_BYTES // page_bytes, memory.ready_pages)

        def row(when: str, steps: str | None, seconds: float | None = None) -> Row:
            stats = memory.stats()
            return {
                "when": when,
                "backend": backend_of(engine),
                "steps": steps,
                "pool_mib": stats.committed_pages * stats.page_bytes / MIB,
                "reserve_mib": kept * page_bytes / MIB,
                "beyond_mib": max(0, stats.committed_pages - kept) * stats.page_bytes / MIB,
                "used_mib": stats.used_pages * stats.page_bytes / MIB,
                "limit_mib": stats.limit_pages * stats.page_bytes / MIB,
                "torch_mib": torch.cuda.memory_reserved() / MIB if on_device else 0.0,
                "device_free_mib": torch.cuda.mem_get_info()[0] / MIB if on_device else 0.0,
                "back_ms": None if seconds is None else 1e3 * seconds,
            }

        yield row("at start", None)
        begin(bench, engine, num)
        yield row("serving", timed(bench, engine, 4).served["steps"])
        for key in engine.request_ids:
            engine.abort(key)
        began, back = time.perf_counter(), None
        while back is None and time.perf_counter() < began + 1:
            step(engine)  # finds nothing to do
            stats = memory.stats()
            if stats.committed_pages <= kept and stats.used_pages == 0:
                back = time.perf_counter() - began
        yield row("idle", None, back)
        time.sleep(0.2)  # whatever the mapper still does
        yield row("0.2 s later", None)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    part.__name__.removeprefix("part_"): part
    for part in (
        part_smoke, part_decode, part_profile, part_sampling, part_long, part_auto, part_overlap,
        part_mapping, part_ttft, part_makespan, part_idle, part_layout, part_swap,
    )
}  # fmt: skip


# -- results ---------------------------------------------------------------------------------

DRY = "Dry run on a CPU: no figure means anything.\n"
#: Exit status where nothing more can be computed in this process: --resume does the rest.
DEVICE_LOST = 3


def cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def write(out: Path, results: Row) -> None:
    """What was found, in files that are whole at any time."""
    texts = [DRY] if results["device"] == "cpu" else []
    for name, rows in results["parts"].items():
        title = (PARTS[name].__doc__ or name).splitlines()[0]
        names = tuple(dict.fromkeys(name for row in rows for name in row))
        cells = tuple(tuple(cell(row.get(name)) for name in names) for row in rows)
        texts.append(Table(title, names, cells).to_markdown())
    texts += [f"{name} failed: {error}\n" for name, error in results["failed"].items()]
    replace_text(out / "results.json", json.dumps(results, indent=1) + "\n")
    replace_text(out / "engine.md", "\n".join(texts))


def run(names: list[str], bench: Bench, out: Path, results: Row) -> int:
    """Every part, or as many as time allows; the exit status. One that fails keeps its rows."""
    for position, name in enumerate(names):
        if name in results["parts"]:
            continue
        rows: list[Row] = []
        results["parts"][name] = rows
        write(out, results)
        try:
            for row in PARTS[name](bench):
                print(f"{name}: {row}", flush=True)
                rows.append(row)
                write(out, results)
                if bench.out_of_time():
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts tell more
            traceback.print_exc()
            results["failed"][name] = f"{type(error).__name__}: {error}"
            write(out, results)
            if bench.device_is_lost():
                return DEVICE_LOST
        if bench.out_of_time():
            results["left_out"] += [f"{name}, after {len(rows)} rows", *names[position + 1 :]]
            break
    write(out, results)
    return 1 if results["failed"] else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument(
        "--with", dest="common", nargs="*", default=[], metavar="OPTION=VALUE",
        help="options of every engine, as EngineConfig names them: attention_backend=cuda",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=420.0, help="no part begins after these")
    parser.add_argument("--resume", action="store_true", help="leave out what had begun in --out")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    common = {
        name: int(value) if value.isdigit() else value
        for name, _, value in (text.partition("=") for text in options.common)
    }
    shape, dtype, device, plan = options.shape, options.dtype, "cuda", FULL
    if options.dry_run:
        shape, dtype, device, plan = "tiny", "float32", "cpu", TINY
    results = {
        "shape": shape,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "common": common,
        "machine": machine_info(),
        "parts": {},
        "left_out": [],
        "failed": {},
    }
    if options.resume and (options.out / "results.json").exists():
        results |= json.loads((options.out / "results.json").read_text()) | {"left_out": []}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, dtype)
        bench = Bench(Path(folder), device, dtype, plan, options.seconds, **common)
        return run(names, bench, options.out, results)


if __name__ == "__main__":
    raise SystemExit(main())
