"""Orca and static batching: reservations, buddies, and time by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.support.simulation import SECONDS
from vmserve_bench.simulation import Asked, replay
from vmserve_bench.simulation.baselines import Buddies, Knowledge, Place, Reserving, reserved_tokens


def system(knowledge: Knowledge, tokens: int = 64, *, is_static: bool = False) -> Reserving:
    return Reserving(
        knowledge, tokens, SECONDS, token_bytes=1, context=32, max_num_seqs=16, is_static=is_static
    )


def one(name: str, prompt: int, output: int, n: int = 1, **more: object) -> Asked:
    return Asked(name=name, prompt=tuple(range(prompt)), outputs=(output,) * n, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knowledge", "num_prompt", "num_output", "reserved", "at_once"),
    # Chunks are powers of two of 3,932 = 2048 + 1024 + 512 + 256 + 64 + 16 + 8 + 4 positions.
    [
        ("oracle", 36, 28, 64, 61),
        ("oracle", 36, 29, 65, 30),
        ("pow2", 36, 20, 68, 30),
        ("pow2", 36, 16, 52, 61),
        ("pow2", 300, 200, 512, 7),
        ("max", 1, 1, 512, 7),
    ],
)
def test_what_is_reserved(
    knowledge: Knowledge, num_prompt: int, num_output: int, reserved: int, at_once: int
) -> None:
    count = reserved_tokens(knowledge, num_prompt, num_output, 512)
    assert count == reserved
    pool = Buddies(3932)
    places = [pool.allocate(count) for _ in range(at_once)]
    assert pool.allocate(count) is None
    assert pool.allocate(count, 3) is None
    pool.free(places[3] or [])
    assert pool.allocate(count) is not None


def test_buddies_give_back_what_they_gave() -> None:
    rng = random.Random(0)
    pool = Buddies(1000)
    held: list[list[Place]] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
        elif found := pool.allocate(rng.randint(1, 200), rng.randint(1, 2)):
            held.append(found)
        chunks = sorted((i, a, a + c) for places in held for i, a, c in places)
        assert all(x[0] != y[0] or x[2] <= y[1] for x, y in itertools.pairwise(chunks))
        assert pool.num_free == 1000 - sum(end - begin for _, begin, end in chunks)
    for places in held:
        pool.free(places)
    assert pool.allocate(512) is not None


def test_orca_reads_a_prompt_beside_those_that_decode() -> None:
    engine = system("oracle")
    run = replay(engine, [one("a", 10, 4), one("b", 5, 2, arrival_s=0.5)])
    steps = [(step.num_tokens, step.num_seqs) for step in run.steps]
    assert steps == [(10, 1), (6, 2), (2, 2), (1, 1)]
    assert [round(step.seconds, 2) for step in run.steps] == [1.1, 1.06, 1.02, 1.01]
    ends = {record.name: record for record in run.requests}
    assert ends["b"].finished == pytest.approx(3.18)
    assert ends["b"].ttft == pytest.approx(2.16 - 0.5)
    assert ends["a"].latency == pytest.approx(4.19)
    assert engine.pool.num_free == 64


def test_choices_have_memory_and_prompts_of_their_own() -> None:
    engine = system("oracle")
    run = replay(engine, [one("a", 10, 6, n=4), one("b", 2, 2)])
    assert [(step.num_tokens, step.num_seqs) for step in run.steps[:2]] == [(40, 4), (4, 4)]
    assert run.requests[-1].name == "b"
    assert run.requests[0].num_output == 24


def test_beams_that_are_overtaken_are_copied() -> None:
    engine = Reserving("oracle", 256, SECONDS, token_bytes=10**15, context=64, max_num_seqs=16)
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
