"""Workloads of ``vmserve bench ab``: published shapes, scaling, conversations, files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vmserve
from tests.support.bench import job
from vmserve.errors import ConfigurationError
from vmserve.sampling import SamplingParams
from vmserve_bench.ab import jobs as ab_jobs
from vmserve_bench.ab.jobs import Decoding, Job, Prompts, fit, generation_params, ideal_hit_rate
from vmserve_bench.ab.plan import LoadOptions, make_workloads, sources
from vmserve_bench.ab.traces import at_rate, read_prompts, read_trace
from vmserve_bench.ab.traffic import ARXIV, KINDS, MIX, get_kind, sessions, text_jobs
from vmserve_bench.workloads import texts
from vmserve_bench.workloads.shapes import RequestShape
from vmserve_bench.workloads.texts import TEXTS, conversations


def lengths(jobs: list[Job]) -> tuple[list[int], list[int]]:
    shapes = [job.shape for job in jobs]
    return [s.num_input_tokens for s in shapes], [s.num_output_tokens for s in shapes]


# -- shapes


def test_arxiv_has_the_published_percentiles_and_means() -> None:
    inputs, outputs = ARXIV.sample(200_000, np.random.default_rng(1))
    assert np.percentile(inputs, (50, 90)) == pytest.approx((2730, 3702), rel=0.01)
    assert np.percentile(outputs, (50, 90)) == pytest.approx((167, 372), rel=0.02)
    assert inputs.mean() == pytest.approx(2588, rel=0.005)
    assert outputs.mean() == pytest.approx(291, rel=0.01)


def test_kinds_have_what_they_say() -> None:
    long = get_kind("long-context").make(9, 0)
    expected = {(n, n // r) for n in (32768, 65536, 131072) for r in (500, 100, 50)}
    assert set(zip(*lengths(long), strict=True)) == expected
    shared = get_kind("shared-prefix").make(64, 0)
    assert Counter(one.shape.prefix_group for one in shared) == {0: 16, 1: 16, 2: 16, 3: 16}
    for name, prefix in (("wmt-one-shot", 80), ("wmt-five-shot", 341)):
        shapes = [one.shape for one in get_kind(name).make(200, 0)]
        assert {(one.num_prefix_tokens, one.prefix_group) for one in shapes} == {(prefix, 0)}
        own = [one.num_input_tokens - prefix for one in shapes]
        assert (min(own), max(own)) == (40, 60)


def test_vllms_suite_has_a_run_for_each_number_at_once() -> None:
    for name, *expected in (
        ("vllm-cpu", 128, 128), ("vllm-cpu-128-2048", 128, 2048), ("vllm-cpu-2048-128", 2048, 128),
        ("vllm-cpu-2048-2048", 2048, 2048),
    ):  # fmt: skip
        [source] = sources([name], None, None, num_requests=None, usual=5)
        found = make_workloads(source, LoadOptions(), max_len=sum(expected), scale=None)
        at_once = [12, 16, 24, 32, 64, 128, 200]
        assert [one.load.concurrency for one in found] == at_once
        assert [one.name for one in found] == [f"{name} at {number}" for number in at_once]
        assert not any(one.load.is_open for one in found)
        jobs = found[0].make(3)
        assert len(jobs) == 200
        assert set(zip(*lengths(jobs), strict=True)) == {tuple(expected)}


def test_what_is_asked_for_goes_before_the_workloads_own_numbers() -> None:
    [source] = sources(["vllm-cpu"], None, None, num_requests=7)

    def made(load: LoadOptions) -> list[tuple[str, bool, int | None, int]]:
        found = make_workloads(source, load, max_len=256, scale=None)
        return [
            (one.name, one.load.is_open, one.load.concurrency, len(one.make(0))) for one in found
        ]

    both = [("vllm-cpu at 2", False, 2, 7), ("vllm-cpu at 4", False, 4, 7)]
    assert made(LoadOptions("4, 2")) == both
    assert made(LoadOptions("3")) == [("vllm-cpu", False, 3, 7)]
    assert made(LoadOptions(rate=2.0)) == [("vllm-cpu", True, None, 7)]
    with pytest.raises(ConfigurationError, match="--concurrency: 'x' is no whole number"):
        made(LoadOptions("x"))


@pytest.mark.parametrize("name", KINDS)
def test_same_seed_same_jobs_and_indices_are_places(name: str) -> None:
    kind = get_kind(name)
    jobs = kind.make(40, 5)
    assert len(jobs) == 40
    assert jobs == kind.make(40, 5)
    # Of one length, with tokens of the seed.
    assert (jobs != kind.make(40, 6)) != name.startswith("vllm-cpu")
    assert [job.shape.index for job in jobs] == list(range(40))
    assert all(job.previous is None or job.previous < job.shape.index for job in jobs)
    assert {job.shape.arrival_s for job in jobs} == {0.0}
    fitted = [job.shape for job in fit(jobs, min(1.0, 512 / (kind.context or 1)), 512)]
    assert fitted
    assert all(0 < one.num_output_tokens <= 512 - one.num_input_tokens for one in fitted)


def test_sessions_say_all_that_was_said_before() -> None:
    jobs = sessions(200, 0)
    turns = [job for job in jobs if job.previous is not None]
    assert len(turns) > 80
    for turn in turns:
        before = jobs[turn.previous or 0].shape
        assert turn.shape.num_input_tokens > before.num_input_tokens + before.num_output_tokens
        assert turn.think_s > 0
    assert all(job.think_s == 0 for job in jobs if job.previous is None)


def test_a_mix_has_every_part_in_its_share_and_conversations_whole() -> None:
    jobs = get_kind("mix").make(200, 1)
    expected = {name: round(200 * share) for name, share in MIX.items()}
    assert Counter(job.part for job in jobs) == expected
    assert sum(MIX.values()) == pytest.approx(1.0)
    for one in jobs:
        if one.previous is not None:
            assert one.part == jobs[one.previous].part == "sessions"
    assert {str(job.decoding) for job in jobs} == {"greedy", "beam 4", "n = 4"}
    # Drawn order: parts do not come one after the other.
    assert len({job.part for job in jobs[:20]}) > 3


@pytest.fixture
def few_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Functions to edit of one package: all of them take seconds to parse."""
    monkeypatch.setattr(texts, "_PACKAGE", Path(vmserve.__file__).with_name("memory"))
    conversations.cache_clear()
    yield
    conversations.cache_clear()


