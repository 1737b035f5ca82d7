"""The engine on a GPU: decoding, prompts, whole workloads, memory, mapping, layouts.

    python benchmarks/gpu/engine.py --out DIR              # Llama-3-8B's shapes, 420 s at most
    python benchmarks/gpu/engine.py --out DIR --shape llama-3.2-1b --parts decode,mapping
    python benchmarks/gpu/engine.py --out DIR --dry-run    # tiny shapes on the CPU: its own logic

Weights are random and made on the device: nothing is downloaded, and what is generated means
nothing. ``results.json`` and ``engine.md`` are renewed after each row. A part that fails leaves its
rows; where the device is lost the exit status is 3, and ``--resume`` does the other parts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from vmserve import SamplingParams  # first: it sets how torch's threads wait

import torch  # isort: skip
import vmserve.engine.build  # isort: skip
from vmserve.bench.lab.machine import machine_info
from vmserve.bench.lab.report import replace_text
from vmserve.bench.lab.statistics import percentile
from vmserve.bench.lab.table import markdown_table
from vmserve.config import EngineConfig
from vmserve.dtypes import DType
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory.manager import MemoryManager
from vmserve.models import LoadedModel, ModelConfig, resolve_model
from vmserve.models.decoder import Decoder
from vmserve.models.tensor_loader import assemble_on
from vmserve.models.tensor_names import tensor_shapes
from vmserve.runner.torch_runtime import TorchCpuRuntime
from vmserve.torch_dtypes import as_torch

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
    page_mib: tuple[float, ...]
    groups: tuple[int, ...]
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
    page_mib=(2, 4, 8),
    groups=(1, 2, 4, 8),
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
    page_mib=(1 / 32,),
    groups=(1, 2),
    max_len=256,
    long_slots=512,
    long_contexts=(24, 400),
)


class Bench:
    """What every part needs: the model's files, the options, and the time that is left."""

    def __init__(
        self, directory: Path, device: str, dtype: str, plan: Plan, seconds: float
    ) -> None:
        self.directory = directory
        self.device = device
        self.dtype = dtype
        self.plan = plan
        self._deadline = time.monotonic() + seconds

    def out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    @contextmanager
    def engine(self, **options: Any) -> Iterator[LLMEngine]:
        config = EngineConfig(
            model=str(self.directory),
            device=self.device,
            dtype=self.dtype,
            **({"enable_prefix_caching": False, "max_model_len": self.plan.max_len} | options),
        )
        with mock.patch.object(vmserve.engine.build, "load_model", random_model):
            # A dry run captures steps, too.
            runtime = TorchCpuRuntime(graphs=True) if self.device == "cpu" else None
            engine = LLMEngine(config, runtime=runtime)
        try:
            yield engine
        finally:
            engine.close()
            vars(engine).clear()  # a variable with the engine keeps no weights and pages alive
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def device_is_lost(self) -> bool:
        """Whether nothing can be computed in this process any more."""
        if self.device != "cuda":
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

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


def run_until_decoding(engine: LLMEngine, num: int) -> None:
    """All prompts are read, and each of ``num`` requests has a token or more."""
    while True:
        step(engine)
        sequences = [seq for req in engine._requests.values() for seq in req.sequences]
        if len(sequences) == num and all(seq.num_output > 2 for seq in sequences):
            return


