"""The simulated engine: the same steps as the real one, virtual time, books that balance."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.simulation import FREE, LAYOUT, SECONDS, config, simulate, steps_of
from vmserve import LLM, SamplingParams, _core
from vmserve.memory.base import Regime
from vmserve.memory.layout import layer_kinds
from vmserve_bench.simulation import Asked, Run, SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.devices import OPT_13B_A100, opt_13b
from vmserve_bench.workloads.shapes import sharegpt


def some(
    num: int, *, length: int = 60, output: int = 20, n: int = 1, beams: int = 0
) -> list[Asked]:
    return [
        Asked(
            name=str(i),
            prompt=tuple(range(i, i + length + 7 * i)),
            outputs=(output + i,) * n,
            beam_width=beams,
            seed=i,
        )
        for i in range(num)
    ]


def test_the_clock_is_the_profile_of_the_work() -> None:
    run, _ = simulate(some(1, length=64, output=3), regime="paged")
    assert [step.num_tokens for step in run.steps] == [64, 1, 1]
    assert [step.seconds for step in run.steps] == pytest.approx([1.64, 1.01, 1.01])
    [record] = run.requests
    assert record.first_scheduled == 0.0
    assert record.ttft == pytest.approx(1.64)
    assert record.latency == pytest.approx(3.66)
    assert record.normalized_latency == pytest.approx(1.22)


def test_only_pages_that_a_step_waits_for_cost_their_map_call() -> None:
    requests = some(1, length=32, output=70)
    waiting, engine = simulate(requests, regime="virtual", mapper="off")
    slow = [index for index, step in enumerate(waiting.steps) if step.seconds > 10]
    assert slow == [0, 1, 33, 65]
    assert engine.run.counters["pages_mapped_total"] == 4
    # The mapper has no free page to map in the first step: it commits some meanwhile.
    ahead, _ = simulate(requests, regime="virtual", mapper="manual", lookahead_tokens=16)
    assert [index for index, step in enumerate(ahead.steps) if step.seconds > 10] == [0, 1]
    paged, _ = simulate(requests, regime="paged")
    assert max(step.seconds for step in paged.steps) < 2


def test_a_simulation_repeats_exactly() -> None:
    requests = [*some(6, n=2), dataclasses.replace(some(1, beams=3)[0], name="beams")]
    options: dict[str, Any] = {"pages": 14, "preemption": "swap", "swap_bytes": 8 << 20}
    first, second = (simulate(requests, **options)[0] for _ in range(2))
    assert first == second
    assert first.num_finished == 7


@pytest.mark.parametrize(
    ("regime", "swap"), [("virtual", 0), ("virtual", 16 << 20), ("paged", 16 << 20)]
)
def test_its_steps_are_those_of_the_real_engine(regime: Any, swap: int) -> None:
    """Which computes with the embedded model."""
    requests = [*some(5, output=70), dataclasses.replace(some(1, n=3, output=70)[0], name="three")]
    preemption = "swap" if swap else "recompute"
    options = {"regime": regime, "mapper": "off", "prefix_caching": False, "swap_bytes": swap}
    with SimulatedEngine(config(preemption=preemption, **options)) as engine:
        seen = steps_of(engine.scheduler)
        replay(engine, requests)
    assert engine.run.counters["num_preemptions_total"] > 0
    with LLM(
        dtype="float32",
        kv_cache_memory=12 * LAYOUT.total_page_bytes,
        kv_page_size=LAYOUT.shape.page_bytes,
        kv_regime=regime,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        kv_mapper="off",
        swap_space=swap,
        preemption=preemption,
    ) as llm:
        real: Any = llm.engine
        expected = steps_of(real.scheduler)
        for what in requests:
            counts = {"n": len(what.outputs), "max_tokens": what.max_output}
            params = SamplingParams(ignore_eos=True, **counts)
            real.add_request(what.name, [1 + t for t in what.prompt], params)
        while real.has_unfinished:
            real.step()
        assert real.scheduler.totals.preemptions > 0
    assert seen == expected


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_prompts_that_agree_are_found_in_the_cache(regime: Any) -> None:
    requests = [
        Asked(name=str(i), prompt=(*range(96), i), outputs=(2,), arrival_s=100.0 * i)
        for i in range(3)
    ]
    run, engine = simulate(requests, pages=40, regime=regime)
    assert [record.num_cached_tokens for record in run.requests] == [0, 96, 96]
    assert engine.run.counters["prefix_hit_blocks_total"] == 12


def test_choices_and_beams_fork_and_end_together() -> None:
    with SimulatedEngine(config(pages=20)) as engine:
        engine.add(Asked(name="choices", prompt=tuple(range(40)), outputs=(3, 9, 5)))
        engine.add(Asked(name="beams", prompt=tuple(range(40)), outputs=(12,), beam_width=4))
        while engine.has_unfinished:
            engine.step()
    by_name = {record.name: record for record in engine.run.requests}
    assert by_name["choices"].num_output == 17
    assert by_name["beams"].num_output == 48
    assert engine.run.counters["forks_total"] >= 2 + 3
    assert by_name["beams"].regime == "paged"


def test_aborts_conversions_and_failed_batches() -> None:
    requests = some(4)
    with SimulatedEngine(config(pages=20, regime="paged")) as engine:
        for what in requests:
            engine.add(what)
        engine.step()
        engine.abort("1")
        engine.abort("nobody")
        engine.convert("0", Regime.VIRTUAL)
        engine.step()
        assert engine.run.steps[-1].num_virtual == 1
        assert engine.run.counters == {}
        engine.fail_next_batch = True
        engine.step()
        assert not engine.has_unfinished or "0" not in engine.open_names
        replay(engine, [])
    ends = {record.name: record.end for record in engine.run.requests}
    assert ends["1"] == "aborted"
    assert ends["0"] == "failed"
    assert engine.run.counters["converted_to_virtual_total"] == 1


def test_refusals_of_the_driver_are_survived() -> None:
    faults: list[_core.FaultInjectingDriver] = []

    def wrap(driver: _core.PageDriver) -> _core.PageDriver:
        faults.append(_core.FaultInjectingDriver(driver))
        return faults[0]

    with SimulatedEngine(config(regime="virtual"), wrap_driver=wrap) as engine:
        for what in some(4):
            engine.add(what)
        for _ in range(30):
            faults[0].arm(2)
            engine.step()
        faults[0].disarm()
        replay(engine, [])
    assert len(engine.run.requests) == 4
    assert engine.memory._core.closed


def test_what_exceeds_the_context_is_refused() -> None:
    with SimulatedEngine(config()) as engine, pytest.raises(ValueError, match="too long"):
        engine.add(Asked(name="a", prompt=tuple(range(250)), outputs=(7,)))


def test_opt_13b_is_the_papers_set_up() -> None:
    """PagedAttention, table 1: 26 GB of parameters, 12 GB and 15.7K slots for the KV cache."""
    assert OPT_13B_A100.kv_tokens == 15728
    assert OPT_13B_A100.layout.total_page_bytes == 64 * 819200
    assert OPT_13B_A100.layout.padding_waste == 0
    profile = OPT_13B_A100.profile
    assert profile.weights == pytest.approx(25.7e9 / (0.8 * 1555e9))
    assert profile.token == pytest.approx(2 * 12.85e9 / (0.5 * 312e12))
    assert profile.virtual.read == pytest.approx(819200 / (0.6 * 1555e9))
    assert profile.paged.read == pytest.approx(1.23 * profile.virtual.read)
    assert profile.map_page == pytest.approx(25 * 37.5e-6)
    assert opt_13b(block_tokens=256, page_tokens=256).layout.blocks_per_page == 1


def test_a_pool_larger_than_this_machine_costs_its_books() -> None:
    device = dataclasses.replace(opt_13b(), kv_bytes=400 << 30)
    with SimulatedEngine(SimulationConfig.of(device, prefix_caching=False)) as engine:
        run = replay(engine, asked(sharegpt(12, seed=3, request_rate=4.0)))
    assert run.num_finished == 12
    assert run.batch_size() > 1


def seconds_one_by_one(regime: Any, pages: int, *, caching: bool) -> float:
    """Of 40 requests that share nothing, each alone, where reading blocks is dearer than slots."""
    profile = dataclasses.replace(
        SECONDS,
        step=0.005,
        token=0.0,
        map_page=0.01,
        virtual=dataclasses.replace(FREE, read=1e-5),
        paged=dataclasses.replace(FREE, read=1.2e-5),
    )
    options = dataclasses.replace(
        config(pages, regime=regime, prefix_caching=caching, max_num_seqs=2), profile=profile
    )
    with SimulatedEngine(options) as engine:
        for index in range(40):
            prompt = tuple(range(1000 * index, 1000 * index + 150))
            replay(engine, [Asked(name=str(index), prompt=prompt, outputs=(40,), seed=index)])
        return engine.now


@pytest.mark.parametrize("caching", [True, False], ids=["parked", "given back"])
def test_auto_finds_out_what_slots_keep(caching: bool) -> None:
    """Parked ones their pages, which no slot shows that nobody has used. Where nothing is cached an
    idle engine gives all pages back after each request."""
    regimes: tuple[Any, ...] = ("auto", "virtual", "paged")
    pages = 100 if caching else 12
    auto, virtual, paged = (seconds_one_by_one(each, pages, caching=caching) for each in regimes)
    if caching:
        assert virtual < 0.97 * paged
        assert auto == pytest.approx(virtual)
    else:
        assert paged < 0.95 * virtual
        assert auto < paged + 0.1 * (virtual - paged)


@pytest.mark.parametrize("regime", ["paged", "virtual"])
def test_kinds_of_layers_have_pages_of_their_own(regime: str) -> None:
    """Three of four layers see 32 tokens, so more requests of 120 and more run at once."""

    def served(**options: Any) -> Run:
        run, _ = simulate(some(8, length=120), 1000, pages=14, regime=regime, **options)
        assert run.num_finished == 8
        return run

    kinds = served(kinds=layer_kinds((32, 32, 32, None)))
    one_kind = served()
    assert kinds.batch_size() > one_kind.batch_size()
    answers = [{r.name: r.num_output for r in run.requests} for run in (kinds, one_kind)]
    assert answers[0] == answers[1]