@pytest.mark.usefixtures("few_functions")
@pytest.mark.parametrize("name", TEXTS)
def test_conversations_of_text_are_drawn_and_may_end(name: str) -> None:
    def made(seed: int) -> list[Job]:
        return text_jobs(name, 20, seed, 192, lambda message: list(message.encode()))

    jobs = made(5)
    assert jobs == made(5) != made(6)
    messages = [bytes(job.token_ids or ()).decode() for job in jobs]
    assert set(messages) <= set(conversations(name))
    assert len(set(messages)) == 20
    [fitted] = fit(jobs[:1], 0.1, 4096)
    assert fitted.token_ids == jobs[0].token_ids
    assert generation_params(fitted, 0).max_tokens <= 192
    assert not generation_params(fitted, 0).ignore_eos


# -- scaling


def test_fit_scales_and_cuts_to_the_context() -> None:
    jobs = [job(100, 40, 0), job(1000, 40, 1), job(1, 1, 2), job(190, 1000, 3)]
    fitted = fit(jobs, 0.5, 100)
    assert list(zip(*lengths(fitted), strict=True)) == [(50, 20), (99, 1), (1, 1), (95, 5)]


def test_fit_scales_prefixes_and_cuts_them_first() -> None:
    shape = RequestShape(90, 10, index=0, prefix_group=3, num_prefix_tokens=80)
    half, cut = (
        fit([Job(shape)], scale, length)[0].shape for scale, length in [(0.5, 99), (1, 50)]
    )
    assert (half.num_prefix_tokens, half.num_input_tokens, half.num_output_tokens) == (40, 45, 5)
    assert (cut.num_prefix_tokens, cut.num_input_tokens, cut.num_output_tokens) == (39, 49, 1)


def test_fit_ends_conversations_for_which_there_is_no_room() -> None:
    # Of their own the turns after the first have 10 tokens, and 100, which is too long.
    chat = [job(10, 20, 0), job(40, 20, 1, previous=0), job(160, 20, 2, previous=1)]
    jobs = [*chat, job(190, 5, 3, previous=2), job(7, 7, 4), job(20, 4, 5, previous=4)]
    fitted = fit(jobs, 1.0, 100)
    assert [(j.shape.index, j.previous, j.shape.num_input_tokens) for j in fitted] == [
        (0, None, 10), (1, 0, 40), (2, None, 7), (3, 2, 20),
    ]  # fmt: skip
    halved = fit(jobs, 0.5, 100)
    assert lengths(halved)[0][:3] == [5, 5 + 10 + 5, 20 + 10 + 50]


