"""vmserve beside llama.cpp, OpenVINO, vLLM and transformers on one processor and one model.

python benchmarks/peers/run.py            (everything; see README.md)
python benchmarks/peers/run.py --smoke    (the small model, tiny workloads)
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from environments import Environment, NotInstalledError, ensure, ensure_server
from launch import inherited, run_engine, run_script, variables
from model_shape import PAD_ID, describe
from models import (
    MODELS,
    Model,
    ensure_files,
    ensure_model,
    ensure_model_of,
    ensure_reference,
    size_of,
)
from report import markdown, one_line
from serving import SERVERS, run_server
from subjects import DEFAULT_PEERS, WEIGHTS, Subject, is_continuous, subjects_of
from summary import collect, compare, medians, offline_rows, static_batch_use
from traffic import (
    DEFAULT_SIZES,
    FULL,
    RATES,
    SMOKE,
    WORKLOADS,
    kv_bytes,
    kv_gib,
    longest,
    make_workloads,
    warmup_requests,
)
from traffic import describe as describe_workloads
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.measure import MemorySamples
from vmserve_bench.lab.rounds import orders

Json = dict[str, Any]

HERE = Path(__file__).resolve().parent
SCHEMA = "vmserve-bench-peers"
#: Raised when a reader of older files would misread newer ones.
SCHEMA_VERSION = 1
CACHE_VARIABLE = "VMSERVE_PEERS_CACHE"
BF16_EXTENSIONS = ("avx512_bf16", "amx_bf16")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, fromfile_prefix_chars="@"
    )
    parser.add_argument("--smoke", action="store_true", help="model 8m, tiny workloads, 1 repeat")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="default: 8m 125m, without a --model-file"
    )
    parser.add_argument(
        "--model-file", type=Path, action="append", dest="model_files", metavar="FILE.gguf",
        default=[], help="a Llama's GGUF file, beside --models; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--peers", nargs="*", default=list(DEFAULT_PEERS), metavar="PEER",
        help=f"ENGINE[:WEIGHTS][:OPTION=VALUE,...]; default: {' '.join(DEFAULT_PEERS)}; known: "
        + "; ".join(f"{name} ({', '.join(each)})" for name, each in WEIGHTS.items()),
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", dest="variants", metavar="NAME[:OPTION=VALUE,...]",
        help="vmserve with these engine options, under that name; repeatable; default: default",
    )  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, help="default 3")
    parser.add_argument("--threads", type=int, default=2, help="of every engine; default 2")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences at once")
    parser.add_argument("--rate", type=float, help="of served, requests/s; default: by the model")
    parser.add_argument("--requests", type=int, help="of offline; default: by the model")
    for each, told in (("in", "input"), ("out", "output")):
        parser.add_argument(f"--mean-{each}", type=float, help=f"mean {told} tokens of offline")
    parser.add_argument("--sigma", type=float, default=0.8, help="log-normal spread of offline's")
    parser.add_argument("--served-requests", type=int, help="default: by the model")
    parser.add_argument("--check-requests", type=int, help="of offline, at most; default 8")
    parser.add_argument("--seed", type=int, default=0, help="of weights, lengths and prompts")
    parser.add_argument("--time-limit", type=float, default=1800, help="seconds per process")
    parser.add_argument(
        "--cache-dir", type=Path, help=f"for environments and models; default: ${CACHE_VARIABLE}, "
        "or in the temporary directory",
        default=os.environ.get(CACHE_VARIABLE, Path(tempfile.gettempdir()) / "vmserve-peers"),
    )  # fmt: skip
    parser.add_argument("--install-only", action="store_true", help="install and convert, no more")
    parser.add_argument("--output-dir", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    options.cache_dir = Path(options.cache_dir).resolve()
    if not (options.models or options.model_files):
        options.models = ["8m"] if options.smoke else ["8m", "125m"]
    options.repeats = options.repeats or (1 if options.smoke else 3)
    options.check_requests = 8 if options.check_requests is None else options.check_requests
    try:
        options.subjects = subjects_of(options.variants or ["default"], options.peers)
    except ValueError as error:
        parser.error(str(error))
    counts = (options.repeats, options.threads, options.max_num_seqs)
    counts += (options.requests or 1, options.served_requests or 1)
    if min(counts) < 1:
        parser.error("counts of repeats, threads, sequences and requests must be at least 1")
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """State of one invocation: models, subjects, workloads and results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.machine = machine_info()
        self.has_bf16 = any(each in self.machine["cpu_extensions"] for each in BF16_EXTENSIONS)
        self.absent: list[Json] = []
        #: By engine and instruction set.
        self.environments: dict[tuple[str, str], Environment] = {}
        #: Those whose server is there too.
        self.servers: set[tuple[str, str]] = set()
        self.files: dict[tuple[str, str], dict[str, str]] = {}
        #: Like ``files``, checkpoints with the weights that an engine has, for the token check.
        self.references: dict[tuple[str, str], Path] = {}
        self.models: list[Model] = []
        self.workloads: dict[str, dict[str, list[Json]]] = {}
        #: By model, the served requests of each repeat.
        self.served: dict[str, list[list[Json]]] = {}
        self.runs: list[Json] = []

    def prepare(self) -> None:
        """Install, write and convert what is needed; note engines that cannot take part."""
        options = self.options
        log = options.cache_dir / "logs" / "checkpoint.log"
        self.models += [
            ensure_model_of(each.resolve(), options.cache_dir, say) for each in options.model_files
        ]
        self.models += [
            ensure_model(name, options.seed, options.cache_dir, log)
            for name in options.models or ()
        ]
        for model in self.models:
            asked = [self._requests(model, repeat) for repeat in range(options.repeats)]
            self.workloads[model.name] = asked[0]
            self.served[model.name] = [each.get("served", []) for each in asked]
        for engine, isa in dict.fromkeys((each.engine, each.isa) for each in options.subjects):
            self._install(engine, isa)
        for subject in options.subjects:
            for model in self.models:
                self._convert(subject, model)

    def _requests(self, model: Model, repeat: int) -> dict[str, list[Json]]:
        options = self.options
        sizes = SMOKE if options.smoke else FULL.get(model.name, FULL[DEFAULT_SIZES])
        return make_workloads(
            options.workloads,
            replace(
                sizes,
                num_requests=options.requests or sizes.num_requests,
                mean_in=options.mean_in or sizes.mean_in,
                mean_out=options.mean_out or sizes.mean_out,
                sigma=options.sigma,
                num_served=options.served_requests or sizes.num_served,
            ),
            model.shape.vocab_size,
            options.seed,
            options.rate or RATES.get(model.name, RATES[DEFAULT_SIZES]),
            repeat,
        )

    def _install(self, engine: str, isa: str) -> None:
        cache_dir, name = self.options.cache_dir, f"{engine} {isa}".rstrip()
        try:
            self.environments[engine, isa] = ensure(engine, cache_dir, say, isa)
        except NotInstalledError as error:
            say(f"{name} is not installed: {error}")
            self.absent.append({"name": name, "reason": str(error)})
            return
        if engine not in SERVERS or "served" not in self.options.workloads:
            return
        try:
            found = ensure_server(engine, self.environments[engine, isa], cache_dir, say, isa)
            self.environments[engine, isa] = found
            self.servers.add((engine, isa))
        except NotInstalledError as error:
            say(f"{name} has no server: {error}")
            self.absent.append({"name": f"{name}, server", "reason": str(error)})

    def _convert(self, subject: Subject, model: Model) -> None:
        if (subject.engine, subject.isa) not in self.environments:
            return
        try:
            found = ensure_files(model, subject, self.options.cache_dir, say)
            if self.options.check_requests:
                reference = ensure_reference(model, subject, found, self.options.cache_dir, say)
                self.references[subject.name, model.name] = reference
            self.files[subject.name, model.name] = found
        except NotInstalledError as error:
            say(f"{subject.name} has no model {model.name}: {error}")
            self.absent.append({"name": f"{subject.name}, {model.name}", "reason": str(error)})

    def units(self, model: Model) -> list[tuple[Subject, bool]]:
        """Processes to run: engines, and (True) their servers."""
        asked = self.workloads[model.name]
        present = [each for each in self.options.subjects if (each.name, model.name) in self.files]
        found = [(each, False) for each in present if self._in_process(each, asked)]
        if "served" in asked:
            found += [(each, True) for each in present if (each.engine, each.isa) in self.servers]
        return found

    def _in_process(self, subject: Subject, asked: Json) -> Json:
        """Workloads that the engine's worker runs."""
        is_played = subject.engine == "openvino" or is_continuous(subject)
        return {name: requests for name, requests in asked.items() if name != "served" or is_played}

    def measure(self) -> None:
        """Run every engine once per repeat, in a random order, then in its reverse."""
        rng = np.random.default_rng(self.options.seed)
        for model in self.models:
            units = self.units(model)
            repeats = range(self.options.repeats)
            for repeat, order in zip(repeats, orders(len(units), rng), strict=False):
                for index in order:
                    self._run(model, *units[index], repeat)

    def _run(self, model: Model, subject: Subject, is_server: bool, repeat: int) -> None:
        asked = dict(self.workloads[model.name])
        if "served" in asked:
            asked["served"] = self.served[model.name][repeat]
        environment = self.environments[subject.engine, subject.isa]
        added = variables(
            subject,
            environment,
            self.options.threads,
            self.options.cache_dir,
            kv_gib(asked, model.shape),
        )
        job = self._job(model, subject)
        if is_server and (repeat > 0 or model.file is not None):
            # Asked outside of the load: once is enough. Only made-up words can be read back.
            job["num_checked"] = 0
        limit = self.options.time_limit
        if is_server:
            run = run_server(subject, environment, job, added, asked["served"], limit)
        else:
            job["workloads"] = self._in_process(subject, asked)
            run = run_engine(environment.python, job, subject, added, limit)
        run |= {"model": model.name, "subject": subject.name, "repeat": repeat}
        run |= {"is_server": is_server, "file_bytes": self._file_bytes(model, subject)}
        run |= {"kv_bytes": {name: kv_bytes(each, model.shape) for name, each in asked.items()}}
        self.runs.append(run)
        outcome = one_line(run["error"]) if "error" in run else "done"
        what = f"{subject.name}{', server' if is_server else ''}"
        say(f"{model.name}, repeat {repeat + 1}, {what}: {outcome}")

    def _job(self, model: Model, subject: Subject) -> Json:
        asked = self.workloads[model.name]
        most = max(longest(requests) for requests in asked.values())
        files = self.files[subject.name, model.name]
        is_file = subject.engine == "vmserve" and subject.reads_gguf
        return {
            "model": files["gguf"] if is_file else str(model.directory),
            "files": files,
            "weights": subject.weights,
            "isa": subject.isa,
            "options": dict(subject.options),
            "num_threads": self.options.threads,
            "max_num_seqs": self.options.max_num_seqs,
            "max_model_len": -(-most // 256) * 256,
            "vocab_size": model.shape.vocab_size,
            "pad_id": PAD_ID,
            "has_bf16": self.has_bf16,
            "num_checked": self.options.check_requests,
            "warmup": warmup_requests(model.shape.vocab_size, self.options.seed),
        }

    def _file_bytes(self, model: Model, subject: Subject) -> int:
        """Size of what the engine reads its weights from."""
        paths = self.files[subject.name, model.name].values()
        return sum(size_of(Path(each)) for each in paths or [str(model.directory)])

    def check(self) -> Json:
        """Compare tokens, by model and engine, with those of single requests in float32."""
        found: Json = {}
        for model in self.models:
            for workload in ("offline", "streams", "served"):
                told = "" if workload == "offline" else f", {workload}"
                candidates = self._candidates(model, workload)
                by_reference: dict[Path, dict[str, list[list[int]]]] = {}
                for name, answers in candidates.items():
                    directory = self.references[name, model.name]
                    by_reference.setdefault(directory, {})[name] = answers
                for directory, answered in by_reference.items():
                    reports = self._check(model, directory, workload, answered)
                    for name, each in reports.items():
                        found.setdefault(model.name, {})[name + told] = summarize_check(each)
        return found

    def _check(
        self,
        model: Model,
        directory: Path,
        workload: str,
        answered: Mapping[str, list[list[int]]],
    ) -> Json:
        """Report, by engine, on each request that all engines answered."""
        asked = self.workloads[model.name].get(workload, [])
        requests, candidates = comparable(asked, answered)
        if not requests:
            return {}
        say(f"{directory.name}: checking the tokens of {len(requests)} requests, {workload}")
        job = {
            "model": str(directory),
            "dtype": "float32",
            "num_threads": self.options.threads,
            "pad_id": PAD_ID,
            "requests": requests,
            "candidates": candidates,
        }
        added = {**inherited(), "OMP_NUM_THREADS": str(self.options.threads)}
        python, limit = Path(sys.executable), self.options.time_limit
        result = run_script("reference.py", python, job, added, limit, MemorySamples())
        if "error" in result:
            what = f"token check, {model.name}, {workload}"
            self.absent.append({"name": what, "reason": result["error"]})
            return {}
        reports: Json = result["candidates"]
        return reports

    def _candidates(self, model: Model, workload: str) -> dict[str, list[list[int]]]:
        """Tokens of the first repeat, by engine."""
        found: dict[str, list[list[int]]] = {}
        for run in self.runs:
            answers = run["workloads"].get(workload, {}).get("token_ids")
            if run["model"] == model.name and answers:
                found.setdefault(run["subject"], answers)
        return found

    def _described(self, model: Model) -> Json:
        if model.file is None:
            return describe(model.shape, self.options.seed)
        return {**asdict(model.shape), "file": model.file.name, "weights": model.file_weights}

    def results(self, checks: Json) -> Json:
        names = [each.name for each in self.options.subjects]
        values = collect(self.runs, self.workloads, names)
        values = {each.name: values[each.name] for each in self.models if each.name in values}
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "smoke": self.options.smoke,
            "machine": self.machine,
            "num_threads": self.options.threads,
            "num_repeats": self.options.repeats,
            "max_num_seqs": self.options.max_num_seqs,
            "subjects": [
                {**asdict(each), "name": each.name, "width": each.width}
                for each in self.options.subjects
            ],
            "models": {each.name: self._described(each) for each in self.models},
            "offline": {
                model: {
                    "rows": offline_rows(self.runs, self.workloads[model]["offline"], model),
                    "static_batch_use": static_batch_use(
                        [one["num_output_tokens"] for one in self.workloads[model]["offline"]]
                    ),
                }
                for model in values
                if "offline" in self.workloads[model]
            },
            "workloads": {name: describe_workloads(each) for name, each in self.workloads.items()},
            "values": values,
            "medians": {model: medians(each) for model, each in values.items()},
            "comparisons": {
                model: compare(each, self.options.subjects) for model, each in values.items()
            },
            "checks": checks,
            "absent": [each | {"reason": one_line(each["reason"])} for each in self.absent],
            "runs": [stored(run) for run in self.runs],
        }


