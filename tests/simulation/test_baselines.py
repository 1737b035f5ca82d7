"""Orca and static batching: reservations, buddies, and time by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from vmserve_bench.simulation import Asked, asked, replay
from vmserve_bench.simulation.baselines import Buddies, Knowledge, Reserving, reserved_tokens
from vmserve_bench.workloads.shapes import sharegpt

from tests.simulation.test_engine import SECONDS


def system(knowledge: Knowledge, tokens: int = 64, *, is_static: bool = False) -> Reserving:
    return Reserving(
        knowledge, tokens, SECONDS, token_bytes=1, context=32, max_num_seqs=16, is_static=is_static
    )


def one(name: str, prompt: int, output: int, n: int = 1, **more: object) -> Asked:
    return Asked(name=name, prompt=tuple(range(prompt)), outputs=(output,) * n, **more)  # type: ignore[arg-type]


def test_what_is_reserved() -> None:
    assert reserved_tokens("oracle", 100, 33, 2048) == 133
    assert reserved_tokens("pow2", 100, 33, 2048) == 164
    assert reserved_tokens("pow2", 1500, 1000, 2048) == 2048
    assert reserved_tokens("max", 1, 1, 2048) == 2048


def test_buddies_of_any_size_give_back_what_they_gave() -> None:
    pool = Buddies(15_728)
    assert [pool.allocate(2048) is not None for _ in range(8)] == [True] * 7 + [False]
    rng = random.Random(0)
    pool = Buddies(1000)
    places: list[tuple[int, int, int]] = []
    for _ in range(500):
        if places and rng.random() < 0.5:
            pool.free(places.pop(rng.randrange(len(places))))
        elif (place := pool.allocate(rng.randint(1, 200))) is not None:
            places.append(place)
            chunks = sorted((i, a, a + c) for i, a, c in places)
            assert all(x[0] != y[0] or x[2] <= y[1] for x, y in itertools.pairwise(chunks))
        assert pool.num_free == 1000 - sum(chunk for _, _, chunk in places)
    for place in places:
        pool.free(place)
    assert pool.allocate(512) is not None


def test_orca_reads_a_prompt_beside_those_that_decode() -> None:
    engine = system("oracle")
    run = replay(engine, [one("a", 10, 4), one("b", 5, 2, arrival_s=0.5)])
    assert [(step.num_tokens, step.num_seqs) for step in run.steps] == [
        (10, 1),
        (6, 2),
        (2, 2),
        (1, 1),
    ]
    assert [round(step.seconds, 2) for step in run.steps] == [1.1, 1.06, 1.02, 1.01]
    ends = {record.name: record for record in run.requests}
    assert ends["b"].finished == pytest.approx(3.18)
    assert ends["b"].ttft == pytest.approx(2.16 - 0.5)
    assert ends["a"].latency == pytest.approx(4.19)
    assert engine.num_free == 64


def test_max_lets_in_what_the_longest_would_leave() -> None:
    requests = [one(str(i), 4, 4) for i in range(4)]
    assert max(step.num_requests for step in replay(system("max"), requests).steps) == 2
    assert max(step.num_requests for step in replay(system("oracle"), requests).steps) == 4


def test_choices_have_memory_and_prompts_of_their_own() -> None:
    engine = system("oracle")
    run = replay(engine, [one("a", 10, 6, n=4), one("b", 2, 2)])
    assert [(step.num_tokens, step.num_seqs) for step in run.steps[:2]] == [(40, 4), (4, 4)]
    assert run.requests[-1].name == "b"
    assert run.requests[0].num_output == 24


def test_beams_that_are_overtaken_are_copied() -> None:
    profile = SECONDS
    engine = Reserving("oracle", 256, profile, token_bytes=10**15, context=64, max_num_seqs=16)
    run = replay(engine, [one("a", 10, 20, beam_width=4)])
    # A copied position takes a second here: some steps copy beams of 10 tokens and more.
    assert run.steps[0].seconds == pytest.approx(1.4)
    slow = [step.seconds for step in run.steps if step.seconds > 5]
    assert slow
    assert min(slow) > 10
    assert run.requests[0].num_output == 80


def test_a_static_batch_ends_as_a_whole() -> None:
    requests = [one("a", 4, 2), one("b", 4, 6), one("c", 4, 1)]
    run = replay(system("max", is_static=True), requests)
    ends = {record.name: record.finished for record in run.requests}
    assert ends["a"] == ends["b"] < ends["c"]
    assert [step.num_seqs for step in run.steps] == [2] * 6 + [1]


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        system("oracle").add(one("a", 30, 3))
    engine = system("max")
    engine.add(one("a", 2, 2, n=3))
    with pytest.raises(ValueError, match="does not fit into an empty pool"):
        engine.step()


def test_a_baseline_serves_every_request() -> None:
    requests = asked(sharegpt(40, seed=1, request_rate=2.0))
    for knowledge in ("oracle", "pow2", "max"):
        engine = Reserving(knowledge, 15_728, SECONDS, token_bytes=1)  # type: ignore[arg-type]
        run = replay(engine, requests)
        assert run.num_finished == 40
        assert engine.num_free == 15_728
