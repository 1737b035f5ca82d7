"""``vmserve bench ab``: the client, metrics, rounds, the search and the command.

Times are made by hand or not looked at; the embedded model serves a few short requests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.bench import bench, job
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.sampling import SamplingParams
from vmserve_bench.ab import client, experiment, record, results
from vmserve_bench.ab.client import Load, RunFailedError, serve
from vmserve_bench.ab.experiment import Engines, Settings, Workload, orders, run_workload
from vmserve_bench.ab.jobs import Decoding, Job
from vmserve_bench.ab.metrics import METRICS, Slo, judgement, summarize
from vmserve_bench.ab.plan import duration
from vmserve_bench.ab.record import MEMORY_COLUMNS, MEMORY_STATES, RunRecord, memory_row
from vmserve_bench.ab.regret import regret
from vmserve_bench.ab.search import Bracket, RateSearch, search_rate
from vmserve_bench.ab.variants import Variant, parse_variants
from vmserve_bench.workloads.shapes import RequestShape

COMMON = {"max_model_len": 256, "kv_cache_memory": "64MiB", "max_num_seqs": 8}


class Silent:
    def __init__(self) -> None:
        self.runs: list[str] = []
        self.num_finished = 0

    def starting(self, what: str, num_requests: int) -> None:
        self.runs.append(what)

    def finished(self) -> None:
        self.num_finished += 1


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    # A collection visits torch's modules, which takes longer than all that is served here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "gc", SimpleNamespace(collect=lambda: None))
        with Engines(parse_variants(["virtual,paged"]), COMMON) as made:
            yield made


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Iterator[LLMEngine]:
    with engines.use("virtual") as one:
        yield one


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing."""
    monkeypatch.setattr(results, "render", lambda document: "")


# -- the client


def test_every_job_gets_its_tokens(engine: LLMEngine) -> None:
    three, beams = Decoding("parallel", 3), Decoding("beam", 2)
    jobs = [job(20, 5, 0), job(7, 1, 1)]
    jobs += [job(20, 6, 2, decoding=three), job(20, 6, 3, decoding=beams)]
    record = serve(engine, jobs, Load(), seed=1)
    assert [
        (one.num_input_tokens, one.num_output_tokens, one.num_sequences, one.is_streamed)
        for one in record.requests
    ] == [(20, 5, 1, True), (7, 1, 1, True), (20, 6, 3, True), (20, 6, 2, False)]
    greedy, single, parallel, beam = record.requests
    assert (len(greedy.token_times_s), len(single.token_times_s)) == (5, 1)
    assert (len(greedy.itls_s), len(parallel.itls_s), len(beam.itls_s)) == (4, 5, 0)
    assert (single.tpot_s, beam.tpot_s is not None) == (None, True)
    assert beam.ttft_s < beam.e2e_s <= record.elapsed_s
    assert {one.kv_regime for one in record.requests} == {"virtual"}
    assert sum(record.steps["tokens"]) == record.counters["tokens_computed_total"]
    assert record.steps["ended_us"][-1] == round(record.elapsed_s * 1e6)
    assert record.memory["at_us"][0] == 0
    assert record.memory["tokens_bytes"][-1] == record.memory["waste_bytes"][-1] == 0
    assert not engine.has_unfinished


def test_the_prefix_cache_is_empty_when_a_run_begins(engine: LLMEngine) -> None:
    jobs = [Job(RequestShape(60, 2, 0.0, index, 0, 48)) for index in range(3)]
    for _ in range(2):
        record = serve(engine, jobs, Load(concurrency=1), seed=0)
        assert [one.num_cached_tokens for one in record.requests] == [0, 48, 48]
    assert summarize(record)["prefix_hit_rate"] == pytest.approx(96 / 180)


def test_a_closed_loop_has_so_many_at_once(engine: LLMEngine) -> None:
    jobs = [job(5, 6, index) for index in range(5)]
    for concurrency, largest in ((2, 2), (None, 5), (1, 1)):
        record = serve(engine, jobs, Load(concurrency=concurrency), seed=0)
        assert summarize(record)["batch_max"] == largest
    ends = [one.token_times_s[-1] for one in record.requests]
    assert ends == sorted(ends)
    assert all(one.due_s >= end for one, end in zip(record.requests[1:], ends, strict=False))