def test_given_prompts_are_not_cut() -> None:
    given = job(5, 100, token_ids=(1, 2, 3, 4, 5), source="p.txt:7")
    [fitted] = fit([given], 0.5, 20)
    assert (fitted.shape.num_input_tokens, fitted.shape.num_output_tokens) == (5, 15)
    assert Prompts(100, 0).of(fitted) == [1, 2, 3, 4, 5]
    with pytest.raises(ConfigurationError, match=r"p.txt:7: the prompt has 5 tokens, and 5 fit"):
        fit([given], 1.0, 5)


def test_arrivals_have_the_rate_over_all_turns() -> None:
    jobs = sessions(100, 0)
    timed = ab_jobs.with_arrivals(jobs, 4.0, 1.0, 0)
    roots = [one.shape.arrival_s for one in timed if one.previous is None]
    assert max(roots) == pytest.approx(100 / 4.0)
    assert all(one.shape.arrival_s == 0 for one in timed if one.previous is not None)
    assert [one.shape.arrival_s for one in ab_jobs.with_arrivals(jobs, None, 1.0, 0)] == [0.0] * 100
    twice = ab_jobs.with_arrivals(jobs, 8.0, 1.0, 0)
    assert twice[50].shape.arrival_s == pytest.approx(timed[50].shape.arrival_s / 2)


# -- prompts and parameters


def test_turns_begin_with_their_history() -> None:
    jobs = [job(3, 2, 0), job(9, 1, 1, previous=0)]
    prompts = Prompts(50, 0, reserved=(0, 1))
    first = prompts.of(jobs[0])
    second = prompts.of(jobs[1], [*first, 30, 31])
    assert second[:5] == [*first, 30, 31]
    assert len(second) == 9
    assert not {0, 1} & set(second)
    # Names of blocks need not cover the prompt.
    short = job(11, 1, 2, hash_ids=(7,), block_tokens=4)
    assert len(prompts.of(short)) == 11
    assert prompts.of(short)[:4] == prompts.of(job(4, 1, 3, hash_ids=(7,), block_tokens=4))


def test_greedy_and_sampled_requests_have_seeds_of_their_own() -> None:
    greedy, other = (generation_params(job(1, 9, index), seed=2) for index in (3, 4))
    sampled = generation_params(job(1, 9, 3, decoding=Decoding("parallel", 4)), seed=2)
    assert {type(each) for each in (greedy, sampled, other)} == {SamplingParams}
    assert (greedy.temperature, sampled.temperature) == (0.0, 1.0)
    assert greedy.seed == sampled.seed != other.seed


# -- files


