"""Does `vmserve bench serve` measure what another client measures?

    python benchmarks/clients/run.py [--repeats 5] [--requests 60] [--output FILE] [--cache DIR]

The same trace of arrivals and lengths goes to the same server (paced_server.py, whose tokens leave
at known instants) from `vmserve bench serve` and from AIPerf, by turns. The server's own record
says what either should have seen. AIPerf is installed into a virtual environment below --cache
when it is not there yet (some hundreds of megabytes).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from vmserve.models import resolve_model

HERE = Path(__file__).parent
AIPERF = "0.13.0"
#: Mean seconds between two arrivals, which are a Poisson process.
MEAN_GAP = 0.15
#: What is compared: milliseconds, and tokens per second.
FIGURES = (
    "ttft_from_sending_mean",
    "ttft_mean",
    "ttft_p50",
    "tpot_mean",
    "tpot_p50",
    "e2e_mean",
    "tokens_per_s",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/vmserve-clients")
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    aiperf = installed(args.cache)
    with tempfile.TemporaryDirectory() as name:
        report = compare(args, aiperf, Path(name))
    text = json.dumps(report, indent=1)
    print(text)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")
    return 0


def installed(cache: Path) -> Path:
    """AIPerf's program, in an environment of its own."""
    place = cache / f"aiperf-{AIPERF}"
    program = place / "bin/aiperf"
    if not program.exists():
        venv.create(place, with_pip=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "-q", f"aiperf=={AIPERF}"]
        subprocess.run(pip, check=True)
    return program


def compare(args: argparse.Namespace, aiperf: Path, scratch: Path) -> dict[str, Any]:
    trace = scratch / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in arrivals(args.requests)))
    found: dict[str, list[dict[str, float]]] = {"vmserve": [], "aiperf": []}
    truths: dict[str, list[dict[str, float]]] = {"vmserve": [], "aiperf": []}
    for number in range(args.repeats):
        for client in found if number % 2 == 0 else reversed(found):
            place = scratch / f"{client}-{number}"
            place.mkdir()
            with paced_server(place / "record") as url:
                if client == "vmserve":
                    told = vmserve_figures(url, trace, args.requests, place)
                else:
                    told = aiperf_figures(url, trace, aiperf, place)
            found[client].append(told)
            truths[client].append(true_figures(place / "record", args.requests))
            print(f"{number + 1}: {client}: {told}; truth: {truths[client][-1]}", file=sys.stderr)
    medians = {client: median_of(each) for client, each in found.items()}
    above = {
        client: median_of(
            [
                {name: 100 * (told[name] / true[name] - 1) for name in FIGURES}
                for told, true in zip(found[client], truths[client], strict=True)
            ]
        )
        for client in found
    }
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {"vmserve": metadata.version("vmserve"), "aiperf": AIPERF},
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "work": {"requests": args.requests, "mean_gap_s": MEAN_GAP, "repeats": args.repeats},
        "medians": medians,
        "percent_above_server_record": above,
        # Of what each adds to the record of its own run, since no two runs are alike.
        "percentage_points_between": {
            name: round(above["vmserve"][name] - above["aiperf"][name], 2) for name in FIGURES
        },
        "repeats": {client: found[client] for client in found},
    }


def arrivals(num: int) -> Iterator[dict[str, int]]:
    """Rows as both clients read them (the format of the Mooncake traces)."""
    rng, at = random.Random(0), 0.0
    for number in range(num):
        length = 20 + 5 * (number % 7)
        yield {"timestamp": round(1000 * at), "input_length": 32, "output_length": length}
        at += rng.expovariate(1 / MEAN_GAP)


@contextlib.contextmanager
def paced_server(record: Path) -> Iterator[str]:
    command = [sys.executable, str(HERE / "paced_server.py"), "--record", str(record)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().removeprefix("ready: ").strip()
        finally:
            server.terminate()


def vmserve_figures(url: str, trace: Path, num: int, place: Path) -> dict[str, float]:
    told = place / "results.json"
    program = [sys.executable, "-c", "from vmserve.cli.main import main; main()", "bench", "serve"]
    options = ["--base-url", url, "--trace", str(trace), "--requests", str(num), "--rounds", "1"]
    run([*program, *options, "--json", str(told)], place)
    [only] = json.loads(told.read_text())["rounds"]
    metrics = only["metrics"]
    return {
        "ttft_from_sending_mean": 1000 * (metrics["ttft_mean_s"] - only["mean_send_delay_s"]),
        "ttft_mean": 1000 * metrics["ttft_mean_s"],
        "ttft_p50": 1000 * metrics["ttft_p50_s"],
        "tpot_mean": 1000 * metrics["tpot_mean_s"],
        "tpot_p50": 1000 * metrics["tpot_p50_s"],
        "e2e_mean": 1000 * metrics["e2e_mean_s"],
        "tokens_per_s": metrics["output_tokens_per_s"],
    }


def aiperf_figures(url: str, trace: Path, aiperf: Path, place: Path) -> dict[str, float]:
    command = [
        *(str(aiperf), "profile", "--model", "paced", "--url", url, "--streaming"),
        *("--endpoint-type", "completions", "--input-file", str(trace)),
        *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
        *("--fixed-schedule-auto-offset", "--use-server-token-count"),
        *("--tokenizer", str(resolve_model(None)), "--ui-type", "none"),
        *("--no-server-metrics", "--no-gpu-telemetry", "--output-artifact-dir", str(place)),
    ]
    run(command, place)
    told = json.loads((place / "profile_export_aiperf.json").read_text())
    return {
        "ttft_from_sending_mean": told["time_to_first_token"]["avg"],
        "ttft_mean": told["time_to_first_token"]["avg"],
        "ttft_p50": told["time_to_first_token"]["p50"],
        # What AIPerf calls inter-token latency is a request's mean, our TPOT.
        "tpot_mean": told["inter_token_latency"]["avg"],
        "tpot_p50": told["inter_token_latency"]["p50"],
        "e2e_mean": told["request_latency"]["avg"],
        "tokens_per_s": told["output_token_throughput"]["avg"],
    }


def true_figures(record: Path, num: int) -> dict[str, float]:
    """Of the last ``num`` requests: those before were to warm up."""
    answers = sorted(
        map(json.loads, record.read_text().splitlines()), key=lambda one: one["number"]
    )
    answers = answers[-num:]
    times = [answer["token_times_s"] for answer in answers]
    firsts = [each[0] for each in times]
    tpots = [(each[-1] - each[0]) / (len(each) - 1) for each in times]
    began = answers[0]["arrived_s"]
    ended = max(answer["arrived_s"] + answer["token_times_s"][-1] for answer in answers)
    return {
        "ttft_from_sending_mean": 1000 * statistics.mean(firsts),
        "ttft_mean": 1000 * statistics.mean(firsts),
        "ttft_p50": 1000 * statistics.median(firsts),
        "tpot_mean": 1000 * statistics.mean(tpots),
        "tpot_p50": 1000 * statistics.median(tpots),
        "e2e_mean": 1000 * statistics.mean(each[-1] for each in times),
        "tokens_per_s": sum(map(len, times)) / (ended - began),
    }


def run(command: list[str], place: Path) -> None:
    """Raises with what the program said, if it failed."""
    done = subprocess.run(
        command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-3000:]}")


def median_of(each: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in each), 3) for name in FIGURES}


if __name__ == "__main__":
    sys.exit(main())