def test_turns_follow_each_other_with_their_history(engine: LLMEngine) -> None:
    jobs = [job(20, 12), job(40, 5, 1, previous=0, think_s=0.01), job(70, 5, 2, previous=1)]
    for load in (Load(), Load(is_open=True)):
        record = serve(engine, jobs, load, seed=0)
        first, second, third = record.requests
        assert second.due_s >= first.token_times_s[-1] + (0.01 if load.is_open else 0.0)
        assert third.due_s >= second.token_times_s[-1]
        # What was said before is in the cache, in whole blocks, answers included.
        assert (second.num_cached_tokens, third.num_cached_tokens) == (16, 32)


class FakeClock:
    """Every look at it takes a millisecond."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        self.time += 0.001
        return self.time

    def process_time(self) -> float:
        return self.time / 2

    def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        self.time += seconds


def test_an_open_loop_waits_and_counts_from_when_requests_were_due(engine: LLMEngine) -> None:
    jobs = [job(5, 3, 0, at=2.0), job(5, 3, 1, at=50.0), job(5, 3, 2, at=50.0)]
    clock = FakeClock()
    record = serve(engine, jobs, Load(is_open=True), 0, clock=clock)
    assert [one.due_s for one in record.requests] == [2.0, 50.0, 50.0]
    assert [round(seconds) for seconds in clock.slept] == [2, 48]
    # Two looks at the clock each step, one each time round: 0.002 to the first token or so.
    assert all(0.0 < one.ttft_s < 0.01 for one in record.requests)
    assert record.elapsed_s == pytest.approx(50.0, abs=0.05)
    assert record.cpu_s == pytest.approx(record.elapsed_s / 2, abs=0.05)


def test_what_cannot_be_served_is_said_before_the_run(engine: LLMEngine) -> None:
    wide = job(5, 5, decoding=Decoding("beam", 9))
    for wrong, told in (
        (job(300, 5), "maximum context length is 256"),
        (wide, "beam_width must be at most 8"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            serve(engine, [wrong], Load(), seed=0)


def test_a_failed_request_ends_the_run_and_leaves_nothing(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.runner, "execute", fail)
    with pytest.raises(RunFailedError, match="request 0 failed"):
        serve(engine, [job(5, 5)], Load(), seed=0)
    monkeypatch.undo()
    assert not engine.has_unfinished
    assert len(serve(engine, [job(5, 5)], Load(), seed=0).requests) == 1


# -- metrics


def sample(index: int, outputs: int, due: float, *times: float, width: int = 1) -> Any:
    more = (0, 0, "virtual", "alone", "digest")
    return record.RequestSample(index, "", 10, outputs, width, due, times, width == 1, *more)


def by_hand(**counted: float) -> RunRecord:
    counters = Counter(
        prefix_cache_queries=40, prefix_cache_hits=10, converted_to_paged=2,
        converted_to_virtual=1, cow_blocks=3, copied_blocks=4, attention_virtual_seconds=3,
        attention_paged_seconds=1, attention_virtual_predicted_seconds=1,
        attention_paged_predicted_seconds=1, **counted,
    )  # fmt: skip
    memory = [
        (0, 0, 0, 0, 0, 100, 0, 0, 0),
        (6_000_000, 40, 10, 20, 5, 25, 50, 1, 0),
        (10_000_000, 80, 20, 0, 0, 0, 0, 1, 1),
    ]
    return RunRecord(
        elapsed_s=10.0,
        cpu_s=15.0,
        requests=(
            sample(0, 3, 0.0, 1.0, 1.5, 3.0),
            sample(1, 4, 1.0, 3.0, 9.0, width=2),
            sample(2, 1, 2.0, 10.0),
        ),
        steps={"sequences": [1, 3]},
        memory=dict(zip(MEMORY_COLUMNS, map(list, zip(*memory, strict=True)), strict=True)),
        counters=Counter({f"{name}_total": value for name, value in counters.items()}),
    )


def test_metrics_by_hand() -> None:
    found = summarize(by_hand(), Slo(ttft_s=2.0), price_per_hour=3.6)
    expected = {
        "output_tokens_per_s": 1.2,  # 3 + 2 x 4 + 1
        "total_tokens_per_s": 4.2, "requests_per_s": 0.3,
        "goodput_per_s": 0.2, "goodput_share": 2 / 3,
        "ttft_mean_s": 11 / 3, "ttft_p50_s": 2.0, "tpot_mean_s": (1.0 + 2.0) / 2,
        # 0.5 and 1.5; beams are seen at their end only
        "itl_mean_s": 1.0, "itl_p99_s": 1.49,
        "e2e_p50_s": 8.0, "normalized_mean_s": (1.0 + 2.0 + 8.0) / 3,
        "kv_used_peak_bytes": 100, "kv_used_mean_bytes": 0.6 * 50 + 0.4 * 100,
        "kv_mapped_peak_bytes": 100, "kv_committed_peak_bytes": 100,
        "kv_waste_mean_bytes": 0.6 * 10 + 0.4 * 20, "kv_token_share": 0.8,
        "sharing_saved_share": 30 / 100, "virtual_share": 1.0 / 1.4, "prefix_hit_rate": 0.25,
        "batch_mean": 2.0, "batch_max": 3, "conversions": 3, "blocks_copied": 7, "preemptions": 0,
        "attention_s": 4, "attention_predicted": 0.5,
        "cpu_s": 15.0, "cost_per_million": 3.6 / (1.2 * 3600) * 1e6,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert list(found) == list(METRICS)
    drafts = {"spec_decode_num_draft_tokens": 8, "spec_decode_num_accepted_tokens": 2}
    found = summarize(by_hand(**drafts, generation_tokens=12))
    names = ("drafted_tokens", "accepted_share", "tokens_per_row")
    assert [found[name] for name in names] == [8, 0.25, 1.2]


def test_what_a_run_has_not_is_none() -> None:
    found = summarize(replace(by_hand(), requests=by_hand().requests[1:2], counters=Counter()))
    for name in ("goodput_share", "goodput_per_s", "cost_per_million", "itl_p99_s"):
        assert found[name] is None
    assert summarize(RunRecord(1.0, 1.0, by_hand().requests))["kv_used_peak_bytes"] is None


def test_slos() -> None:
    requests = by_hand().requests  # a fast one, a slow one, and one of one token
    assert [Slo(tpot_s=1.5).met_by(one) for one in requests] == [True, False, True]
    assert [Slo(ttft_s=2.0).met_by(one) for one in requests] == [True, True, False]
    assert (bool(Slo()), bool(Slo(tpot_s=1.0))) == (False, True)


def sampled(engine: LLMEngine, num_tokens: int, n: int) -> tuple[dict[str, int], Any]:
    """The memory after some steps of a request, by column, and as the engine has it."""
    engine.add_request("a", [5] * num_tokens, SamplingParams(n=n, max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    stats = engine.memory.stats()
    engine.abort("a")
    return dict(zip(MEMORY_COLUMNS, memory_row(1.0, stats), strict=True)), stats


def test_memory_by_state_adds_up(engines: Engines) -> None:
    with engines.use("virtual") as engine:
        found, stats = sampled(engine, 40, 1)
    states = [found[f"{state}_bytes"] for state in MEMORY_STATES]
    assert sum(states) == stats.committed_pages * stats.page_bytes
    assert sum(states[:2]) == stats.used_pages * stats.page_bytes
    assert states[0] == stats.used_tokens * stats.page_bytes // stats.page_tokens
    assert (found["at_us"], found["saved_bytes"], found["virtual"]) == (1_000_000, 0, 1)
    with engines.use("paged") as engine:
        found, stats = sampled(engine, 48, 4)
    # Four sequences share three blocks.
    assert found["saved_bytes"] == 3 * 3 * stats.page_bytes // stats.blocks_per_page


def test_numbers_for_people() -> None:
    for metric, value, text in (
        ("ttft_p50_s", 0.01234, "12.3 ms"), ("ttft_p50_s", 2.5, "2.5 s"), ("map_s", 0.0, "0 us"),
        ("kv_used_peak_bytes", 3 << 20, "3 MiB"), ("prefix_hit_rate", 0.123, "12.3%"),
        ("output_tokens_per_s", 12345.6, "12,346"), ("preemptions", 3.0, "3"),
        ("preemptions", None, "-"),
    ):  # fmt: skip
        assert METRICS[metric].format(value) == text
    for verdict, better, told in (
        ("higher", "lower", "worse"), ("higher", "higher", "better"), ("lower", "lower", "better"),
        ("higher", None, "higher"), ("no difference shown", "lower", "no difference shown"),
        (None, "lower", ""),
    ):  # fmt: skip
        assert judgement(verdict, better) == told  # type: ignore[arg-type]


# -- variants and options


def test_variants_and_their_options() -> None:
    found = parse_variants(
        ["virtual,paged", "small=kv-page-size=64KiB,kv_mapper=off,max_num_seqs=8",
         "b=enable_prefix_caching=no,gpu_memory_utilization=0.5,kv_page_size=none"]
    )  # fmt: skip
    small = {"kv_page_size": "64KiB", "kv_mapper": "off", "max_num_seqs": 8}
    b = {"enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "kv_page_size": None}
    assert found == [
        Variant("virtual", {"kv_regime": "virtual"}),
        Variant("paged", {"kv_regime": "paged"}),
        Variant("small", small),
        Variant("b", b),
    ]
    config = found[2].config({"max_num_seqs": 4, "seed": 7})
    assert (config.max_num_seqs, config.seed) == (8, 7)
    with pytest.raises(ConfigurationError, match="variant x: kv_mapper: 'sometimes' is not one of"):
        Variant("x", {"kv_mapper": "sometimes"}).config({})


def test_durations() -> None:
    texts = ("200ms", "0.2s", "0.2", "5us", ".5")
    assert [duration("--x", text) for text in texts] == pytest.approx([0.2, 0.2, 0.2, 5e-6, 0.5])
    for wrong in ("", "fast", "-1", "0", "1 min"):
        with pytest.raises(ConfigurationError, match=r"--x: .* is no duration"):
            duration("--x", wrong)


# -- rounds


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_orders_are_fair_to_places_and_neighbours(names: str) -> None:
    found = orders(names, 2 * len(names))
    assert all(sorted(order) == sorted(names) for order in found)
    for place in range(len(names)):
        assert set(Counter(order[place] for order in found).values()) == {2}
    after = Counter(
        (order[place], order[place + 1]) for order in found for place in range(len(names) - 1)
    )
    assert all(after[a, b] == after[b, a] for a in names for b in names if a != b)
    assert orders(names, 1)[0] == tuple(names)


def test_rounds_pair_the_same_requests(engines: Engines) -> None:
    seeds: list[int] = []

    def make(seed: int) -> list[Job]:
        seeds.append(seed)
        return [job(10 + seed % 3, 3, index) for index in range(2)]

    progress = Silent()
    settings = Settings(rounds=3, warmup=1, seed=5)
    result = run_workload(engines, Workload("w", make), settings, progress)
    assert seeds == [1_000_005, 5, 6, 7]
    assert [tuple(one["order"]) for one in result.rounds] == orders(["virtual", "paged"], 3)
    assert progress.num_finished == 2 * 2 * 4
    assert [len(set(run.split(","))) for run in progress.runs] == [3] * 8
    for one in result.rounds:
        assert list(one["runs"]) == ["virtual", "paged"]
        virtual, paged = (run["requests"] for run in one["runs"].values())
        assert [each["input_tokens"] for each in virtual] == [10 + one["seed"] % 3] * 2
        assert [each["digest"] for each in virtual] == [each["digest"] for each in paged]
        assert {each["kv_regime"] for each in paged} == {"paged"}
    assert result.same_answers == {"paged": {"same": 6, "of": 6}}
    assert [one["metric"] for one in result.comparisons["paged"]][:1] == ["elapsed_s"]


class FakeEngines(Engines):
    """Notes which engines are made, and makes none."""

    def __init__(self) -> None:
        super().__init__(parse_variants(["virtual,paged"]), COMMON)
        self.made: list[str] = []

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        if name not in self._kept:
            self.made.append(name)
            self._kept[name] = name  # type: ignore[assignment]
        yield name

    def renew(self) -> None:
        self._kept.clear()


def test_engines_are_made_anew_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the round to come, each time warmed up with other requests."""
    seeds: list[int] = []

    def make(seed: int) -> list[Job]:
        seeds.append(seed)
        return [job(10, 2, 0)]

    monkeypatch.setattr(experiment, "serve", lambda *_: by_hand())
    engines, progress = FakeEngines(), Silent()
    settings = Settings(rounds=4, renew_every=2)
    run_workload(engines, Workload("w", make), settings, progress)
    assert len(progress.runs) == 2 * settings.num_runs
    assert engines.made == ["virtual", "paged", "paged", "virtual"]
    assert seeds == [1_000_000, 0, 1, 1_000_002, 2, 3]


