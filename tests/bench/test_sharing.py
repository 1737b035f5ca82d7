"""``vmserve bench sharing``: what it counts, against hand-made cases, lengths and beams' tokens.

Nothing here looks at a time: only at counts, tokens and structure.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench import bench, compared_with_itself
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager
from vmserve_bench.sharing import prefix
from vmserve_bench.sharing.blocks import MAX_NUM_SEQS, parallel_from_lengths, run_engine
from vmserve_bench.sharing.prefix import Runner, translation_shapes
from vmserve_bench.sharing.record import Step, common_prefixes, count_memory, described, replay
from vmserve_bench.workloads.shapes import RequestShape


def shapes(*lengths: tuple[int, int]) -> list[RequestShape]:
    return [RequestShape(i, o, index=index) for index, (i, o) in enumerate(lengths)]


def listed_and_saved(counts: list[tuple[int, int]]) -> tuple[int, int]:
    listed = sum(listed for listed, _ in counts)
    return listed, listed - sum(distinct for _, distinct in counts)


# -- arithmetic


def test_both_averages_of_counts() -> None:
    found = described([(10, 5), (90, 90)])
    assert (found["listed"], found["distinct"], found["num_steps"]) == (100, 95, 2)
    assert (found["saved_percent"], found["mean_step_percent"]) == (5, 25)


def test_parallel_samples_one_by_one() -> None:
    # 6 and 7 tokens in two steps; the prompt has one full block of 4.
    assert parallel_from_lengths(shapes((5, 3)), 2, 4) == (2 + 2 * (2 + 2), 2 * 1)
    # The only generated token needs no keys and values.
    assert parallel_from_lengths(shapes((9, 1)), 2, 4) == (3, 0)
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


def test_common_prefixes_are_what_a_trie_of_blocks_shares() -> None:
    assert common_prefixes([[1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 5]]) == [3, 2]
    assert common_prefixes([[7] * 100 + [1], [7] * 100 + [2]]) == [100]
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
        Step([], [(0, 20)], [0]),
        Step([(1, 0, 20), (2, 0, 20)], [(0, 21), (1, 21), (2, 21)], [0, 1, 2]),
        Step([], [(1, 22)], [1]),
    ]
    assert replay(steps, 8) == [(3, 3), (9, 5), (3, 3)]
    # In pages of 16 tokens one page is shared; in pages of 32 none.
    assert replay(steps, 16, Regime.VIRTUAL, 16) == [(2, 2), (6, 4), (2, 2)]
    assert replay(steps, 16, Regime.VIRTUAL, 32) == [(1, 1), (3, 3), (1, 1)]
    steps[1] = steps[1]._replace(counted=False)
    assert replay(steps, 8) == [(3, 3), (3, 3)]


def test_a_count_that_misses_a_sequence_is_refused() -> None:
    layout = plan_layout(1, 1, 64, "float16", HOST_GRANULARITY, page_tokens=16)
    memory = MemoryManager(layout, num_slots=2, max_len=64, limit_bytes=1 << 20)
    seqs = [seq for _ in range(2) if (seq := memory.open(regime=Regime.PAGED)) is not None]
    plan = memory.plan([Growth(seq, 20) for seq in seqs])
    assert isinstance(plan, MemoryPlan)
    memory.complete(memory.apply(plan))
    assert count_memory(memory, seqs, Regime.PAGED) == (4, 4)
    with pytest.raises(RuntimeError, match="list 2 distinct blocks, memory counts 4"):
        count_memory(memory, seqs[:1], Regime.PAGED)
    memory.close()


def test_parallel_samples_of_the_engine_are_what_their_lengths_say() -> None:
    """With a place for every sequence: exactly, at each block size."""
    drawn = shapes((20, 10), (33, 7), (5, 12), (16, 1))
    engine = run_engine(drawn, "parallel", 3)
    assert listed_and_saved(engine.counts)[1] == 2 * (9 * 1 + 6 * 2)
    assert replay(engine.recorded, 16) == engine.counts
    assert len(engine.recorded) == 12
    for block in (8, 16, 32):
        counts = replay(engine.recorded, block)
        assert listed_and_saved(counts) == parallel_from_lengths(drawn, 3, block)


def test_where_sequences_wait_for_a_place_a_little_less_is_shared() -> None:
    """Prompts are read before their other samples start: one in ten at most is lost to that."""
    assert MAX_NUM_SEQS < 40 * 4
    drawn = shapes(*[(18, 8)] * 40)
    measured, analytic = (
        saved / listed
        for listed, saved in (
            listed_and_saved(run_engine(drawn, "parallel", 4).counts),
            parallel_from_lengths(drawn, 4, 16),
        )
    )
    assert 0.9 < measured / analytic < 1


def test_beams_share_what_their_tokens_allow() -> None:
    engine = run_engine(shapes((20, 20), (7, 24)), "beam", 3)
    steps = engine.recorded
    assert len({len(step.prefixes) for step in steps}) > 1
    assert sum(len(step.forks) for step in steps) > 4
    for block in (8, 16, 32):
        _, saved = listed_and_saved(replay(steps, block))
        assert saved == sum(p // block for step in steps for p in step.prefixes)
        assert saved > 0 or block == 32
    assert replay(steps, 16) == engine.counts
    # Pages of one block share as blocks do.
    assert replay(steps, 16, Regime.VIRTUAL, 16) == engine.counts


# -- the shared prefix


def test_translations_have_one_prefix_and_lengths_of_their_own() -> None:
    drawn = translation_shapes(50, 341, 3)
    assert {(shape.num_prefix_tokens, shape.prefix_group) for shape in drawn} == {(341, 0)}
    lengths = [length for s in drawn for length in (s.num_input_tokens - 341, s.num_output_tokens)]
    assert (min(lengths), max(lengths)) == (40, 60)


def test_the_cache_changes_no_token_and_is_empty_at_each_start() -> None:
    drawn = [RequestShape(80 + own, 4, 0.0, own, 0, 80) for own in (9, 17, 20)]
    small = {"kv_regime": "paged", "max_model_len": 256, "kv_cache_memory": "16MiB"}
    with_cache, without = (
        LLMEngine(EngineConfig(enable_prefix_caching=on, **small)) for on in (True, False)
    )
    expected = Runner(without, drawn, "at once")()
    for mode in ("at once", "in turn"):
        assert Runner(with_cache, drawn, mode)() == expected
    assert Runner(without, drawn, "in turn").hit_rate() == 0
    # The first request computes the prefix, the two others find it.
    for _ in range(2):
        found = Runner(with_cache, drawn, "in turn").hit_rate()
        assert found == pytest.approx(160 / (89 + 97 + 100))
    with_cache.close()
    without.close()


# -- the command


def run(directory: Path, section: str, more: str) -> dict[str, Any]:
    bench(f"sharing --section {section} --num-requests 2 {more} --output", directory)
    assert sorted(path.name for path in directory.iterdir()) == ["results.json", "tables.md"]
    written = compared_with_itself(directory / "results.json", "sharing")
    assert list(written["sections"]) == [section]
    found: dict[str, Any] = written["sections"][section]
    return found


def test_blocks_writes_results_and_tables(tmp_path: Path) -> None:
    found = run(tmp_path, "blocks", "--workload alpaca --widths 2 --block-sizes 8,16")
    assert [each["method"] for each in found["runs"]] == ["parallel", "beam"]
    for each in found["runs"]:
        by = [(size["block_tokens"], size["by"]) for size in each["sizes"]]
        assert by == [(8, "replay"), (16, "engine")]
        for size in each["sizes"]:
            assert size["saved_percent"] == pytest.approx(size["analytic_percent"])
            assert size["distinct"] <= size["listed"]
        assert each["virtual"]["page_tokens"] == 64
    parallel, beam = (each["sizes"][1]["workload_percent"] for each in found["runs"])
    assert parallel == pytest.approx(7.0, abs=0.1)
    assert beam is None
    assert "| alpaca | parallel | 2 | 16 |" in (tmp_path / "tables.md").read_text()


def test_prefix_writes_results_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(num_requests: int, num_prefix: int, seed: int) -> list[RequestShape]:
        return [RequestShape(num_prefix + 9, 3, 0.0, i, 0, num_prefix) for i in range(num_requests)]

    monkeypatch.setattr(prefix, "translation_shapes", short)
    monkeypatch.setattr(prefix, "SHOT_TOKENS", {"one-shot": 20})
    found = run(tmp_path, "prefix", "--pairs 1 --mode 'at once'")
    assert found["model"]["name"] == "embedded"
    cases = [(case["regime"], case["prefix_tokens"]) for case in found["cases"]]
    assert cases == [("virtual", 20), ("paged", 20)]
    for case in found["cases"]:
        assert case["requests_with_same_tokens"] == case["num_requests"] == 2
        assert case["paired"]["num_pairs"] == 1
        assert 0 <= case["hit_rate"] < 1
