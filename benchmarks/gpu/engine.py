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
import contextlib
import gc
import itertools
import json
import math
import random
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from vmserve import SamplingParams  # first: it sets how torch's threads wait

import torch  # isort: skip
import vmserve.engine.build  # isort: skip
import vmserve.runner.graphs  # isort: skip
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import replace_text
from vmserve_bench.lab.statistics import percentile
from vmserve_bench.lab.table import markdown_table

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.engine.parts import LOOKAHEAD_TOKENS
from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager
from vmserve.models import LoadedModel, ModelConfig, resolve_model
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.tensor_loader import assemble_on
from vmserve.models.tensor_names import tensor_shapes
from vmserve.numbers.dtypes import DType
from vmserve.numbers.torch_dtypes import as_torch
from vmserve.runner.torch_runtime import TorchCpuRuntime

Row = dict[str, Any]
MIB = 1 << 20
REGIMES = ("paged", "virtual", "auto")

#: config.json of each shape, of what differs from the others.
SHAPES: dict[str, Row] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "max_position_embeddings": 512,
    },
}
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


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths are tokens."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prompts: tuple[int, ...]
    requests: int
    longest: int
    #: Layers of a group and MiB of a page.
    layouts: tuple[tuple[int, float], ...]
    max_len: int
    #: Slots of so many tokens, with contexts far shorter and nearly as long.
    long_slots: int
    long_contexts: tuple[int, ...]


FULL = Plan(
    batches=(1, 8, 32, 128),
    context=1024,
    steps=64,
    prompts=(512, 2048, 8192),
    requests=128,
    longest=1024,
    layouts=((2, 2), (32, 32), (8, 8), (32, 8), (4, 4), (1, 2)),
    max_len=16384,
    long_slots=32768,
    long_contexts=(1024, 30720),
)
TINY = Plan(
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
        self,
        directory: Path,
        device: str,
        dtype: str,
        plan: Plan,
        seconds: float,
        common: Row | None = None,
    ) -> None:
        self.directory = directory
        self.device = device
        self.dtype = dtype
        self.plan = plan
        #: Options of every engine.
        self.common = common or {}
        #: Steps that came from a graph, by what :func:`how` calls them.
        self.replays: Counter[str] = Counter()
        self._deadline = time.monotonic() + seconds

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    @contextmanager
    def engine(self, widths: Sequence[int] = (), **options: Any) -> Iterator[LLMEngine]:
        """An engine. ``widths``: of the only batches that are captured ahead."""
        config = EngineConfig(
            model=str(self.directory),
            device=self.device,
            dtype=self.dtype,
            **(
                {"enable_prefix_caching": False, "max_model_len": self.plan.max_len}
                | self.common
                | options
            ),
        )

        def chosen(most: int) -> list[int]:
            return sorted({most, *(width for width in widths if width < most)})

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(vmserve.engine.build, "load_model", random_model))
            if widths:
                stack.enter_context(mock.patch.object(vmserve.runner.graphs, "widths", chosen))
            # A dry run captures steps, too.
            runtime = TorchCpuRuntime(graphs=True) if self.device == "cpu" else None
            engine = LLMEngine(config, runtime=runtime)
        self._count_replays(engine)
        try:
            yield engine
        finally:
            engine.close()
            vars(engine).clear()  # a variable with the engine keeps no weights and pages alive
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def _count_replays(self, engine: LLMEngine) -> None:
        graphs = engine.runner._graphs
        for name, kind in (("whole", "captured"), ("in_pieces", "captured in pieces")):
            call = None if graphs is None else getattr(graphs, name)

            def counted(*arguments: Any, kind: str = kind, call: Any = call) -> Any:
                logits = call(*arguments)
                self.replays[kind] += 1  # a capture that failed raises, and the step is eager
                return logits

            if graphs is not None:
                setattr(graphs, name, counted)

    def device_is_lost(self) -> bool:
        """Whether nothing can be computed in this process any more."""
        if self.device != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def torch_bytes(self) -> int:
        """Device memory that torch holds; 0 on the CPU."""
        return int(torch.cuda.memory_reserved()) if self.device == "cuda" else 0

    def free_bytes(self) -> int:
        """Free device memory by the driver; 0 on the CPU, whose memory is shared."""
        return int(torch.cuda.mem_get_info()[0]) if self.device == "cuda" else 0