def write(path: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_in_milliseconds_from_its_first_request(tmp_path: Path) -> None:
    one = {"timestamp": 1000, "input_length": 900, "output_length": 40, "hash_ids": [1, 2]}
    two = {"timestamp": 1250, "input_length": 10, "output_length": 2, "other": "ignored"}
    first, second = read_trace(write(tmp_path / "t.jsonl", one, "", two))
    assert (first.shape.arrival_s, second.shape.arrival_s) == (0.0, 0.25)
    assert (first.hash_ids, first.block_tokens, second.hash_ids) == ((1, 2), 512, ())
    assert (second.shape.num_input_tokens, second.shape.index) == (10, 1)
    [slow, fast] = at_rate([first, second], 4.0)
    assert (slow.shape.arrival_s, fast.shape.arrival_s) == (0.0, 0.5)
    [half, _] = fit([first, second], 0.5, 1000)
    assert (half.shape.num_input_tokens, half.block_tokens) == (450, 256)


#: Two conversations after one beginning, as in Mooncake's: the last block may be a part of one.
CONVERSATIONS = (
    {"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1, 4, 5]},
    {"timestamp": 6000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
    # Blocks 1 and 3 after other beginnings than above: no cache has them.
    {"timestamp": 9000, "input_length": 1024, "output_length": 9, "hash_ids": [3, 1]},
)


@pytest.mark.parametrize("scale", [1.0, 1 / 32])
def test_blocks_of_a_trace_are_prefixes_at_every_scale(tmp_path: Path, scale: float) -> None:
    path = write(tmp_path / "t.jsonl", *CONVERSATIONS)
    jobs = fit(read_trace(path), scale, 4096)
    block = round(512 * scale)
    assert {job.block_tokens for job in jobs} == {block}
    made = Prompts(5000, 3, range(100))
    first, other, later, again, apart = [made.of(job) for job in jobs]
    assert len(later) == round(2000 * scale)
    assert first[:block] == other[:block] == later[:block]
    assert first[: 2 * block] == later[: 2 * block]
    assert first[2 * block :] != later[2 * block :]
    assert first == again
    assert apart[:block] not in (first[:block], other[:block])
    assert apart[block:] == first[block : 2 * block]
    found = [0, block, 2 * block, round(1100 * scale), 0]
    asked = sum(job.shape.num_input_tokens for job in jobs)
    assert ideal_hit_rate(jobs) == sum(found) / asked
    assert ideal_hit_rate(fit([Job(RequestShape(9, 1))], scale, 4096)) is None


def test_a_trace_is_cut_to_the_requests_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *CONVERSATIONS)
    for wanted, times in ((None, [0.0, 0.0, 3.0, 6.0, 9.0]), (3, [0.0, 0.0, 3.0])):
        [source] = sources([], path, None, num_requests=wanted, usual=2)
        [workload] = make_workloads(source, LoadOptions(), max_len=4096, scale=None)
        assert [job.shape.arrival_s for job in workload.make(0)] == times
        assert workload.load.is_open
    [faster] = make_workloads(source, LoadOptions(rate=2.0), max_len=4096, scale=None)
    assert [job.shape.arrival_s for job in faster.make(0)] == [0.0, 0.0, 1.5]


GOOD = {"timestamp": 5, "input_length": 9, "output_length": 4}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "t.jsonl:3: not JSON"),
        ([1], "t.jsonl:3: an object with timestamp"),
        ({**GOOD, "timestamp": "soon"}, "t.jsonl:3: timestamp: milliseconds from 0, not 'soon'"),
        ({**GOOD, "timestamp": 1}, "t.jsonl:3: timestamp 1 is before the one of the line above, 5"),
        ({"timestamp": 5, "input_length": 9}, "t.jsonl:3: output_length is missing"),
        ({**GOOD, "input_length": 0}, "t.jsonl:3: input_length: a whole number of at least 1"),
        ({**GOOD, "output_length": True}, "t.jsonl:3: output_length: a whole number"),
        ({**GOOD, "hash_ids": [1.5]}, "t.jsonl:3: hash_ids: a list of whole numbers"),
        ({**GOOD, "hash_ids": [1, 2]}, "t.jsonl:3: 2 hash_ids for 9 tokens, which are 1 blocks"),
    ],
)
def test_what_is_wrong_with_a_trace_is_told_with_its_line(
    tmp_path: Path, row: Any, told: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_trace(write(tmp_path / "t.jsonl", GOOD, "", row))
    assert told in str(error.value)


def test_files_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.txt").write_text("")
    for name, told in (
        ("none.txt", "No such file"), ("empty.txt", "no request in it"), ("bytes.txt", "not UTF-8")
    ):  # fmt: skip
        with pytest.raises(ConfigurationError, match=told):
            read_trace(tmp_path / name)
    with pytest.raises(ConfigurationError, match="no prompt in it"):
        read_prompts(tmp_path / "empty.txt", list, 4)
    jobs = read_trace(write(tmp_path / "t.jsonl", GOOD, GOOD))
    with pytest.raises(ConfigurationError, match="all arrive at once"):
        at_rate(jobs, 1.0)


def encode(text: str) -> list[int]:
    return list(map(ord, text))


def test_prompts_of_text_and_of_json(tmp_path: Path) -> None:
    text = read_prompts(write(tmp_path / "p.txt", "ab", "", "[1]"), encode, 6)
    assert [(one.token_ids, one.shape.num_output_tokens) for one in text] == [
        ((97, 98), 6), (tuple(map(ord, "[1]")), 6),
    ]  # fmt: skip
    rows = ["x", [4, 5], {"prompt": "y", "max_tokens": 3}, {"prompt_token_ids": [9], "n": 1}]
    lines = [json.dumps(row) for row in rows]
    listed = read_prompts(write(tmp_path / "p.jsonl", *lines), encode, 6)
    assert [(one.token_ids, one.shape.num_output_tokens) for one in listed] == [
        ((120,), 6), ((4, 5), 6), ((121,), 3), ((9,), 6),
    ]  # fmt: skip
    assert [one.shape.index for one in listed] == [0, 1, 2, 3]
    assert listed[2].source.endswith("p.jsonl:3")


def test_what_is_wrong_with_prompts_is_told_with_its_line(tmp_path: Path) -> None:
    for row, told in (
        ("5", ":1: a string, a list of token ids, or an object"),
        ('{"text": "a"}', ":1: a string, a list of token ids, or an object"),
        ('""', ":1: the prompt is empty"),
        ('{"prompt": "a", "max_tokens": 0}', ":1: max_tokens: a whole number of at least 1"),
        ("[1, -1]", ":1: a string, a list of token ids"),
    ):
        with pytest.raises(ConfigurationError) as error:
            read_prompts(write(tmp_path / "p.jsonl", row), encode, 4)
        assert told in str(error.value)