def test_the_fastest_try_of_a_round_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    seconds = iter([3.0, 5.0, 4.0, 2.0, 1.0, 9.0])

    def timed(engine: str, *_: Any) -> RunRecord:
        ran.append(engine)
        return replace(by_hand(), elapsed_s=next(seconds))

    monkeypatch.setattr(experiment, "serve", timed)
    settings = Settings(rounds=1, warmup=0, tries=3)
    progress = Silent()
    workload = Workload("w", lambda seed: [job(10, 2, 0)])
    result = run_workload(FakeEngines(), workload, settings, progress)
    assert ran == ["virtual", "paged", "paged", "virtual", "virtual", "paged"]
    assert result.values("virtual", "elapsed_s") == [1.0]
    assert result.values("paged", "elapsed_s") == [4.0]
    assert len(progress.runs) == 2 * settings.num_runs


def test_engines_are_kept_or_made_anew() -> None:
    variants = parse_variants(["virtual,paged"])
    for rebuild in (False, True):
        with Engines(variants, COMMON, rebuild=rebuild) as made:
            with made.use("virtual") as first:
                pass
            with made.use("virtual") as second:
                assert (first is second) is not rebuild


# -- the search and regret


def test_a_bracket_finds_a_rate() -> None:
    bracket = Bracket(1.0, 64.0)
    for _ in range(12):
        bracket.learn(bracket.middle, bracket.middle <= 10.0)
    assert bracket.found == pytest.approx(10.0, rel=0.01)
    always, never = Bracket(1.0, 2.0), Bracket(1.0, 2.0)
    for _ in range(3):
        always.learn(always.middle, True)
        never.learn(never.middle, False)
    assert always.found is never.found is None