def random_model(
    path: Path,
    dtype: DType,
    device: str,
    *,
    config: ModelConfig,
    max_model_len: int,
    native: bool = False,
    quantization: str = "none",
    progress: Any = None,
    ranks: Any = None,
    group: Any = None,
) -> LoadedModel:
    """In the place of ``load_model``: small random weights, ones in the norms."""
    if native or quantization != "none" or ranks is not None or group is not None:
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
    config = COMMON | SHAPES[shape] | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config))
    embedded = resolve_model(None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((embedded / name).read_bytes())


def add(
    engine: LLMEngine, key: str, num_prompt: int, num_output: int, seed: int = 0, **sampling: Any
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 1000) for _ in range(num_prompt)]
    chosen = {"temperature": 0.0, "seed": seed} | sampling
    params = SamplingParams(**chosen, max_tokens=num_output, ignore_eos=True)
    engine.add_request(key, prompt, params)


def step(engine: LLMEngine) -> None:
    result = engine.step()
    if result.failures:
        raise result.failures[0].error


def lengths_of(engine: LLMEngine) -> list[int]:
    """Tokens of each running sequence."""
    return [seq.num_tokens for req in engine.requests.values() for seq in req.sequences]


def run_until_decoding(engine: LLMEngine, num: int) -> None:
    """All prompts are read, and each of ``num`` requests has a token or more."""
    while True:
        step(engine)
        sequences = [seq for req in engine.requests.values() for seq in req.sequences]
        if len(sequences) == num and all(seq.num_output > 2 for seq in sequences):
            return


def empty(engine: LLMEngine) -> None:
    """End every request, and let no page stay mapped for the next ones."""
    for key in engine.request_ids:
        engine.abort(key)
    for _ in range(3):  # what is in flight ends, and then there is nothing to do
        step(engine)
    engine.memory.settle()
    engine.memory.trim(0, drop_idle=True)


def backend_of(engine: LLMEngine, regime: str = "") -> str:
    """The attention backend that serves the regime, by default the engine's; both, for auto."""
    regime = regime or engine.resolved.kv_regime
    chosen = tuple(Regime) if regime == "auto" else (Regime(regime),)
    names = [engine.runner._kernels[each].backend.name for each in chosen]
    return " / ".join(dict.fromkeys(names))