def step_seconds(engine: LLMEngine, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        step(engine)
        times.append(time.perf_counter() - began)
    return times


class Decoding(NamedTuple):
    """``seconds`` of each step; how many of the steps began while the one before ran."""

    seconds: list[float]
    num_overlapped: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


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
    with bench.engine(max_num_seqs=max(batch, 1), **options) as engine:
        for index in range(batch):
            num_prompt = context or bench.plan.context
            add(engine, str(index), num_prompt, 3 * steps + 16, index, **(sampling or {}))
        run_until_decoding(engine, batch)
        step_seconds(engine, 3)  # whatever is made at first use
        yield engine


def decoding(bench: Bench, batch: int, steps: int, **options: Any) -> Decoding:
    """Steps of :func:`decoders`."""
    with decoders(bench, batch, steps, **options) as engine:
        before = engine.counters.steps_overlapped
        seconds = step_seconds(engine, steps)
        return Decoding(seconds, engine.counters.steps_overlapped - before)


def drain(engine: LLMEngine) -> float:
    """Seconds until every request has ended."""
    began = time.perf_counter()
    while engine.has_unfinished:
        step(engine)
    return time.perf_counter() - began


# -- parts -----------------------------------------------------------------------------------


def part_smoke(bench: Bench) -> Iterator[Row]:
    """Whether it works at all: captured and eager steps give the same tokens in each regime."""
    expected: list[list[int]] = []
    for regime, eager in itertools.product(("virtual", "paged"), (True, False)):
        began = time.perf_counter()
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
                "steps": "eager" if eager else "captured",
                "same_tokens": sum(a == b for a, b in zip(tokens, expected, strict=True)),
                "start_s": started - began,
                "generate_s": time.perf_counter() - started,
                "graphs": 0 if graphs is None else graphs.num_captured,
                "graphs_mib": 0.0 if graphs is None else graphs.captured_bytes / MIB,
            }


