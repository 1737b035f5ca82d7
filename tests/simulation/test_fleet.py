"""Many replicas in virtual time: the light model of a replica against the real engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.scale.workloads import of_trace
from vmserve.router.policy import Policy, Router
from vmserve_bench.ab.jobs import Job as Request
from vmserve_bench.ab.jobs import ideal_hit_rate
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.devices import LLAMA_8B_A100
from vmserve_bench.simulation.fleet import (
    PIECE_TOKENS,
    EngineReplica,
    FleetRun,
    Job,
    Replica,
    replay,
)
from vmserve_bench.simulation.light import LightReplica
from vmserve_bench.workloads.shapes import RequestShape

CACHE_PIECES = LLAMA_8B_A100.kv_tokens // PIECE_TOKENS


def light() -> Replica:
    return LightReplica(LLAMA_8B_A100.profile, CACHE_PIECES)


def real() -> Replica:
    config = SimulationConfig.of(LLAMA_8B_A100, max_model_len=4096, regime="paged")
    return EngineReplica(SimulatedEngine(config))


def jobs(num: int, rate: float, num_prefixes: int) -> list[Job]:
    rng = random.Random(1)
    now = 0.0
    made = []
    for index in range(num):
        now += rng.expovariate(rate)
        first = 100 * rng.randrange(num_prefixes)
        own = 10**6 + 100 * index
        length = rng.randint(2, 6)
        made.append(Job([*range(first, first + 24), *range(own, own + length)], 64, now))
    return made


def served(asked: list[Job], policy: Policy = "prefix", **replicas: Replica) -> FleetRun:
    router = Router(policy, block_tokens=1)
    for name in replicas:
        router.join(name, CACHE_PIECES)
    return replay(replicas, router, asked)


def two(
    make: Callable[[], Replica], policy: Policy, num: int = 120, num_prefixes: int = 20
) -> FleetRun:
    return served(jobs(num, 6, num_prefixes), policy, a=make(), b=make())


@pytest.mark.parametrize("policy", ["prefix", "round-robin"])
def test_the_light_replica_is_near_the_real_engine(policy: Policy) -> None:
    light_run, real_run = two(light, policy), two(real, policy)
    for run in (light_run, real_run):
        assert all(job.arrival < job.first_token < job.finished for job in run.jobs)
    assert light_run.hit_rate(0.2) == pytest.approx(real_run.hit_rate(0.2), abs=0.05)
    assert light_run.finished_per_second(0.2) == pytest.approx(
        real_run.finished_per_second(0.2), rel=0.05
    )
    medians = [np.median(run.ttft(0.2)) for run in (light_run, real_run)]
    assert medians[0] == pytest.approx(medians[1], rel=0.2)


def test_prefixes_are_found_again_where_they_were_sent() -> None:
    """More prefixes than one cache holds, and no more than two hold."""
    by_prefix, in_turn = (two(light, policy, 800, 120) for policy in ("prefix", "round-robin"))
    assert by_prefix.hit_rate(0.5) > 1.3 * in_turn.hit_rate(0.5) > 0


def test_one_request_takes_the_time_of_its_steps() -> None:
    """A prompt of two steps, then one step for each further token, by the profile's prices."""
    profile = LLAMA_8B_A100.profile
    job = Job(list(range(40)), 3, 1.0)
    served([job], a=light())
    kernels = profile.paged
    prompt = sum(
        profile.linear_seconds(num) + kernels.call + kernels.pair * num * (past + (num + 1) / 2)
        for past, num in ((0, 2048), (2048, 512))
    )
    decode = sum(profile.linear_seconds(1) + kernels.call + kernels.read * n for n in (2561, 2562))
    assert job.first_token == pytest.approx(1.0 + prompt, rel=1e-9)
    assert job.finished == pytest.approx(1.0 + prompt + decode, rel=1e-9)


def test_an_arrival_waits_for_the_step_that_runs_and_no_longer() -> None:
    profile = LLAMA_8B_A100.profile
    first, second = Job([0], 1000, 0.0), Job([1], 1, 2.0)
    served([first, second], a=light())
    step = profile.linear_seconds(1) + profile.paged.call + profile.paged.read * 300
    own = profile.linear_seconds(65) + profile.paged.call
    assert own < second.first_token - 2.0 < own + 1.1 * step


def test_a_full_cache_forgets_the_least_recently_used_pieces() -> None:
    def at(index: int, first: int) -> Job:
        return Job(list(range(first, first + 10)), 1, float(index))

    asked = [at(0, 0), at(1, 100), at(2, 0), at(3, 200), at(4, 0), at(5, 100)]
    served(asked, a=LightReplica(LLAMA_8B_A100.profile, 25))
    # The third one uses the first pieces, so the fourth pushes out the second's.
    assert [job.num_cached for job in asked] == [0, 0, 9, 0, 9, 4]


def request(num_input: int, at: float, *hash_ids: int) -> Request:
    shape = RequestShape(num_input, 4, at)
    return Request(shape, hash_ids=hash_ids, block_tokens=512, source="t.jsonl:1")


def test_one_cache_without_a_limit_finds_what_a_trace_repeats() -> None:
    trace = [
        request(1100, 0.0, 0, 1, 2),
        request(2048, 10.0, 0, 1, 4, 5),
        request(700, 20.0, 0, 6),
        request(1536, 30.0, 0, 1, 4),
    ]
    asked = list(of_trace(trace))
    assert [len(job.pieces) for job in asked] == [18, 32, 11, 24]
    run = served(asked, a=light())
    # Of a prompt that is there the last piece is computed again.
    assert [job.num_cached for job in run.jobs] == [0, 16, 8, 23]
    ideal = ideal_hit_rate(trace)
    assert ideal == (1024 + 512 + 1536) / (1100 + 2048 + 700 + 1536)
    assert run.hit_rate(0) == pytest.approx(ideal, abs=0.02)
    for wrong in (request(1100, 0.0, 0, 1), request(9, 0.0)):
        with pytest.raises(ValueError, match=r"t\.jsonl:1: hash_ids"):
            list(of_trace([wrong]))
