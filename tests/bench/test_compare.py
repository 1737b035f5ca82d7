"""``vmserve bench compare``: planted differences are found, what cannot be compared is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vmserve.errors import ConfigurationError
from vmserve_bench import startup
from vmserve_bench.ab import results as ab_results
from vmserve_bench.ab.metrics import METRICS
from vmserve_bench.command import app
from vmserve_bench.compare_cases import SCHEMAS, read, read_cases
from vmserve_bench.serve import results as serve_results

MACHINE = {"cpu": "a", "num_usable_cores": 2, "packages": {"vmserve": "1"}}
DESCRIBED = {"num_requests": 3, "decoding": ["greedy"], "load": "all at once"}
LOAD = {"is_open": False, "concurrency": None}


def served(num_rounds: int = 8, **scaled: float) -> list[dict[str, Any]]:
    """Rounds in which every metric is 1 and a little, times what ``scaled`` says."""
    rounds = []
    for seed in range(num_rounds):
        metrics = {name: (1 + seed / 100) * scaled.get(name, 1.0) for name in METRICS}
        ttft = [round((10_000 + 100 * one) * scaled.get("ttft_us", 1.0)) for one in range(12)]
        requests = [
            {"index": index, "input_tokens": 10, "output_tokens": 5, "sequences": 1,
             "ttft_us": ttft_us, "e2e_us": ttft_us + 40_000}
            for index, ttft_us in enumerate(ttft)
        ]  # fmt: skip
        metrics["cpu_s"] = None  # type: ignore[assignment]
        run = {"requests": requests}
        rounds.append({"seed": seed, "metrics": metrics, "run": run, "failures": []})
    return rounds


def results(command: str, **more: Any) -> dict[str, Any]:
    schema = f"vmserve-bench-{command}"
    return {"schema": schema, "schema_version": 1, "machine": MACHINE, **more}


def serve_file(num_rounds: int = 8, **scaled: float) -> dict[str, Any]:
    workload = {"name": "chat", "described": DESCRIBED, "load": LOAD}
    more = {"server": {"model": "m"}, "options": {"rate": None}, "workload": workload}
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
    workload = {"name": "chat", "described": DESCRIBED, "load": LOAD, "rounds": rounds}
    return results("ab", variants=[{"name": name} for name in names], workloads=[workload])


def startup_file(factor: float, repeats: int = 7, **more: Any) -> dict[str, Any]:
    seconds = [factor * (2 + 0.01 * one) for one in range(repeats)]
    phases = {"first_token": {"title": "first token", "seconds": seconds}}
    return results("startup", options={}, phases=phases) | more


class Compare:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, files: list[Any], *more: str) -> Any:
        paths = []
        for index, content in enumerate(files):
            path = self.directory / f"{'abc'[index]}.json"
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            paths.append(str(path))
        return CliRunner().invoke(app, ["compare", *paths, *more])

    def refused(self, files: list[Any], *more: str) -> str:
        result = self(files, *more)
        assert isinstance(result.exception, ConfigurationError), result.output
        return str(result.exception)


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    return Compare(tmp_path)


def found(path: Path) -> dict[str, dict[str, Any]]:
    (other,) = json.loads(path.read_text())["others"]
    (case,) = other["cases"]
    return {one["metric"]: one for one in case["comparisons"]}


def test_a_planted_difference_is_found_and_fails_a_check(compare: Compare, tmp_path: Path) -> None:
    files = [serve_file(), serve_file(output_tokens_per_s=0.8, e2e_p95_s=1.2)]
    told = tmp_path / "out" / "c.json"
    result = compare(files, "--fail-above", "15", "--json", str(told))
    assert result.exit_code == 1
    assert "worse by more than 15 %: chat: output tokens/s 0.800 [0.800, 0.800]" in result.output
    assert "worse by more than 15 %: chat: end to end p95 1.200 [1.200, 1.200]" in result.output
    one = found(told)["output_tokens_per_s"]
    assert one["ratio"] == pytest.approx(0.8)
    assert (one["verdict"], one["num_pairs"]) == ("lower", 8)
    assert found(told)["ttft_p50_s"]["verdict"] == "no difference shown"
    assert compare(files, "--fail-above", "25").exit_code == 0
    assert compare(files[::-1], "--fail-above", "15").exit_code == 0  # better is no failure
    assert compare(files).exit_code == 0


def test_an_interval_that_includes_less_is_no_failure(compare: Compare) -> None:
    noisy = serve_file()
    for index, one in enumerate(noisy["rounds"]):
        one["metrics"]["e2e_p95_s"] *= 3.0 if index % 2 else 0.6
    assert compare([serve_file(), noisy], "--fail-above", "10").exit_code == 0


def test_few_rounds_are_compared_request_by_request(compare: Compare, tmp_path: Path) -> None:
    told = tmp_path / "c.json"
    files = [serve_file(1), serve_file(1, ttft_us=2.0)]
    result = compare(files, "--fail-above", "50", "--json", str(told))
    assert result.exit_code == 1
    effects = found(told)
    assert set(effects) == {"ttft", "tpot", "e2e"}
    assert effects["ttft"]["ratio"] == pytest.approx(2.0)
    assert (effects["tpot"]["ratio"], effects["tpot"]["num_pairs"]) == (pytest.approx(1.0), 12)
    assert "TTFT of a request" in result.output
    assert "too narrow" in result.output


def test_other_requests_have_no_interval(compare: Compare) -> None:
    other = serve_file(1)
    for one in other["rounds"]:
        one["seed"] = 99
    assert "Nothing could be paired" in compare([serve_file(1), other]).output
    assert "no headline metric has an interval" in compare.refused(
        [serve_file(1), other], "--fail-above", "5"
    )


def test_variants_are_matched_by_name(compare: Compare) -> None:
    result = compare([ab_file(), ab_file(output_tokens_per_s=0.5)], "--fail-above", "5")
    assert result.exit_code == 1
    assert "chat, virtual: output tokens/s 0.500" in result.output
    assert "chat, paged: output tokens/s 0.500" in result.output


def test_startups_of_either_version(compare: Compare) -> None:
    newer = startup_file(1.5, schema_version=2, memory_bytes={}, sizes_bytes={})
    result = compare([startup_file(1.0), newer, startup_file(1.0)], "--fail-above", "9")
    assert result.exit_code == 1
    assert "1.500" in result.output
    assert result.output.count("worse by more than") == 1
    assert "no headline metric" in compare.refused(
        [startup_file(1.0, 3), startup_file(2.0, 3)], "--fail-above", "9"
    )


def test_what_differs_besides_is_said(compare: Compare) -> None:
    other = copy.deepcopy(serve_file())
    other["machine"] = {**MACHINE, "cpu": "b", "packages": {"vmserve": "2"}}
    other["options"] = {"rate": 3}
    other["rounds"][0]["failures"] = [{"index": 0}]
    other["workload"]["described"] = {**DESCRIBED, "num_requests": 4}
    output = compare([serve_file(), other]).output
    for line in (
        "cpu: a and b",
        "vmserve: 1 and 2",
        "options, rate: None and 3",
        "failed requests, which no latency has: 0 and 1",
        "workload chat: other lengths",
    ):
        assert line in output
    assert "differ in more" not in compare([serve_file(), serve_file()]).output


def test_what_is_refused(compare: Compare) -> None:
    assert "two files or more" in compare.refused([serve_file()])
    assert "different commands" in compare.refused([serve_file(), ab_file()])
    assert "no JSON" in compare.refused([serve_file(), "{"])
    refused = compare.refused([serve_file(), {"benchmark": "overload", "machine": MACHINE}])
    assert "no results file that can be compared (it is of overload): give those of" in refused
    assert "bench ab, bench serve, bench startup, bench step, bench kernels, bench" in refused
    for other in ({"schema": "vmserve-bench-peers"}, {"benchmark": "step"}, [1], {"schema": [1]}):
        assert "no results file" in compare.refused([serve_file(), other])
    assert "version 2 of its schema" in compare.refused(
        [serve_file(), {**serve_file(), "schema_version": 2}]
    )
    other = copy.deepcopy(serve_file())
    other["workload"]["name"] = "alpaca"
    assert "no workload and variant, or section, is in both" in compare.refused(
        [serve_file(), other]
    )
    other["workload"] |= {"name": "chat", "load": {"is_open": True}}
    assert "different kinds" in compare.refused([serve_file(), other])
    assert "no number from 0" in compare.refused([serve_file()] * 2, "--fail-above", "-1")
    result = CliRunner().invoke(app, ["compare", "none.json", "none.json"])
    assert "cannot read none.json" in str(result.exception)


ROOT = Path(__file__).parents[2]


def kernels_file(factor: float, repeats: int = 8) -> dict[str, Any]:
    samples = {
        way: [scale * (1e6 + 1e3 * one) for one in range(repeats)]
        for way, scale in (("contiguous", 1.0), ("paged", factor))
    }
    point = {"shape": "125M", "dtype": "float32", "num_seqs": 4, "context": 1024, "num_new": 1,
             "num_layers": 10, "samples_ns": samples}  # fmt: skip
    return results("kernels", sections={"decode": {"points": [point]}}, quick=False)


def test_rows_with_repeats_have_intervals_and_verdicts(compare: Compare, tmp_path: Path) -> None:
    told = tmp_path / "c.json"
    files = [kernels_file(1.0), kernels_file(1.5)]
    result = compare(files, "--fail-above", "20", "--json", str(told))
    assert result.exit_code == 1
    line = "worse by more than 20 %: kernels, decode: 125M float32, 4 x 1,024 + 1: paged 1.500 "
    assert line in result.output
    assert result.output.count("worse by more than") == 1
    paged = found(told)["125M float32, 4 x 1,024 + 1|paged"]
    assert paged["ratio"] == pytest.approx(1.5)
    assert (paged["verdict"], paged["num_pairs"]) == ("higher", 8)
    assert compare([kernels_file(1.0), kernels_file(1.0)], "--fail-above", "20").exit_code == 0
    # As many repeats as both have.
    assert compare([kernels_file(1.0), kernels_file(1.5, 7)], "--fail-above", "20").exit_code == 1


def test_rows_with_one_value_have_a_ratio_and_nothing_else(compare: Compare) -> None:
    def step(overhead_ns: float, num_seqs: int = 64) -> dict[str, Any]:
        row = {"regime": "paged", "num_seqs": num_seqs, "parts_ns": {"step": {"median": 4e6}},
               "overhead_ns": {"median": overhead_ns, "p95": 2e6}}  # fmt: skip
        return results("step", sections={"step": {"rows": [row]}})

    output = compare([step(1e6), step(1.25e6)]).output
    [row] = [line for line in output.splitlines() if "64 sequences, paged: beside" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")[1:]]
    assert cells == ["1 ms", "1.25 ms", "1.250", ""]
    assert "no headline metric has an interval" in compare.refused(
        [step(1e6), step(2e6)], "--fail-above", "5"
    )
    assert "no workload and variant, or section, is in both" in compare.refused(
        [step(1e6), step(1e6, 128)]
    )


def test_figures_of_one_file_only_are_told(compare: Compare) -> None:
    def papers(*cases: str) -> dict[str, Any]:
        found = {case: {"at_once": [4.0, 5.0, 6.0]} for case in cases}
        return results("papers", figures={"13": {"cases": found}})

    output = compare([papers("a", "b"), {**papers("a"), "quick": True}]).output
    assert "papers, 13: 1 figures are in one of the files only" in output
    assert "quick: None and True" in output
    assert "a: requests at once" in output
    assert "b: requests at once" not in output
    simulated = {**papers("a"), "schema": "vmserve-bench-papers-simulated"}
    assert "different commands" in compare.refused([papers("a"), simulated])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("step/results/2026-11-22-amd-epyc-3", "step 45"),
        (
            "kernels/results/2026-11-21-amd-epyc-2",
            "decode 184, blocks 24, prefill 36",
        ),
        (
            "alloc/results/2026-11-21-amd-epyc",
            "calls 135, steps 18, prefill 20, bandwidth 18, batch 9, waste 20, bookkeeping 9",
        ),
        ("sharing/results/2026-11-21-amd-epyc", "blocks 60"),
        ("sharing/results/2026-11-21-amd-epyc-prefix", "prefix 16"),
        ("papers/results/2026-11-21-amd-epyc", "12 14, 13 14, 14 14, 19 18"),
    ],
)
def test_committed_files_are_read(path: str, expected: str) -> None:
    """Those that were written before files named their schema, too."""
    document = read(ROOT / "benchmarks" / path / "results.json")
    cases = read_cases(document)
    found = [f"{case.name.partition(', ')[2]} {len(case.own)}" for case in cases]
    assert ", ".join(found) == expected
    for case in cases:
        assert case.columns.keys() == case.own.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("step", "--num-seqs", "1", "--steps", "2"),
        ("kernels", "--quick", "--section", "blocks"),
        ("alloc", "--quick", "--section", "bookkeeping"),
        ("sharing", "--section", "blocks", "--num-requests", "1", "--workload", "alpaca"),
        ("papers", "--quick", "--figure", "13"),
    ],
    ids=lambda arguments: str(arguments[0]),
)
def test_what_a_command_writes_is_read(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "results.json"
    where = ["--output", str(tmp_path)] if arguments[0] == "sharing" else ["--json", str(path)]
    done = CliRunner().invoke(app, [*arguments, *where])
    assert done.exit_code == 0, done.output
    assert SCHEMAS[json.loads(path.read_text())["schema"]][0] == f"bench {arguments[0]}"
    compared = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert compared.exit_code == 0, compared.output
    assert "1.000" in compared.output
    assert "differ in more" not in compared.output


def test_what_other_commands_write_now_is_read() -> None:
    for module in (ab_results, serve_results, startup):
        assert SCHEMAS[module.SCHEMA][1] == module.SCHEMA_VERSION
