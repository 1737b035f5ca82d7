"""``vmserve bench step``: what is timed is a decoding step, and its parts add up to it.

Nothing here looks at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.bench import bench, compared_with_itself
from vmserve.errors import ConfigurationError
from vmserve_bench import step
from vmserve_bench.step import BEYOND, PARTS, REGIMES, Case, SteppedEngine, Stopwatch

if TYPE_CHECKING:
    from vmserve.scheduler.sequence import Sequence
    from vmserve_bench.step import Regimes


@pytest.mark.parametrize("regime", REGIMES)
def test_the_parts_of_a_step_add_up_to_it(regime: Regimes) -> None:
    engine = SteppedEngine(Case(regime, 6), 5)
    stats = engine.engine.memory.stats()
    num_virtual = {"virtual": 6, "paged": 0, "mixed": 3}[regime]
    assert (stats.virtual_seqs, stats.paged_seqs) == (num_virtual, 6 - num_virtual)
    before = [list(seq.tokens) for seq in sequences(engine)]
    for _ in range(5):
        engine.step()
    assert [seq.tokens for seq in sequences(engine)] == [tokens + [17] * 5 for tokens in before]
    assert {part: len(samples) for part, samples in engine.samples.items()} == dict.fromkeys(
        (*PARTS, *BEYOND, "step"), 5
    )
    for index, whole in enumerate(engine.samples["step"]):
        parts = {part: engine.samples[part][index] for part in (*PARTS, *BEYOND)}
        assert all(part > 0 for part in parts.values())
        assert sum(parts.values()) == whole
    engine.close()


def test_a_step_that_is_no_decode_of_everybody_is_refused() -> None:
    engine = SteppedEngine(Case("virtual", 2), 5)
    engine.engine.abort("0")
    with pytest.raises(RuntimeError, match="computed 1 tokens"):
        engine.step()
    engine.close()


def test_a_part_is_without_what_is_watched_within() -> None:
    class Nested:
        def outer(self) -> str:
            return self.inner() + self.inner()

        def inner(self) -> str:
            return "x"

    nested, watch = Nested(), Stopwatch()
    watch.watch(nested, "inner", "inner")
    watch.watch(nested, "outer", "outer")
    watch.watch(nested, "outer", "around")
    assert nested.outer() == "xx"
    assert set(watch.spent) == {"inner", "outer", "around"}
    assert watch._within == sum(watch.spent.values())


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path, tables = tmp_path / "out" / "r.json", tmp_path / "t.md"
    printed = bench("step --num-seqs 1,3 --steps 2", "--json", path, "--markdown", tables)
    assert "us / sequence" in printed
    written = compared_with_itself(path, "step")
    assert written["benchmark"] == "step"
    rows = written["sections"]["step"]["rows"]
    assert [(row["num_seqs"], row["regime"]) for row in rows] == [
        (count, regime) for count in (1, 3) for regime in REGIMES
    ]
    for row in rows:
        assert row["overhead_ns_per_sequence"] == row["overhead_ns"]["median"] / row["num_seqs"]
        assert row["parts_ns"]["step"]["num_samples"] == 2
    assert tables.read_text().count("| 3 | mixed |") == 2


def sequences(engine: SteppedEngine) -> list[Sequence]:
    requests = engine.engine._requests.values()
    return [sequence for request in requests for sequence in request.sequences]


def test_steps_end_with_the_context() -> None:
    """The most that can be asked for is what an engine can still be made for."""
    engine = SteppedEngine(Case("paged", 1), step._MAX_STEPS)
    assert engine.engine.resolved.max_model_len == 8192
    engine.close()
    with pytest.raises(ConfigurationError, match="8193 is above the model's own context"):
        SteppedEngine(Case("paged", 1), step._MAX_STEPS + 1)