def test_a_search_probes_every_variant_in_every_round(engines: Engines) -> None:
    def make(seed: int, rate: float | None) -> list[Job]:
        return [job(5, 2, index, at=0.0 if rate is None else 1e-3 / rate) for index in range(2)]

    generous = Settings(rounds=2, slo=Slo(ttft_s=100.0))
    search = RateSearch("s", make, steps=2)
    result = search_rate(engines, search, generous, Silent())
    assert len(result["probes"]) == 2 * 2 * 2
    assert all(probe["passed"] for probe in result["probes"])
    assert result["max_rate_per_s"] == {"virtual": [None, None], "paged": [None, None]}
    assert result["comparisons"] == {"paged": None}
    capacity = result["closed_loop_per_s"]
    assert all(capacity / 16 < probe["rate_per_s"] < 2 * capacity for probe in result["probes"])
    strict = Settings(rounds=1, slo=Slo(ttft_s=1e-9))
    probes = search_rate(engines, search, strict, Silent())["probes"]
    assert not any(probe["passed"] for probe in probes)


def test_regret_is_against_the_better_one() -> None:
    wobble = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99]
    fixed = {"virtual": [2.0 * w for w in wobble], "paged": [3.0 * w for w in wobble]}

    def times(factor: float) -> list[float]:
        return [2.0 * factor * w for w in reversed(wobble)]

    equal = regret(times(1.0), fixed)
    assert (equal.better, equal.outcome) == ("virtual", "PASS")
    assert equal.value == pytest.approx(0.0, abs=1e-9)
    assert equal.low is not None
    assert equal.high is not None
    assert equal.low < 0.0 < equal.high < 0.05
    slow = regret(times(1.2), fixed)
    assert (slow.outcome, round(slow.value, 6)) == ("FAIL", 0.2)
    assert regret(times(1.045), fixed).outcome == "not shown"
    # Better than one and worse than the other: the better one counts.
    assert regret(times(1.2), dict(reversed(fixed.items()))).outcome == "FAIL"
    faster = regret(times(0.9), fixed)
    assert (faster.outcome, faster.value) == ("PASS", pytest.approx(-0.1))
    # Too few rounds for an interval, and rounds that all say the same.
    found = regret([1.0] * 5, {"virtual": [1.0] * 5, "paged": [2.0] * 5})
    assert (found.low, found.high, found.outcome) == (None, None, "not shown")
    exact = regret([1.0] * 6, {"virtual": [1.0] * 6, "paged": [2.0] * 6})
    assert (exact.low, exact.high, exact.outcome) == (0.0, 0.0, "PASS")


