"""``vmserve bench compare``: planted differences are found, what cannot be compared is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import bench as commands
from vmserve_bench import startup
from vmserve_bench.ab import results as ab_results
from vmserve_bench.ab.metrics import METRICS
from vmserve_bench.compare_cases import SCHEMAS, read, read_cases
from vmserve_bench.serve import results as serve_results

RESULTS = Path(__file__).parents[2] / "benchmarks"
MACHINE = {"cpu": "a", "num_usable_cores": 2, "packages": {"vmserve": "1"}}
DESCRIBED = {"num_requests": 3, "decoding": ["greedy"], "load": "all at once"}
WORKLOAD = {"name": "chat", "described": DESCRIBED, "load": {"is_open": False, "concurrency": None}}


def results(command: str, **more: Any) -> dict[str, Any]:
    schema = f"vmserve-bench-{command}"
    return {"schema": schema, "schema_version": 1, "machine": MACHINE, **more}


def served(num_rounds: int = 8, **scaled: float) -> list[dict[str, Any]]:
    """Rounds in which every metric is 1 and a little, times what ``scaled`` says."""
    rounds = []
    for seed in range(num_rounds):
        metrics: dict[str, float | None]
        metrics = {name: (1 + seed / 100) * scaled.get(name, 1.0) for name in METRICS}
        metrics["cpu_s"] = None
        ttft = [round((10_000 + 100 * one) * scaled.get("ttft_us", 1.0)) for one in range(12)]
        requests = [
            {"index": index, "input_tokens": 10, "output_tokens": 5, "sequences": 1,
             "ttft_us": ttft_us, "e2e_us": ttft_us + 40_000}
            for index, ttft_us in enumerate(ttft)
        ]  # fmt: skip
        run = {"requests": requests}
        rounds.append({"seed": seed, "metrics": metrics, "run": run, "failures": []})
    return rounds


def serve_file(num_rounds: int = 8, **scaled: float) -> dict[str, Any]:
    more = {"server": {"model": "m"}, "options": {"rate": None}, "workload": WORKLOAD}
    return results("serve", rounds=served(num_rounds, **scaled), **more)


def ab_file(**scaled: float) -> dict[str, Any]:
    names = ("virtual", "paged")
    rounds = [
        {
            "seed": one["seed"],
            "metrics": dict.fromkeys(names, one["metrics"]),
            "runs": dict.fromkeys(names, one["run"]),
        }
        for one in served(**scaled)
    ]
    variants = [{"name": name} for name in names]
    return results("ab", variants=variants, workloads=[{**WORKLOAD, "rounds": rounds}])


def startup_file(factor: float, repeats: int = 7, **more: Any) -> dict[str, Any]:
    seconds = [factor * (2 + 0.01 * one) for one in range(repeats)]
    phases = {"first_token": {"title": "first token", "seconds": seconds}}
    return results("startup", options={}, phases=phases) | more


def kernels_file(factor: float, repeats: int = 8) -> dict[str, Any]:
    samples = {
        way: [scale * (1e6 + 1e3 * one) for one in range(repeats)]
        for way, scale in (("contiguous", 1.0), ("paged", factor))
    }
    point = {"shape": "125M", "dtype": "float32", "num_seqs": 4, "context": 1024, "num_new": 1,
             "num_layers": 10, "samples_ns": samples}  # fmt: skip
    return results("kernels", sections={"decode": {"points": [point]}}, quick=False)


def step_file(overhead_ns: float, num_seqs: int = 64) -> dict[str, Any]:
    row = {"regime": "paged", "num_seqs": num_seqs, "parts_ns": {"step": {"median": 4e6}},
           "overhead_ns": {"median": overhead_ns, "p95": 2e6}}  # fmt: skip
    return results("step", sections={"step": {"rows": [row]}})


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., str]:
    """Of contents of files, options, and the exit status: what the command says."""

    def run(*files: Any, options: str = "", status: int | None = 0) -> str:
        words: list[str | Path] = ["compare"]
        for index, content in enumerate(files):
            words.append(tmp_path / f"{'abc'[index]}.json")
            words[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        words += ["--json", tmp_path / "out" / "c.json", *options.split()]
        return commands.refusal(*words) if status is None else commands.bench(*words, status=status)

    return run


def found(directory: Path) -> dict[str, dict[str, Any]]:
    (other,) = json.loads((directory / "out" / "c.json").read_text())["others"]
    (case,) = other["cases"]
    return {one["metric"]: one for one in case["comparisons"]}


def test_a_planted_difference_is_found_and_fails_a_check(compare: Any, tmp_path: Path) -> None:
    files = [serve_file(), serve_file(output_tokens_per_s=0.8, e2e_p95_s=1.2)]
    output = compare(*files, options="--fail-above 15", status=1)
    assert "worse by more than 15 %: chat: output tokens/s 0.800 [0.800, 0.800]" in output
    assert "worse by more than 15 %: chat: end to end p95 1.200 [1.200, 1.200]" in output
    one = found(tmp_path)["output_tokens_per_s"]
    assert one["ratio"] == pytest.approx(0.8)
    assert (one["verdict"], one["num_pairs"]) == ("lower", 8)
    assert found(tmp_path)["ttft_p50_s"]["verdict"] == "no difference shown"
    compare(*files, options="--fail-above 25")
    compare(*files[::-1], options="--fail-above 15")  # better is no failure
    compare(*files)


def test_an_interval_that_includes_less_is_no_failure(compare: Any) -> None:
    noisy = serve_file()
    for index, one in enumerate(noisy["rounds"]):
        one["metrics"]["e2e_p95_s"] *= 3.0 if index % 2 else 0.6
    compare(serve_file(), noisy, options="--fail-above 10")


def test_few_rounds_are_compared_request_by_request(compare: Any, tmp_path: Path) -> None:
    files = serve_file(1), serve_file(1, ttft_us=2.0)
    output = compare(*files, options="--fail-above 50", status=1)
    effects = found(tmp_path)
    assert set(effects) == {"ttft", "tpot", "e2e"}
    assert effects["ttft"]["ratio"] == pytest.approx(2.0)
    assert (effects["tpot"]["ratio"], effects["tpot"]["num_pairs"]) == (pytest.approx(1.0), 12)
    assert "TTFT of a request" in output
    assert "too narrow" in output


def test_variants_are_matched_by_name(compare: Any) -> None:
    files = ab_file(), ab_file(output_tokens_per_s=0.5)
    output = compare(*files, options="--fail-above 5", status=1)
    assert "chat, virtual: output tokens/s 0.500" in output
    assert "chat, paged: output tokens/s 0.500" in output


def test_startups_of_either_version(compare: Any) -> None:
    newer = startup_file(1.5, schema_version=2, memory_bytes={}, sizes_bytes={})
    files = startup_file(1.0), newer, startup_file(1.0)
    output = compare(*files, options="--fail-above 9", status=1)
    assert "1.500" in output
    assert output.count("worse by more than") == 1


def test_what_differs_besides_is_said(compare: Any) -> None:
    other = serve_file()
    other["machine"] = {**MACHINE, "cpu": "b", "packages": {"vmserve": "2"}}
    other["options"] = {"rate": 3}
    other["rounds"][0]["failures"] = [{"index": 0}]
    other["workload"] = {**WORKLOAD, "described": {**DESCRIBED, "num_requests": 4}}
    output = compare(serve_file(), other)
    for line in (
        "cpu: a and b",
        "vmserve: 1 and 2",
        "options, rate: None and 3",
        "failed requests, which no latency has: 0 and 1",
        "workload chat: other lengths",
    ):
        assert line in output
    assert "differ in more" not in compare(serve_file(), serve_file())


OVERLOAD = {"benchmark": "overload", "machine": MACHINE}
OTHER_NAME = serve_file() | {"workload": {**WORKLOAD, "name": "alpaca"}}
OTHER_KIND = serve_file() | {"workload": {**WORKLOAD, "load": {"is_open": True}}}
OTHER_SEED = serve_file(1)
OTHER_SEED["rounds"][0]["seed"] = 99
PAPERS = results("papers", figures={"13": {"cases": {}}})


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (serve_file(), ab_file(), "different commands"),
        (PAPERS, {**PAPERS, "schema": "vmserve-bench-papers-simulated"}, "different commands"),
        (serve_file(), "{", "no JSON"),
        (serve_file(), OVERLOAD, "no results file that can be compared (it is of overload): give"),
        (serve_file(), OVERLOAD, "bench ab, bench serve, bench startup, bench step, bench kernels"),
        (serve_file(), {"schema": "vmserve-bench-peers"}, "no results file"),
        (serve_file(), {"benchmark": "step"}, "no results file"),
        (serve_file(), [1], "no results file"),
        (serve_file(), {"schema": [1]}, "no results file"),
        (serve_file(), {**serve_file(), "schema_version": 2}, "version 2 of its schema"),
        (serve_file(), OTHER_NAME, "no workload and variant, or section, is in both"),
        (step_file(1e6), step_file(1e6, 128), "no workload and variant, or section, is in both"),
        (serve_file(), OTHER_KIND, "different kinds"),
        (serve_file(1), OTHER_SEED, "no headline metric has an interval"),
        (startup_file(1.0, 3), startup_file(2.0, 3), "no headline metric has an interval"),
        (step_file(1e6), step_file(2e6), "no headline metric has an interval"),
    ],
)
def test_what_is_refused(compare: Any, one: Any, other: Any, told: str) -> None:
    assert told in compare(one, other, options="--fail-above 5", status=None)


def test_rows_with_repeats_have_intervals_and_verdicts(compare: Any, tmp_path: Path) -> None:
    output = compare(kernels_file(1.0), kernels_file(1.5), options="--fail-above 20", status=1)
    line = "worse by more than 20 %: kernels, decode: 125M float32, 4 x 1,024 + 1: paged 1.500 "
    assert line in output
    assert output.count("worse by more than") == 1
    paged = found(tmp_path)["125M float32, 4 x 1,024 + 1|paged"]
    assert paged["ratio"] == pytest.approx(1.5)
    assert (paged["verdict"], paged["num_pairs"]) == ("higher", 8)
    compare(kernels_file(1.0), kernels_file(1.0), options="--fail-above 20")
    # As many repeats as both have.
    compare(kernels_file(1.0), kernels_file(1.5, 7), options="--fail-above 20", status=1)


def test_rows_with_one_value_have_a_ratio_and_nothing_else(compare: Any) -> None:
    output = compare(step_file(1e6), step_file(1.25e6))
    [row] = [line for line in output.splitlines() if "64 sequences, paged: beside" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")[1:]]
    assert cells == ["1 ms", "1.25 ms", "1.250", ""]
    assert "Nothing could be paired" in compare(serve_file(1), OTHER_SEED)


def test_figures_of_one_file_only_are_told(compare: Any) -> None:
    both, one = (
        results("papers", figures={"13": {"cases": {c: {"at_once": [4.0, 5.0, 6.0]} for c in of}}})
        for of in ("ab", "a")
    )
    output = compare(both, {**one, "quick": True})
    assert "papers, 13: 1 figures are in one of the files only" in output
    assert "quick: None and True" in output
    assert "a: requests at once" in output
    assert "b: requests at once" not in output


ALLOC = "calls 135, steps 18, prefill 20, bandwidth 18, batch 9, waste 20, bookkeeping 9"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("step/results/2026-11-22-amd-epyc-3", "step 45"),
        ("kernels/results/2026-11-21-amd-epyc-2", "decode 184, blocks 24, prefill 36"),
        ("alloc/results/2026-11-21-amd-epyc", ALLOC),
        ("sharing/results/2026-11-21-amd-epyc", "blocks 60"),
        ("sharing/results/2026-11-21-amd-epyc-prefix", "prefix 16"),
        ("papers/results/2026-11-21-amd-epyc", "12 14, 13 14, 14 14, 19 18"),
    ],
)
def test_committed_files_are_read(path: str, expected: str) -> None:
    """Those that were written before files named their schema, too."""
    cases = read_cases(read(RESULTS / path / "results.json"))
    counts = [f"{case.name.partition(', ')[2]} {len(case.own)}" for case in cases]
    assert ", ".join(counts) == expected
    for case in cases:
        assert case.columns.keys() == case.own.keys()


def test_what_other_commands_write_now_is_read() -> None:
    for module in (ab_results, serve_results, startup):
        assert SCHEMAS[module.SCHEMA][1] == module.SCHEMA_VERSION