def part_profile(bench: Bench) -> Iterator[Row]:
    """Kernels of a decoding step, the longest first, by torch's profiler."""
    batch, steps = bench.plan.batches[-2], 8
    on_device = bench.device == "cuda"
    activities = [getattr(torch.profiler.ProfilerActivity, "CUDA" if on_device else "CPU")]
    for regime in ("virtual", "paged"):
        with decoders(bench, batch, steps + 4, kv_regime=regime) as engine:
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(steps):
                    step(engine)
                if on_device:
                    torch.cuda.synchronize()
            name = "self_device_time_total" if on_device else "self_cpu_time_total"
            found = sorted(profile.key_averages(), key=lambda e: -getattr(e, name))
        total = sum(getattr(event, name) for event in found)
        for event in found[:15]:
            yield {
                "regime": regime,
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
        middle = decoding(bench, batch, bench.plan.steps // 2, context=context, **options).median
        yield {
            "batch": batch,
            "slot_tokens": longest,
            "context": context,
            "regime": regime,
            "step_ms": 1e3 * middle,
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
        middle = decoding(bench, batch, bench.plan.steps // 2, sampling=sampling).median
        yield {"batch": batch, "sampling": name, "step_ms": 1e3 * middle}


def part_auto(bench: Bench) -> Iterator[Row]:
    """What --kv-regime auto is told by its calibration, and how long that takes."""
    began = time.perf_counter()
    with bench.engine(kv_regime="auto") as engine:
        seconds = time.perf_counter() - began
        profile = engine.profile
    assert profile is not None, "auto has one"
    for regime, costs in (("virtual", profile.virtual), ("paged", profile.paged)):
        yield {
            "regime": regime,
            "call_us": 1e6 * costs.call,
            "sequence_us": 1e6 * costs.sequence,
            "read_ns": 1e9 * costs.read,
            "pair_ps": 1e12 * costs.pair,
            "map_page_us": 1e6 * profile.map_page,
            "start_s": seconds,
        }


def part_decode(bench: Bench) -> Iterator[Row]:
    """Decode tokens/s by batch, regime and whether steps are captured."""
    for batch, regime, eager in itertools.product(
        bench.plan.batches, ("virtual", "paged"), (False, True)
    ):
        middle = decoding(
            bench, batch, bench.plan.steps, kv_regime=regime, enforce_eager=eager
        ).median
        yield {
            "batch": batch,
            "regime": regime,
            "steps": "eager" if eager else "captured",
            "step_ms": 1e3 * middle,
            "tokens_per_s": batch / middle,
        }


def part_ttft(bench: Bench) -> Iterator[Row]:
    """From a request's arrival to its first token, alone, by prompt length."""
    for regime in ("virtual", "paged"):
        with bench.engine(kv_regime=regime) as engine:
            for length in bench.plan.prompts:
                samples = []
                for attempt in range(3):  # the first one loads what is loaded at first use
                    add(engine, f"{length}-{attempt}", length, 1, attempt)
                    samples.append(drain(engine))
                yield {"regime": regime, "prompt": length, "ttft_ms": 1e3 * min(samples[1:])}


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
            for index, (num_prompt, num_output) in enumerate(lengths):
                add(engine, str(index), num_prompt, num_output, index)
            seconds = drain(engine)
            stats = engine.stats()
        yield {
            "regime": regime,
            "makespan_s": seconds,
            "output_tokens_per_s": sum(out for _, out in lengths) / seconds,
            "preemptions": stats["num_preemptions_total"],
            "map_calls": stats["map_calls_total"],
            "unhidden_calls": stats["unhidden_calls_total"],
        }


def part_idle(bench: Bench) -> Iterator[Row]:
    """Memory before, while and after requests run: what an idle engine gives back."""
    with bench.engine() as engine:

        def row(when: str) -> Row:
            stats = engine.memory.stats()
            return {
                "when": when,
                "pool_mib": stats.committed_pages * stats.page_bytes / MIB,
                "limit_mib": stats.limit_pages * stats.page_bytes / MIB,
                "device_free_mib": bench.free_bytes() / MIB,
            }

        yield row("at start")
        num = max(bench.plan.batches)
        for index in range(num):
            add(engine, str(index), bench.plan.context, 8, index)
        run_until_decoding(engine, num)
        yield row("serving")
        drain(engine)
        step(engine)  # finds nothing to do
        yield row("idle")


def part_mapping(bench: Bench) -> Iterator[Row]:
    """Latency of steps that map pages themselves, against a mapper that maps ahead."""
    batch = bench.plan.batches[-2]
    for mapper in ("off", "auto"):
        steps = 4 * bench.plan.steps
        times = sorted(decoding(bench, batch, steps, kv_regime="virtual", kv_mapper=mapper).seconds)
        yield {
            "mapping": "synchronous" if mapper == "off" else "overlapped",
            "batch": batch,
            "median_ms": 1e3 * statistics.median(times),
            "p99_ms": 1e3 * percentile(times, 99),
            "max_ms": 1e3 * times[-1],
        }


def part_layout(bench: Bench) -> Iterator[Row]:
    """What interleaving layers and the size of pages cost a decoding step."""
    batch = bench.plan.batches[-2]
    for groups, mib, regime in itertools.product(
        bench.plan.groups, bench.plan.page_mib, ("virtual", "paged")
    ):
        options: dict[str, Any] = {
            "kv_regime": regime,
            "kv_layers_per_group": groups,
            "kv_page_size": int(mib * MIB),
        }
        row: Row = {"layers_per_group": groups, "page_mib": mib, "regime": regime}
        try:
            middle = decoding(bench, batch, bench.plan.steps // 2, **options).median
        except (ConfigurationError, OutOfMemoryError) as error:
            yield row | {"step_ms": None, "refused": str(error)}
        else:
            yield row | {"step_ms": 1e3 * middle, "refused": ""}


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
            "overlapped": measured.num_overlapped,
            "steps": bench.plan.steps,
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
            for index in range(batch):
                add(engine, str(index), bench.plan.context, 4 * bench.plan.steps, index)
            seconds = drain(engine)
            stats = engine.stats()
        yield {
            "copies": copies,
            "regime": regime,
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
    parser.add_argument("--seconds", type=float, default=420.0, help="no part begins after these")
    parser.add_argument("--resume", action="store_true", help="leave out what had begun in --out")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    shape, dtype, device = options.shape, options.dtype, "cuda"
    if options.dry_run:
        shape, dtype, device = "tiny", "float32", "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    described = {
        "shape": shape,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": machine_info(),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, dtype)
        plan = TINY if options.dry_run else FULL
        bench = Bench(Path(folder), device, dtype, plan, options.seconds)
        return run(names, bench, Report(options.out, described, resume=options.resume))


if __name__ == "__main__":
    raise SystemExit(main())