def step_seconds(engine: LLMEngine, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step(engine)
        times.append(time.perf_counter() - began)
    return times


class Decoding(NamedTuple):
    """``seconds`` of each step; how many of the steps began while the one before ran.

    ``before``, ``after``: tokens of each sequence. ``changed``: what the statistics gained.
    """

    seconds: list[float]
    num_overlapped: int
    backend: str
    steps: str
    before: list[int]
    after: list[int]
    changed: dict[str, float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def served(self) -> Row:
        return {"backend": self.backend, "steps": self.steps}


def how(bench: Bench, before: Counter[str], num_steps: int) -> str:
    """How the steps since ``before`` were computed: as counted, not as asked for."""
    found = bench.replays - before
    if not found:
        return "eager"
    [(kind, count), *others] = found.most_common()
    return kind if count >= num_steps and not others else f"{count} of {num_steps} {kind}"


def timed(bench: Bench, engine: LLMEngine, count: int) -> Decoding:
    """So many steps of what runs."""
    lengths, stats = lengths_of(engine), engine.stats()
    overlapped, replays = engine.counters.steps_overlapped, bench.replays.copy()
    seconds = step_seconds(engine, count)
    after = engine.stats()
    return Decoding(
        seconds,
        engine.counters.steps_overlapped - overlapped,
        backend_of(engine),
        how(bench, replays, count),
        lengths,
        lengths_of(engine),
        {name: after[name] - value for name, value in stats.items()},
    )


@contextmanager
def decoders(
    bench: Bench,
    batch: int,
    steps: int,
    *,
    context: int | None = None,
    sampling: Row | None = None,
    **options: Any,
) -> Iterator[LLMEngine]:
    """``batch`` requests that decode for so many steps yet, behind ``context`` tokens."""
    with bench.engine((batch,), max_num_seqs=max(batch, 1), **options) as engine:
        for index in range(batch):
            num_prompt = context or bench.plan.context
            add(engine, str(index), num_prompt, 3 * steps + 16, index, **(sampling or {}))
        run_until_decoding(engine, batch)
        step_seconds(engine, 3)  # whatever is made at first use
        yield engine


def decoding(bench: Bench, batch: int, steps: int, **options: Any) -> Decoding:
    """Steps of :func:`decoders`."""
    with decoders(bench, batch, steps, **options) as engine:
        return timed(bench, engine, steps)


def drain(engine: LLMEngine) -> float:
    """Seconds until every request has ended."""
    began = time.perf_counter()
    while engine.has_unfinished:
        step(engine)
    return time.perf_counter() - began


# -- parts -----------------------------------------------------------------------------------


def first_difference(some: list[list[int]], others: list[list[int]]) -> int | None:
    """The least position at which a sequence differs; None if they are equal."""
    pairs = (zip(a, b, strict=True) for a, b in zip(some, others, strict=True))
    found = [i for pair in pairs for i, (x, y) in enumerate(pair) if x != y]
    return min(found, default=None)


def part_smoke(bench: Bench) -> Iterator[Row]:
    """Whether it works at all, and where tokens first differ from those of the first row.

    Random weights in 16 bits diverge: a difference proves nothing, nor does its absence. What
    tokens must be is asked by tests/gpu/test_engine.py, of the embedded model.
    """
    expected: list[list[int]] = []
    for regime, eager in itertools.product(("virtual", "paged"), (True, False)):
        began, replays = time.perf_counter(), bench.replays.copy()
        with bench.engine(kv_regime=regime, enforce_eager=eager, max_num_seqs=4) as engine:
            started = time.perf_counter()
            for index in range(4):
                add(engine, str(index), bench.plan.context // 4 + index, 16, index)
            found: dict[str, list[int]] = {}
            while engine.has_unfinished:
                result = engine.step()
                if result.failures:
                    raise result.failures[0].error
                for output in result.outputs:
                    if output.finished:
                        found[output.request_id] = output.outputs[0].token_ids
            tokens = [found[key] for key in sorted(found)]
            expected = expected or tokens
            graphs = engine.runner._graphs
            yield {
                "regime": regime,
                "backend": backend_of(engine),
                "steps": how(bench, replays, 15),  # the first token is the prompt's
                "first_difference": first_difference(tokens, expected),
                "start_s": started - began,
                "generate_s": time.perf_counter() - started,
                "graphs": 0 if graphs is None else graphs.num_captured,
                "graphs_mib": 0.0 if graphs is None else graphs.captured_bytes / MIB,
            }


def part_profile(bench: Bench) -> Iterator[Row]:
    """Kernels of a decoding step, the longest first, by torch's profiler."""
    steps = 8
    on_device = bench.device == "cuda"
    activities = [getattr(torch.profiler.ProfilerActivity, "CUDA" if on_device else "CPU")]
    batches = (bench.plan.batches[0], bench.plan.batches[-2])
    for batch, regime in itertools.product(batches, ("virtual", "paged")):
        with decoders(bench, batch, steps + 4, kv_regime=regime) as engine:
            replays = bench.replays.copy()
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(steps):
                    step(engine)
                if on_device:
                    torch.cuda.synchronize()
            served = {"backend": backend_of(engine), "steps": how(bench, replays, steps)}
            name = "self_device_time_total" if on_device else "self_cpu_time_total"
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


def part_long(bench: Bench) -> Iterator[Row]:
    """Decoding in long slots, behind little and much of what they hold."""
    longest = bench.plan.long_slots
    for batch, context, regime in itertools.product(
        bench.plan.batches[:2], bench.plan.long_contexts, ("virtual", "paged")
    ):
        options: dict[str, Any] = {"kv_regime": regime, "max_model_len": longest}
        found = decoding(bench, batch, bench.plan.steps // 2, context=context, **options)
        yield {
            "batch": batch,
            "slot_tokens": longest,
            "context": context,
            "regime": regime,
            **found.served,
            "step_ms": 1e3 * found.median,
        }


SAMPLING: dict[str, Row] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.95},
    "top_k": {"temperature": 1.0, "top_k": 50},
    "logprobs": {"temperature": 1.0, "logprobs": 1},
}


def part_sampling(bench: Bench) -> Iterator[Row]:
    """What sampling adds to a decoding step, by how tokens are chosen."""
    for batch, (name, sampling) in itertools.product(bench.plan.batches[-2:], SAMPLING.items()):
        found = decoding(bench, batch, bench.plan.steps // 2, sampling=sampling)
        yield {"batch": batch, "sampling": name, **found.served, "step_ms": 1e3 * found.median}


def part_auto(bench: Bench) -> Iterator[Row]:
    """What --kv-regime auto is told by its calibration, and how long that takes."""
    began = time.perf_counter()
    with bench.engine(kv_regime="auto") as engine:
        seconds = time.perf_counter() - began
        profile = engine.profile
        backends = {regime.value: backend_of(engine, regime.value) for regime in Regime}
    assert profile is not None, "auto has one"
    for regime, costs in (("virtual", profile.virtual), ("paged", profile.paged)):
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


def num_weights(network: DecoderConfig) -> tuple[int, int]:
    """Weights of the layers, and of the LM head."""
    shapes = tensor_shapes(network)
    layers = sum(
        math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) > 1
    )
    return layers, network.vocab_size * network.hidden_size


def part_decode(bench: Bench) -> Iterator[Row]:
    """Decode tokens/s by batch and regime, and the rate at which K, V and weights are read.

    One engine a regime; eager steps of the smallest and the largest batch alone.
    """
    batches, steps = bench.plan.batches, bench.plan.steps
    for regime in ("virtual", "paged"):
        with bench.engine(batches, max_num_seqs=max(batches), kv_regime=regime) as engine:
            graphs, layout = engine.runner._graphs, engine.memory.layout
            weights = sum(num_weights(network_of(engine))) * engine.runner.model.dtype.itemsize
            for batch in batches:
                for index in range(batch):
                    add(engine, str(index), bench.plan.context, 4 * steps + 16, index)
                run_until_decoding(engine, batch)
                ends = batch in (min(batches), max(batches))
                for eager in (False, True) if ends else (False,):
                    engine.runner._graphs = None if eager else graphs
                    step_seconds(engine, 3)  # whatever is made at first use
                    found = timed(bench, engine, steps // 4 if eager else steps)
                    tokens = (sum(found.before) + sum(found.after)) / 2
                    kv = tokens * layout.token_bytes * layout.num_groups
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


def network_of(engine: LLMEngine) -> DecoderConfig:
    network = engine.runner.model.config.network
    assert isinstance(network, DecoderConfig), "random weights are a decoder's"
    return network


def part_ttft(bench: Bench) -> Iterator[Row]:
    """From a request's arrival to its first token, alone, by prompt length; the best of three."""
    for regime in ("virtual", "paged"):
        # A prompt is never a captured step.
        with bench.engine(kv_regime=regime, enforce_eager=True) as engine:
            network = network_of(engine)
            layers, head = num_weights(network)
            for length in bench.plan.prompts:
                samples, replays = [], bench.replays.copy()
                for attempt in range(4):  # the first one loads what is loaded at first use
                    add(engine, f"{length}-{attempt}", length, 1, attempt)
                    samples.append(drain(engine))
                pairs = length * (length + 1) / 2
                attention = 4 * network.q_heads * network.head_dim * network.num_layers * pairs
                flops = 2 * (layers * length + head) + attention
                yield {
                    "regime": regime,
                    "backend": backend_of(engine),
                    "steps": how(bench, replays, 4),
                    "prompt": length,
                    "chunk": engine.resolved.max_num_batched_tokens,
                    "ttft_ms": 1e3 * min(samples[1:]),
                    "tflop_per_s": flops / min(samples[1:]) / 1e12,
                    "attention_share": attention / flops,
                }


def part_makespan(bench: Bench) -> Iterator[Row]:
    """Requests of many lengths, all there at once, until the last one ends."""
    rng = random.Random(7)
    lengths = [
        (
            max(4, int(bench.plan.longest * rng.random() ** 3)),
            rng.randint(4, bench.plan.longest // 2),
        )
        for _ in range(bench.plan.requests)
    ]
    for regime in REGIMES:
        with bench.engine(kv_regime=regime) as engine:
            replays = bench.replays.copy()
            for index, (num_prompt, num_output) in enumerate(lengths):
                add(engine, str(index), num_prompt, num_output, index)
            seconds = drain(engine)
            stats, backend = engine.stats(), backend_of(engine)
            steps = how(bench, replays, engine.counters.steps)
        yield {
            "regime": regime,
            "backend": backend,
            "steps": steps,
            "makespan_s": seconds,
            "output_tokens_per_s": sum(out for _, out in lengths) / seconds,
            "preemptions": stats["num_preemptions_total"],
            "map_calls": stats["map_calls_total"],
            "unhidden_calls": stats["unhidden_calls_total"],
        }


def part_idle(bench: Bench) -> Iterator[Row]:
    """Memory before, while and after requests run: what an idle engine gives back, and how soon.

    What an engine keeps ready is told apart from what it should not hold. Requests end all at once.
    """
    num = max(bench.plan.batches)
    with bench.engine((num,), max_num_seqs=num) as engine:
        memory, layout = engine.memory, engine.memory.layout
        kept = max(engine._idle_bytes // layout.total_page_bytes, memory.ready_pages)

        def row(when: str, steps: str | None, seconds: float | None = None) -> Row:
            stats = memory.stats()
            return {
                "when": when,
                "backend": backend_of(engine),
                "steps": steps,
                "pool_mib": stats.committed_pages * stats.page_bytes / MIB,
                "reserve_mib": kept * layout.total_page_bytes / MIB,
                "beyond_mib": max(0, stats.committed_pages - kept) * stats.page_bytes / MIB,
                "used_mib": stats.used_pages * stats.page_bytes / MIB,
                "limit_mib": stats.limit_pages * stats.page_bytes / MIB,
                "torch_mib": bench.torch_bytes() / MIB,
                "device_free_mib": bench.free_bytes() / MIB,
                "back_ms": None if seconds is None else 1e3 * seconds,
            }

        yield row("at start", None)
        for index in range(num):
            add(engine, str(index), bench.plan.context, 3 * bench.plan.steps, index)
        run_until_decoding(engine, num)
        replays = bench.replays.copy()
        step_seconds(engine, 4)
        yield row("serving", how(bench, replays, 4))
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
    for mapper in ("off", "auto"):
        options: dict[str, Any] = {"kv_regime": "virtual", "kv_mapper": mapper}
        # All prompts are read in one step: sequences that shall cross together begin together.
        options["max_num_batched_tokens"] = 256 * max(batches)
        with bench.engine(batches, max_num_seqs=max(batches), **options) as engine:
            page_tokens = engine.memory.layout.page_tokens
            steps = min(4 * bench.plan.steps, page_tokens // 2)
            for batch, kind in itertools.product(batches, ("none", "apart", "together")):
                for index, length in enumerate(mapping_prompts(kind, batch, page_tokens, steps)):
                    add(engine, str(index), length, steps + 32, index)
                run_until_decoding(engine, batch)
                step_seconds(engine, 2)
                found = timed(bench, engine, steps)
                times = sorted(found.seconds)
                pages = [
                    engine.memory.layout.pages_for(after) - engine.memory.layout.pages_for(before)
                    for before, after in zip(found.before, found.after, strict=True)
                ]
                yield {
                    "batch": batch,
                    "growth": kind,
                    "mapper": mapper,
                    **found.served,
                    "median_ms": 1e3 * statistics.median(times),
                    "p99_ms": 1e3 * percentile(times, 99),
                    "max_ms": 1e3 * times[-1],
                    "timed": steps,
                    "lengths_differ_by": max(found.before) - min(found.before),
                    "grown_pages": sum(pages),
                    **{name: found.changed[f"{name}_total"] for name in CALLS},
                    "waited_ms": 1e3 * found.changed["mapper_wait_seconds_total"],
                    "map_ms": 1e3 * found.changed["map_seconds_total"],
                }
                empty(engine)


def part_layout(bench: Bench) -> Iterator[Row]:
    """What interleaving layers and the size of pages cost a decoding step."""
    batch = bench.plan.batches[-2]
    for (layers, mib), regime in itertools.product(bench.plan.layouts, ("virtual", "paged")):
        options: dict[str, Any] = {
            "kv_regime": regime,
            "kv_layers_per_group": layers,
            "kv_page_size": int(mib * MIB),
        }
        row: Row = {"layers_per_group": layers, "page_mib": mib, "regime": regime}
        try:
            found = decoding(bench, batch, bench.plan.steps // 2, **options)
        except (ConfigurationError, OutOfMemoryError) as error:
            served = {"backend": None, "steps": None}
            yield row | served | {"step_ms": None, "refused": str(error)}
        else:
            yield row | found.served | {"step_ms": 1e3 * found.median, "refused": ""}


def part_overlap(bench: Bench) -> Iterator[Row]:
    """Decoding with each step launched while the one before runs, and one after the other."""
    for batch, regime, overlap in itertools.product(
        bench.plan.batches, ("virtual", "paged"), ("off", "on")
    ):
        options: dict[str, Any] = {"kv_regime": regime, "async_scheduling": overlap}
        measured = decoding(bench, batch, bench.plan.steps, **options)
        yield {
            "batch": batch,
            "regime": regime,
            "async": overlap,
            **measured.served,
            "overlapped": measured.num_overlapped,
            "timed": bench.plan.steps,
            "step_ms": 1e3 * measured.median,
            "tokens_per_s": batch / measured.median,
        }


def part_swap(bench: Bench) -> Iterator[Row]:
    """Too little memory, victims swapped: their copies waited for, and beside the next step."""
    batch, length = max(12, bench.plan.batches[-2]), bench.plan.context + 4 * bench.plan.steps
    with bench.engine(max_num_seqs=batch) as engine:
        layout = engine.memory.layout
    needed = batch * layout.pages_for(length) * layout.total_page_bytes
    one = layout.pages_for(bench.plan.max_len) * layout.total_page_bytes

    def waiting(memory: MemoryManager, seqs: Sequence[int]) -> bool:
        done = swap_out(memory, seqs)
        memory.wait()
        return done

    swap_out = MemoryManager.swap_out
    for copies, regime in itertools.product(("waited for", "beside"), ("virtual", "paged")):
        options: dict[str, Any] = {"kv_regime": regime, "preemption": "swap"}
        options |= {"kv_cache_memory": max(one, needed // 2), "swap_space": needed}
        chosen = waiting if copies == "waited for" else swap_out
        with (
            mock.patch.object(MemoryManager, "swap_out", chosen),
            bench.engine(max_num_seqs=batch, **options) as engine,
        ):
            replays = bench.replays.copy()
            for index in range(batch):
                add(engine, str(index), bench.plan.context, 4 * bench.plan.steps, index)
            seconds = drain(engine)
            stats, backend = engine.stats(), backend_of(engine)
            steps = how(bench, replays, engine.counters.steps)
        yield {
            "copies": copies,
            "regime": regime,
            "backend": backend,
            "steps": steps,
            "swaps": stats["num_swapped_out_total"],
            "blocks_out": stats["swapped_out_blocks_total"],
            "makespan_s": seconds,
            "output_tokens_per_s": 4 * bench.plan.steps * batch / seconds,
        }


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "smoke": part_smoke,
    "decode": part_decode,
    "profile": part_profile,
    "sampling": part_sampling,
    "long": part_long,
    "auto": part_auto,
    "overlap": part_overlap,
    "mapping": part_mapping,
    "ttft": part_ttft,
    "makespan": part_makespan,
    "idle": part_idle,
    "layout": part_layout,
    "swap": part_swap,
}


# -- results ---------------------------------------------------------------------------------


def table(title: str, rows: list[Row]) -> str:
    """The rows in Markdown, numbers to four figures."""
    names = list(rows[0]) if rows else []
    cells = ([_cell(row.get(name)) for name in names] for row in rows)
    return "\n".join([f"**{title}**", "", *markdown_table(names, cells, len(names)), ""])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


class Report:
    """What was found, in files that are whole at any time."""

    def __init__(self, out: Path, described: Row, *, resume: bool) -> None:
        self._out = out
        path = out / "results.json"
        self.results: Row = described | {"parts": {}, "left_out": [], "failed": {}}
        if resume and path.exists():
            self.results |= json.loads(path.read_text())
            self.results["left_out"] = []

    def begun(self, name: str) -> bool:
        return name in self.results["parts"]

    def add(self, name: str, row: Row | None) -> None:
        """None: the part begins."""
        rows = self.results["parts"].setdefault(name, [])
        if row is not None:
            print(f"{name}: {row}", flush=True)
            rows.append(row)
        self.write()

    def leave_out(self, *what: str) -> None:
        self.results["left_out"] += what
        self.write()

    def fail(self, name: str, error: Exception) -> None:
        traceback.print_exc()
        self.results["failed"][name] = f"{type(error).__name__}: {error}"
        self.write()

    def write(self) -> None:
        texts = [] if self.results["device"] != "cpu" else [DRY]
        for name, rows in self.results["parts"].items():
            texts.append(table((PARTS[name].__doc__ or name).splitlines()[0], rows))
        texts += [f"{name} failed: {error}\n" for name, error in self.results["failed"].items()]
        for name, text in (
            ("results.json", json.dumps(self.results, indent=1) + "\n"),
            ("engine.md", "\n".join(texts)),
        ):
            replace_text(self._out / name, text)


DRY = "Dry run on a CPU: no figure means anything.\n"
#: Exit status where nothing more can be computed in this process: --resume does the rest.
DEVICE_LOST = 3


def run(names: list[str], bench: Bench, report: Report) -> int:
    """Every part, or as many as time allows; the exit status. One that fails keeps its rows."""
    for position, name in enumerate(names):
        if report.begun(name):
            continue
        report.add(name, None)
        try:
            for row in PARTS[name](bench):
                report.add(name, row)
                if bench.out_of_time():
                    break
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts tell more
            report.fail(name, error)
            if bench.device_is_lost():
                return DEVICE_LOST
        if bench.out_of_time():
            num_rows = len(report.results["parts"][name])
            report.leave_out(f"{name}, after {num_rows} rows", *names[position + 1 :])
            break
    return 1 if report.results["failed"] else 0


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
    shape, dtype, device = options.shape, options.dtype, "cuda"
    if options.dry_run:
        shape, dtype, device = "tiny", "float32", "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    described = {
        "shape": shape,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "common": common,
        "machine": machine_info(),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, dtype)
        plan = TINY if options.dry_run else FULL
        bench = Bench(Path(folder), device, dtype, plan, options.seconds, common)
        return run(names, bench, Report(options.out, described, resume=options.resume))


if __name__ == "__main__":
    raise SystemExit(main())