# -- the command

SMALL = ["--num-requests", "2", "--max-len", "64", "--rounds", "1", "--warmup", "0",
         "--kv-cache-memory", "64MiB", "--max-model-len", "256"]  # fmt: skip


def run_ab(out: Path, *words: str | Path) -> tuple[str, dict[str, Any]]:
    told = bench("ab", *SMALL, *words, "--output", out)
    return told, json.loads((out / "results.json").read_text())


def test_the_command_writes_everything(tmp_path: Path) -> None:
    told, found = run_ab(tmp_path, "--slo-ttft", "100s", "--price-per-hour", "2")
    assert "chat: 2 requests" in told
    assert (tmp_path / "report.html").exists()
    assert (found["schema"], found["schema_version"]) == ("vmserve-bench-ab", 1)
    assert [one["name"] for one in found["variants"]] == ["virtual", "paged", "auto"]
    [chat] = found["workloads"]
    [first] = chat["rounds"]
    assert first["order"] == ["virtual", "paged", "auto"]
    assert first["metrics"]["auto"]["goodput_share"] == 1.0
    run = first["runs"]["paged"]
    assert [request["kv_regime"] for request in run["requests"]] == ["paged", "paged"]
    assert len(run["requests"][0]["itl_us"]) == run["requests"][0]["output_tokens"] - 1
    for columns in (run["memory"], run["steps"]):
        assert len({len(column) for column in columns.values()}) == 1
    assert found["machine"]["python"]


