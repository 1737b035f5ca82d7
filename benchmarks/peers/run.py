"""vmserve beside llama.cpp, OpenVINO, vLLM and transformers on one processor and one model.

python benchmarks/peers/run.py            (everything; see README.md)
python benchmarks/peers/run.py --smoke    (the small model, tiny workloads)
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import models
import numpy as np
import report
import subjects
import summary
import traffic
from environments import Environment, NotInstalledError, ensure, ensure_server
from launch import run_engine, run_script, variables
from memory import MemorySamples
from models import Model
from serving import SERVERS, run_server
from subjects import Subject

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import keep, results_directory
from vmserve_bench.lab.rounds import orders
from vmserve_bench.lab.server import inherited

Json = dict[str, Any]
#: Requests by workload.
Asked = dict[str, list[Json]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    add, known = parser.add_argument, {name: [*each] for name, each in subjects.WEIGHTS.items()}
    add("--smoke", action="store_true", help="model 8m, tiny workloads, 1 repeat")
    add("--models", nargs="+", choices=models.MODELS, default=[], help="default: 8m 125m")
    add("--model-file", type=Path, action="append", dest="model_files", metavar="FILE.gguf",
        default=[], help="a Llama's GGUF file, beside --models; repeatable")  # fmt: skip
    add("--peers", nargs="*", default=list(subjects.DEFAULT_PEERS), metavar="PEER",
        help=f"ENGINE[:WEIGHTS][:OPTION=VALUE,...]; default: all of 8 and 16 bit of {known}",
        )  # fmt: skip
    add("--variant", action="append", dest="variants", metavar="NAME[:OPTION=VALUE,...]",
        help="vmserve with these engine options, under that name; repeatable")  # fmt: skip
    add("--workloads", nargs="+", choices=traffic.WORKLOADS, default=list(traffic.WORKLOADS))
    add("--repeats", type=int, help="default: 3, of a smoke run 1")
    add("--threads", type=int, default=2, help="of every engine; default 2")
    add("--max-num-seqs", type=int, default=64, help="sequences at once")
    add("--rate", type=float, help="of served, requests/s; default: by the model")
    add("--requests", type=int, dest="num_requests", help="of offline; default: by the model")
    add("--mean-in", type=float, help="mean input tokens of offline")
    add("--mean-out", type=float, help="mean output tokens of offline")
    add("--sigma", type=float, help="log-normal spread of offline's; default 0.8")
    add("--served-requests", type=int, dest="num_served", help="default: by the model")
    add("--check-requests", type=int, default=8, help="of a workload, at most; default 8")
    add("--seed", type=int, default=0, help="of weights, lengths and prompts")
    add("--time-limit", type=float, default=1800, help="seconds per process")
    cache = os.environ.get("VMSERVE_PEERS_CACHE", Path(tempfile.gettempdir()) / "vmserve-peers")
    add("--cache-dir", type=Path, default=cache, help="default: $VMSERVE_PEERS_CACHE")
    add("--install-only", action="store_true", help="install and convert, no more")
    add("--output-dir", default="", help="default: results, beside this script")
    options = parser.parse_args()
    options.cache_dir = options.cache_dir.resolve()
    if not (options.models or options.model_files):
        options.models = ["8m"] if options.smoke else ["8m", "125m"]
    options.repeats = options.repeats or (1 if options.smoke else 3)
    try:
        options.subjects = subjects.subjects_of(options.variants or ["default"], options.peers)
    except ValueError as error:
        parser.error(str(error))
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def requests_of(options: argparse.Namespace, model: Model, repeat: int) -> Asked:
    sizes = traffic.SMOKE if options.smoke else traffic.FULL.get(model.name, traffic.MIDDLE)
    names = ("num_requests", "mean_in", "mean_out", "sigma", "num_served")
    given = {name: getattr(options, name) for name in names}
    sizes = replace(sizes, **{name: value for name, value in given.items() if value is not None})
    rate = options.rate or (0.1 if model.name == "1b" else 2.0)
    words = model.config["vocab_size"]
    return traffic.make_workloads(options.workloads, sizes, words, options.seed, rate, repeat)


class Unit(NamedTuple):
    """What runs in a process: an engine, or its server, with a model.

    ``reference``: the checkpoint whose tokens it should have.
    """

    model: Model
    subject: Subject
    environment: Environment
    files: Mapping[str, str]
    reference: Path
    is_server: bool


def prepare(options: argparse.Namespace, those: Sequence[Model], absent: list[Json]) -> list[Unit]:
    """Install and convert what is needed; who cannot take part is added to ``absent``."""
    cache, workloads = options.cache_dir, options.workloads
    environments: dict[tuple[str, str], Environment | None] = {}
    units = []
    for model, subject in itertools.product(those, options.subjects):
        key = engine, isa = subject.engine, subject.isa
        try:
            if key not in environments:
                environments[key] = None
                found = ensure(engine, cache, say, isa)
                if "served" in workloads:
                    found = ensure_server(engine, found, cache, say, isa)
                environments[key] = found
            environment = environments[key]
            if environment is None:
                continue
            files = models.ensure_files(model, subject, cache, say)
            reference = model.directory
            if options.check_requests:
                reference = models.ensure_reference(model, subject, files, cache, say)
        except NotInstalledError as error:
            name = f"{subject.name}, {model.name}" if environments[key] else " ".join(key).strip()
            say(f"{name} is not here: {error}")
            absent.append({"name": name, "reason": report.one_line(str(error))})
            continue
        if subject.is_played or set(workloads) != {"served"}:
            units.append(Unit(model, subject, environment, files, reference, is_server=False))
        if engine in SERVERS and "served" in workloads:
            units.append(Unit(model, subject, environment, files, reference, is_server=True))
    return units


def run_unit(
    options: argparse.Namespace, unit: Unit, asked: Asked, repeat: int, bf16: bool
) -> Json:
    model, subject, environment = unit.model, unit.subject, unit.environment
    is_file = subject.engine == "vmserve" and subject.reads_gguf
    longest = max(traffic.longest(requests) for requests in asked.values())
    job = {
        "model": unit.files["gguf"] if is_file else str(model.directory),
        "files": unit.files,
        "weights": subject.weights,
        "isa": subject.isa,
        "options": dict(subject.options),
        "num_threads": options.threads,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": -(-longest // 256) * 256,
        "pad_id": models.PAD_ID,
        "has_bf16": bf16,
        "num_checked": options.check_requests,
        "warmup": traffic.warmup_requests(model.config["vocab_size"], options.seed),
    }
    kv_gib = traffic.kv_gib(asked, model.config)
    added = variables(subject, environment, options.threads, options.cache_dir, kv_gib)
    if unit.is_server:
        # Asked outside of the load: once is enough. Only made-up words can be read back.
        job["num_checked"] *= repeat == 0 and model.file is None
        served, limit = asked["served"], options.time_limit
        run = run_server(subject, environment, job, added, served, limit)
    else:
        names = [name for name in asked if name != "served" or subject.is_played]
        job["workloads"] = {name: asked[name] for name in names}
        run = run_engine(environment.python, job, subject, added, options.time_limit)
    if "error" in run:
        run["error"] = report.one_line(run["error"])
    server = ", server" if unit.is_server else ""
    say(f"{model.name}, repeat {repeat + 1}, {subject.name}{server}: {run.get('error', 'done')}")
    read = list(unit.files.values()) or [str(model.directory)]
    return run | {
        "model": model.name,
        "subject": subject.name,
        "repeat": repeat,
        "is_server": unit.is_server,
        "file_bytes": sum(models.size_of(Path(each)) for each in read),
        "kv_bytes": {name: traffic.kv_bytes(each, model.config) for name, each in asked.items()},
    }


def check(
    options: argparse.Namespace,
    asked: Mapping[str, Asked],
    done: Sequence[tuple[Unit, Json]],
    absent: list[Json],
) -> Json:
    """Compare tokens with those of single requests in float32: ``[model][engine, workload]``."""
    #: By model and reference, then by workload.
    checks: dict[tuple[str, Path], Json] = {}
    for (unit, run), workload in itertools.product(done, ("offline", "streams", "served")):
        answers = run["workloads"].get(workload, {}).get("token_ids")
        if answers and run["repeat"] == 0:
            model, told = unit.model.name, "" if workload == "offline" else f", {workload}"
            empty = {"requests": asked[model][workload], "candidates": {}}
            found = checks.setdefault((model, unit.reference), {}).setdefault(workload, empty)
            found["candidates"][f"{unit.subject.name}{told}"] = answers
    results: Json = {model: {} for model in asked}
    for (model, directory), each in checks.items():
        say(f"{directory.name}: checking tokens")
        job = {"model": str(directory), "pad_id": models.PAD_ID, "checks": [*each.values()]}
        job |= {"num_threads": options.threads}
        added = {**inherited(), "OMP_NUM_THREADS": str(options.threads)}
        python, limit = Path(sys.executable), options.time_limit
        result = run_script("reference.py", python, job, added, limit, MemorySamples())
        if reason := result.pop("error", ""):
            absent.append({"name": f"token check, {model}", "reason": report.one_line(reason)})
        results[model] |= result
    return results


def main() -> int:
    options, machine = parse_arguments(), machine_info()
    cache, names, absent = options.cache_dir, [each.name for each in options.subjects], []
    those = [models.ensure_model_of(each.resolve(), cache, say) for each in options.model_files]
    those += [models.ensure_model(name, options.seed, cache) for name in options.models]
    units = prepare(options, those, absent)
    if options.install_only:
        return 1 if absent else 0
    rng, repeats = np.random.default_rng(options.seed), range(options.repeats)
    has_bf16 = not {"avx512_bf16", "amx_bf16"}.isdisjoint(machine["cpu_extensions"])
    asked = {
        each.name: [requests_of(options, each, repeat) for repeat in repeats] for each in those
    }
    done: list[tuple[Unit, Json]] = []
    for model in those:
        mine = [unit for unit in units if unit.model is model]
        for repeat, order in zip(repeats, orders(len(mine), rng), strict=False):
            for unit in (mine[index] for index in order):
                run = run_unit(options, unit, asked[model.name][repeat], repeat, has_bf16)
                done.append((unit, run))
    first = {name: each[0] for name, each in asked.items()}
    checks = check(options, first, done, absent)
    runs = [run for _, run in done]
    values = summary.collect(runs, first, names)
    for measured in (each for run in runs for each in run["workloads"].values()):
        for name in ("token_ids", "times_s", "due_s"):  # megabytes
            measured.pop(name, None)
    results = {
        "schema": "vmserve-bench-peers",
        "schema_version": 1,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "smoke": options.smoke,
        "machine": machine,
        "num_threads": options.threads,
        "num_repeats": options.repeats,
        "max_num_seqs": options.max_num_seqs,
        "seed": options.seed,
        "subjects": [
            {**asdict(each), "name": each.name, "width": each.width} for each in options.subjects
        ],
        "models": {
            each.name: {
                **each.config,
                "file": each.file and each.file.name,
                "weights": each.file_weights or "bf16",
            }
            for each in those
        },
        "workloads": {
            model: {name: traffic.describe(requests) for name, requests in each.items()}
            for model, each in first.items()
        },
        "values": values,
        "comparisons": {
            model: summary.compare(each, options.subjects) for model, each in values.items()
        },
        "checks": checks,
        "absent": absent,
        "runs": runs,
    }
    device = f"{machine['cpu']}{' smoke' * options.smoke}"
    directory = results_directory(__file__, device=device, root=options.output_dir)
    text = report.markdown(results)
    keep(directory, results, text)
    print(text)
    if values:
        report.draw(results, directory / "picture.svg")
    say(f"written: {directory}")
    return 1 if absent or any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