def comparable(
    requests: list[Json], candidates: Mapping[str, list[list[int]]]
) -> tuple[list[Json], dict[str, list[list[int]]]]:
    """The requests that everybody answered in full, and the answers. Text from a server lacks
    special tokens, which random weights make now and then: such an answer is not compared.
    """
    count = min((len(answers) for answers in candidates.values()), default=0)
    wanted = [each["num_output_tokens"] for each in requests[:count]]
    kept = [
        place
        for place in range(count)
        if all(len(answers[place]) == wanted[place] for answers in candidates.values())
    ]
    found = {name: [answers[each] for each in kept] for name, answers in candidates.items()}
    return [requests[place] for place in kept], found


def summarize_check(reports: list[Json]) -> Json:
    """Number of requests with the reference's tokens, and the widest margin of a difference."""
    different = [each for each in reports if each["position"] is not None]
    return {
        "num_requests": len(reports),
        "num_identical": len(reports) - len(different),
        "max_margin": max((each["margin"] for each in different), default=None),
        "divergences": different,
    }


def stored(run: Json) -> Json:
    """Drop tokens and their times from a run."""
    kept = dict(run)
    kept["workloads"] = {
        name: {key: each[key] for key in each if key not in ("token_ids", "times_s", "due_s")}
        for name, each in run["workloads"].items()
    }
    return kept | {"error": one_line(run["error"])} if "error" in run else kept


def write_results(directory: Path, results: Json) -> Path:
    """``<date>-<cpu>.json``, ``.md`` and ``.svg``; an earlier result is never overwritten."""
    directory.mkdir(parents=True, exist_ok=True)
    cpu = re.sub(r"[^a-z0-9]+", "-", results["machine"]["cpu"].lower()).strip("-")
    stem = f"{results['date']}-{cpu}" + ("-smoke" if results["smoke"] else "")
    path, number = directory / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    bench = Bench(options)
    bench.prepare()
    if options.install_only:
        return 1 if bench.absent else 0
    bench.measure()
    results = bench.results(bench.check() if options.check_requests else {})
    path = write_results(options.output_dir, results)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    if importlib.util.find_spec("matplotlib") is None:
        say("no picture: matplotlib is not installed (pip install 'vmserve[bench]')")
    elif results["values"]:
        importlib.import_module("plot").draw(results, path.with_suffix(".svg"))
    say(f"written: {path}")
    return 1 if bench.absent or any("error" in run for run in bench.runs) else 0


if __name__ == "__main__":
    sys.exit(main())