@pytest.mark.usefixtures("no_report")
def test_the_command_takes_traces_prompts_and_named_variants(tmp_path: Path) -> None:
    trace, prompts = tmp_path / "mine.jsonl", tmp_path / "asked.txt"
    trace.write_text('{"timestamp": 0, "input_length": 30, "output_length": 2}\n')
    prompts.write_text("Once upon a time\n")
    words = ["--trace", trace, "--prompts", prompts, "--variants", "paged", "--variants"]
    _, found = run_ab(tmp_path, *words, "off=kv_mapper=off", "--output-len", "3")
    assert [one["name"] for one in found["variants"]] == ["paged", "off"]
    assert found["variants"][1]["resolved"]["kv_mapper"] == "off"
    mine, asked = found["workloads"]
    assert [mine["name"], asked["name"]] == ["mine", "asked"]
    assert (mine["load"]["is_open"], asked["load"]["is_open"]) == (True, False)
    assert mine["rounds"][0]["runs"]["off"]["requests"][0]["input_tokens"] == 30
    assert asked["rounds"][0]["runs"]["off"]["requests"][0]["output_tokens"] == 3


@pytest.mark.usefixtures("no_report")
def test_the_command_speculates_on_real_text(tmp_path: Path) -> None:
    words = ["--variants", "off=speculative=off", "--variants", "on=speculative=prompt-lookup"]
    words += ["--workload", "stories", "--max-len", "256", "--output-len", "40"]
    told, found = run_ab(tmp_path, *words)
    assert "at most 40 out" in told
    assert "tokens drafted" in told
    [stories] = found["workloads"]
    assert stories["same_answers"] == {"on": {"same": 2, "of": 2}}
    metrics = stories["rounds"][0]["metrics"]
    assert metrics["off"]["drafted_tokens"] is None
    assert metrics["on"]["drafted_tokens"] > 0


@pytest.mark.usefixtures("no_report")
def test_the_command_renews_and_searches(tmp_path: Path) -> None:
    variants = ["--variants", "virtual,paged"]
    more = ["--rounds", "3", "--renew", "2", "--workload", "beam,alpaca"]
    told, found = run_ab(tmp_path, *more, *variants)
    assert "beam: 2 requests" in told
    assert found["settings"]["renew_every"] == 2
    assert [one["name"] for one in found["workloads"]] == ["beam", "alpaca"]
    assert found["workloads"][0]["described"]["decoding"] == ["beam 4"]
    search = ["--search", "--search-steps", "1", "--slo-ttft", "100s"]
    told, found = run_ab(tmp_path, *search, *variants)
    assert "highest rate with 90% of requests in time" in told
    assert [probe["passed"] for probe in found["searches"][0]["probes"]] == [True, True]
