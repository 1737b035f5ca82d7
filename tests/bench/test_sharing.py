"""``vmserve bench sharing``: what it counts, against hand-made cases, lengths and beams' tokens.

Nothing here looks at a time: only at counts, tokens and structure.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from vmserve_bench.command import app
from vmserve_bench.lab.suite import numbers
from vmserve_bench.sharing import SUITE, prefix
from vmserve_bench.sharing.blocks import MAX_NUM_SEQS, run_engine
from vmserve_bench.sharing.command import sharing_command
from vmserve_bench.sharing.count import Tally, common_prefixes, parallel_from_lengths
from vmserve_bench.sharing.prefix import Runner, translation_shapes
from vmserve_bench.sharing.record import ForkOf, Step, count_memory, replay
from vmserve_bench.sharing.reference import PAPER_PREFIX_SPEEDUP, PAPER_SAVED_PERCENT, SHOT_TOKENS
from vmserve_bench.workloads.shapes import RequestShape

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager


def shapes(*lengths: tuple[int, int]) -> list[RequestShape]:
    return [RequestShape(i, o, index=index) for index, (i, o) in enumerate(lengths)]


def saved(tally: Tally) -> int:
    return tally.listed - tally.distinct


# -- arithmetic


def test_quoted_figures() -> None:
    """PagedAttention, section 6.3 with figure 15, section 6.4 with figure 16."""
    assert dict(PAPER_SAVED_PERCENT) == {
        ("alpaca", "parallel"): (6.1, 9.8),
        ("alpaca", "beam"): (37.6, 55.2),
        ("sharegpt", "parallel"): (16.2, 30.5),
        ("sharegpt", "beam"): (44.3, 66.3),
    }
    assert dict(SHOT_TOKENS) == {"one-shot": 80, "five-shot": 341}
    assert dict(PAPER_PREFIX_SPEEDUP) == {"one-shot": 1.67, "five-shot": 3.58}


def test_a_tally_has_both_averages() -> None:
    tally = Tally()
    assert (tally.saved_percent, tally.mean_step_percent) == (0.0, 0.0)
    tally.add(10, 5)
    tally.add(90, 90)
    assert tally.saved_percent == 5.0
    assert tally.mean_step_percent == 25.0
    assert tally.to_dict()["num_steps"] == 2
    for listed, distinct in ((3, 4), (3, 0)):
        with pytest.raises(ValueError, match="cannot be"):
            tally.add(listed, distinct)


@pytest.mark.parametrize(
    ("lengths", "listed", "saved_blocks"),
    [
        ((5, 3), 2 + 2 * (2 + 2), 2 * 1),  # 6 and 7 tokens; the prompt has one full block of 4
        ((4, 3), 1 + 2 * (2 + 2), 2 * 1),
        ((3, 4), 1 + 2 * (1 + 2 + 2), 0),
        ((9, 1), 3, 0),  # the only generated token needs no keys and values
    ],
)
def test_parallel_samples_by_hand(lengths: tuple[int, int], listed: int, saved_blocks: int) -> None:
    assert parallel_from_lengths(shapes(lengths), 2, 4) == (listed, saved_blocks)


def test_parallel_samples_one_by_one() -> None:
    rng = random.Random(1)
    drawn = shapes(*((rng.randint(1, 90), rng.randint(1, 90)) for _ in range(50)))
    for width, block in ((2, 8), (6, 16), (4, 1)):
        listed = shared = 0
        for shape in drawn:
            prompt, output = shape.num_input_tokens, shape.num_output_tokens
            listed += -(-prompt // block)
            for length in range(prompt + 1, prompt + output):
                listed += width * -(-length // block)
                shared += (width - 1) * (prompt // block)
        assert parallel_from_lengths(drawn, width, block) == (listed, shared)


def test_common_prefixes_by_hand() -> None:
    assert common_prefixes([[1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 5]]) == [3, 2]
    assert common_prefixes([[1, 2], [2, 1]]) == [0]
    assert common_prefixes([[1, 2]]) == []
    assert common_prefixes([[7] * 100 + [1], [7] * 100 + [2]]) == [100]


def test_common_prefixes_are_what_a_trie_of_blocks_shares() -> None:
    rng = random.Random(2)
    for _ in range(50):
        block, length = rng.choice([1, 2, 4]), rng.randint(1, 12)
        histories = {tuple(rng.randint(0, 1) for _ in range(length)) for _ in range(6)}
        full = length // block
        prefixes = {row[: (k + 1) * block] for row in histories for k in range(full)}
        shared = sum(p // block for p in common_prefixes([list(row) for row in histories]))
        assert len(histories) * full - shared == len(prefixes)


# -- recordings


def test_a_replay_of_hand_made_steps() -> None:
    """20 tokens, forked twice: two full blocks of 8 stay shared, the third is copied."""
    steps = [
        Step((), ((0, 20),), (0,)),
        Step((ForkOf(1, 0, 20), ForkOf(2, 0, 20)), ((0, 21), (1, 21), (2, 21)), (0, 1, 2)),
        Step((), ((1, 22),), (1,)),
    ]
    tally = replay(steps, 8)
    assert (tally.num_steps, tally.listed, tally.distinct) == (3, 3 + 9 + 3, 3 + 5 + 3)
    # In pages of 16 tokens one page is shared; in pages of 32 none.
    tally = replay(steps, 16, Regime.VIRTUAL, 16)
    assert (tally.listed, tally.distinct) == (2 + 6 + 2, 2 + 4 + 2)
    tally = replay(steps, 16, Regime.VIRTUAL, 32)
    assert (tally.listed, tally.distinct) == (1 + 3 + 1, 1 + 3 + 1)
    steps[1] = Step(*(getattr(steps[1], name) for name in ("forks", "growths", "live")), False)
    assert replay(steps, 8).listed == 3 + 3


def test_a_count_that_misses_a_sequence_is_refused() -> None:
    layout = plan_layout(1, 1, 64, "float16", HOST_GRANULARITY, page_tokens=16)
    memory = MemoryManager(layout, num_slots=2, max_len=64, limit_bytes=1 << 20)
    seqs = [memory.open(regime=Regime.PAGED) for _ in range(2)]
    assert None not in seqs
    plan = memory.plan([Growth(seq, 20) for seq in seqs if seq is not None])
    assert isinstance(plan, MemoryPlan)
    memory.complete(memory.apply(plan))
    tally = Tally()
    count_memory(memory, [seq for seq in seqs if seq is not None], Regime.PAGED, tally)
    assert (tally.listed, tally.distinct) == (4, 4)
    with pytest.raises(RuntimeError, match="list 2 distinct blocks, memory counts 4"):
        count_memory(memory, [0], Regime.PAGED, tally)
    memory.close()


def test_parallel_samples_of_the_engine_are_what_their_lengths_say() -> None:
    """With a place for every sequence: exactly, at each block size."""
    drawn = shapes((20, 10), (33, 7), (5, 12), (16, 1))
    recorder, _ = run_engine(drawn, "parallel", 3)
    assert (recorder.tally.listed, saved(recorder.tally)) == parallel_from_lengths(drawn, 3, 16)
    assert saved(recorder.tally) == 2 * (9 * 1 + 6 * 2)
    assert len(recorder.steps) == 12
    assert replay(recorder.steps, 16) == recorder.tally
    for block in (8, 32):
        tally = replay(recorder.steps, block)
        assert (tally.listed, saved(tally)) == parallel_from_lengths(drawn, 3, block)


def test_where_sequences_wait_for_a_place_a_little_less_is_shared() -> None:
    """Prompts are read before their other samples start: one in ten at most is lost to that."""
    drawn = shapes(*[(18, 8)] * 40)
    recorder, _ = run_engine(drawn, "parallel", 4)
    listed, shared = parallel_from_lengths(drawn, 4, 16)
    quotient = recorder.tally.saved_percent / (100 * shared / listed)
    assert MAX_NUM_SEQS < 40 * 4
    assert 0.9 < quotient < 1


def test_beams_share_what_their_tokens_allow() -> None:
    recorder, _ = run_engine(shapes((20, 20), (7, 24)), "beam", 3)
    steps = recorder.steps
    assert len({len(step.prefixes) for step in steps}) > 1
    assert sum(len(step.forks) for step in steps) > 4
    for block in (8, 16, 32):
        tally = replay(steps, block)
        assert saved(tally) == sum(p // block for step in steps for p in step.prefixes)
        assert saved(tally) > 0 or block == 32
    assert replay(steps, 16) == recorder.tally
    # Pages of one block share as blocks do.
    assert replay(steps, 16, Regime.VIRTUAL, 16) == recorder.tally


# -- the shared prefix


@pytest.fixture(scope="module")
def engines() -> Iterator[list[LLMEngine]]:
    made = [
        LLMEngine(
            EngineConfig(
                kv_regime="paged",
                enable_prefix_caching=on,
                max_model_len=256,
                kv_cache_memory="16MiB",
            )
        )
        for on in (True, False)
    ]
    yield made
    for engine in made:
        engine.close()


def test_translations_have_one_prefix_and_lengths_of_their_own() -> None:
    drawn = translation_shapes(50, 341, 3)
    assert drawn == translation_shapes(50, 341, 3)
    assert {(shape.num_prefix_tokens, shape.prefix_group) for shape in drawn} == {(341, 0)}
    own = [shape.num_input_tokens - 341 for shape in drawn]
    out = [shape.num_output_tokens for shape in drawn]
    assert min(own + out) == 40
    assert max(own + out) == 60


@pytest.mark.parametrize("mode", ["at once", "in turn"])
def test_the_cache_changes_no_token_and_is_empty_at_each_start(
    engines: list[LLMEngine], mode: Any
) -> None:
    drawn = [RequestShape(80 + own, 4, 0.0, own, 0, 80) for own in (9, 17, 20)]
    cached, uncached = (Runner(engine, drawn, mode) for engine in engines)
    assert cached() == uncached()
    if mode == "in turn":
        # The first request computes the prefix, the two others find it.
        for _ in range(2):
            assert cached.hit_rate() == pytest.approx(160 / (89 + 97 + 100))
    assert uncached.hit_rate() == 0


# -- the command


def test_it_is_a_command() -> None:
    assert "sharing" in typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert list(SUITE.sections) == ["blocks", "prefix"]


def test_numbers_of_an_option() -> None:
    assert numbers("widths", "6, 2,4,2", least=2) == (2, 4, 6)
    for text in ("1", "2,x", "", "2,,4", "-4"):
        with pytest.raises(ConfigurationError, match="--widths"):
            numbers("widths", text, least=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"section": "block"}, "no section is named 'block': choose from blocks, prefix"),
        ({"widths": "1,2"}, "'1' is no whole number of at least 2"),
        ({"block_sizes": "16,24"}, "24 is no power of two"),
        ({"workload": "alpaca,books"}, "--workload: no workload is named 'books'"),
        ({"mode": "twice"}, "no mode is named 'twice'"),
    ],
)
def test_errors_come_before_anything_is_measured(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sharing_command(output=tmp_path / "results", **options)
    assert not (tmp_path / "results").exists()


def test_blocks_writes_results_tables_and_plots(tmp_path: Path) -> None:
    sharing_command(
        section="blocks",
        num_requests=2,
        workload="alpaca",
        widths="2",
        block_sizes="8,16",
        output=tmp_path,
        json_path=tmp_path / "more" / "r.json",
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "results.json",
        "saved-by-block-size.png",
        "saved-by-width.png",
        "tables.md",
    ]
    described = json.loads((tmp_path / "results.json").read_text())
    assert described == json.loads((tmp_path / "more" / "r.json").read_text())
    assert described["benchmark"] == "sharing"
    assert set(described["sections"]) == {"blocks"}
    parallel, beam = described["sections"]["blocks"]["runs"]
    assert (parallel["method"], beam["method"]) == ("parallel", "beam")
    assert parallel["paper_percent"] == [6.1, 9.8]
    for run in (parallel, beam):
        assert [(size["block_tokens"], size["by"]) for size in run["sizes"]] == [
            (8, "replay"),
            (16, "engine"),
        ]
        for size in run["sizes"]:
            assert size["saved_percent"] == pytest.approx(size["analytic_percent"])
            assert size["distinct"] <= size["listed"]
        assert run["virtual"]["page_tokens"] == 64
    assert parallel["sizes"][1]["workload_percent"] == pytest.approx(7.0, abs=0.1)
    assert beam["sizes"][1]["workload_percent"] is None
    tables = (tmp_path / "tables.md").read_text()
    assert described["machine"]["cpu"] in tables.splitlines()[0]
    assert "| alpaca, parallel | 2 |" in tables


def test_prefix_writes_results_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(num_requests: int, num_prefix: int, seed: int) -> list[RequestShape]:
        return [RequestShape(num_prefix + 9, 3, 0.0, i, 0, num_prefix) for i in range(num_requests)]

    monkeypatch.setattr(prefix, "translation_shapes", short)
    sharing_command(section="prefix", num_requests=2, pairs=1, mode="at once", output=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "prefix.png",
        "results.json",
        "tables.md",
    ]
    section = json.loads((tmp_path / "results.json").read_text())["sections"]["prefix"]
    assert section["model"]["name"] == "embedded"
    assert [(case["regime"], case["prefix_tokens"]) for case in section["cases"]] == [
        ("virtual", 80),
        ("virtual", 341),
        ("paged", 80),
        ("paged", 341),
    ]
    for case in section["cases"]:
        assert case["requests_with_same_tokens"] == case["num_requests"] == 2
        assert case["paired"]["num_pairs"] == 1
        assert 0 <= case["hit_rate"] < 1
