"""A slice of what ``python -m tests.lives.engines`` runs: some rows of one covering array."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.lives.engines import AXES, Lives, allowed, rows_of
from tests.lives.pairs import pairs_of

SEED = 1
#: Rows of the array that are run; VMSERVE_LIVES_ROWS=all runs all.
ROWS = os.environ.get("VMSERVE_LIVES_ROWS", "16")


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    lives = Lives(tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


def test_engines_answer_as_if_they_were_roomy_and_alone(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    """In small pools, with persistence, drafts, aborts, conversions, limits that change, memory
    that is refused, and steps that fail."""
    caplog.set_level("CRITICAL")
    rows = rows_of(SEED)
    assert all(map(allowed, rows))
    assert len(set().union(*map(pairs_of, rows))) > 2300
    places = range(len(rows)) if ROWS == "all" else range(0, len(rows), len(rows) // int(ROWS))
    for place in places:
        lives.run(rows[place], f"{SEED}:{place}")
    counts = lives.counts
    assert counts["answers"] > 4 * len(places)
    for name in (
        "num_preemptions_total", "num_swapped_out_total", "persist_restored_blocks_total",
        "forks_total", "converted_to_paged_total", "converted_to_virtual_total",
        "evicted_blocks_total", "prefix_cache_hits_total", "steps_overlapped_total",
        "spec_decode_num_accepted_tokens_total",
    ):  # fmt: skip
        assert counts[name] > 0, name
    assert {*AXES} == {*rows[0]}
