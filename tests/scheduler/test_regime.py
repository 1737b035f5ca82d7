"""Which regime a request is kept in, by predicted costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.profiles import steady_profile
from tests.support.scheduling import make_request
from vmserve.attention.base import RaggedBatch
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.memory.layout import plan_layout
from vmserve.scheduler.profile import DeviceProfile, KernelCosts, SequenceWork
from vmserve.scheduler.regime import CostModel, RegimeChoice, RegimePolicy, RunningLength, Situation
from vmserve.scheduler.sequence import Request

#: 32 tokens a page of 2 blocks; 128 bytes a token.
LAYOUT = plan_layout(1, 1, 16, torch.float32, 4096, page_bytes=4096, block_tokens=16)
FREE = KernelCosts(call=0.0, sequence=0.0, read=0.0, pair=0.0)
#: Everything for nothing: a test names the costs that it is about.
NOTHING = DeviceProfile(
    name="nothing",
    virtual=FREE,
    paged=FREE,
    step=0.0,
    weights=0.0,
    token=0.0,
    map_page=0.0,
    map_page_hidden=0.0,
    copy_bytes_per_second=1e30,
    swap_bytes_per_second=1e30,
)


def policy(**costs: Any) -> RegimePolicy:
    return RegimePolicy("auto", CostModel(replace(NOTHING, **costs), LAYOUT))


def request_of(num_prompt: int = 100, max_tokens: int = 50, n: int = 1) -> Request:
    return make_request("r", num_prompt, max_tokens=max_tokens, n=n)


def reads(virtual: float, paged: float) -> dict[str, KernelCosts]:
    return {"virtual": replace(FREE, read=virtual), "paged": replace(FREE, read=paged)}


DEAR_MAPS = {"map_page": 1e-3}
DEAR_COPIES = {"copy_bytes_per_second": 1e3}
CALLS = {"virtual": replace(FREE, call=1e-3), "paged": replace(FREE, call=1e-3)}
SCARCE = {"limit_pages": 10, "fixed_seconds": 0.1}


def test_forced_regimes_ask_nothing() -> None:
    batch = RaggedBatch.build([0], [99], [1])
    for regime in Regime:
        forced = RegimePolicy(regime.value)
        assert not forced.predicts
        choice = forced.choose(request_of(n=4))
        assert (choice.regime, choice.reason, choice.predicted) == (regime, "forced", {})
        assert forced.attended(regime, batch, 1.0) == 0.0


def test_without_costs_what_forks_is_paged() -> None:
    auto = RegimePolicy("auto")
    assert not auto.predicts
    assert auto.choose(request_of())[:2] == (Regime.VIRTUAL, "default")
    assert auto.choose(request_of(n=2))[:2] == (Regime.PAGED, "forks")


@pytest.mark.parametrize(
    ("costs", "request_", "around", "chosen"),
    [
        ({}, request_of(), {}, "virtual default"),
        (DEAR_MAPS, request_of(), {}, "paged maps"),
        # In a slot that is mapped already they cost nothing.
        (DEAR_MAPS, request_of(), {"unmapped_share": 0.0}, "virtual default"),
        (reads(0.0, 1e-6), request_of(), {}, "virtual kernels"),
        (reads(0.0, 1e-6) | DEAR_MAPS, request_of(), {}, "virtual kernels"),
        # A saving within the margin is none.
        (reads(1.01e-6, 1e-6), request_of(), {}, "virtual default"),
        (reads(1.05e-6, 1e-6), request_of(), {}, "paged kernels"),
        (DEAR_COPIES, request_of(60, n=3), {}, "paged forks"),
        (DEAR_MAPS, request_of(40, n=3), {"unmapped_share": 0.0}, "paged forks"),
        # A cached prefix that ends within a page is copied for the virtual view.
        (DEAR_COPIES, request_of(), {"num_hit": 32}, "virtual default"),
        (DEAR_COPIES, request_of(), {"num_hit": 48}, "paged prefix"),
        ({}, request_of(), SCARCE, "virtual default"),
        ({}, request_of(), {"pressure": 1.0, **SCARCE}, "paged memory"),
        # No slot, no virtual view.
        (reads(0.0, 1.0), request_of(), {"num_free_slots": 0}, "paged slots"),
        # A second kernel family is charged to whoever brings it.
        (CALLS, request_of(), {}, "virtual default"),
        (CALLS, request_of(), {"num_paged": 3}, "paged batch"),
        (CALLS, request_of(), {"num_virtual": 1}, "virtual batch"),
        (CALLS, request_of(), {"num_virtual": 1, "num_paged": 3}, "virtual default"),
    ],
)
def test_what_is_chosen(
    costs: dict[str, Any], request_: Request, around: dict[str, Any], chosen: str
) -> None:
    choice = policy(**costs).choose(request_, Situation(**around))
    assert f"{choice.regime.value} {choice.reason}" == chosen


@pytest.mark.parametrize(
    ("costs", "request_", "around", "virtual", "paged"),
    [
        # 50 tokens read 100 + 25.5 positions each on average; four pages are mapped at once.
        (reads(0.0, 1e-6) | DEAR_MAPS, request_of(), {}, 4e-3, 50 * 125.5e-6),
        # Two forks copy 8 of the last page's tokens, and 8 of the last block's.
        (DEAR_COPIES, request_of(40, n=3), {}, 2 * 8 * 0.128, 2 * 8 * 0.128),
        # Half of the last page, or block, and what of the prefix's last one is there twice.
        ({}, request_of(), {"pressure": 0.5, "num_hit": 40, **SCARCE}, 0.75 / 4, 0.5 / 4),
        # Whoever is preempted maps again.
        (DEAR_MAPS, request_of(max_tokens=20), {"num_preemptions": 1.5}, 2.5 * 4e-3, 0.0),
    ],
)
def test_what_is_predicted(
    costs: dict[str, Any], request_: Request, around: dict[str, Any], virtual: float, paged: float
) -> None:
    """Seconds. Of scarce memory a page costs 1/4 here: half of 0.1 s / 10 pages x 50 tokens."""
    choice = policy(**costs).choose(request_, Situation(**around))
    assert choice.predicted == {"virtual": pytest.approx(virtual), "paged": pytest.approx(paged)}


def test_what_a_step_takes_anyway_is_the_profiles_or_the_least_that_was_seen() -> None:
    auto = policy()
    assert auto.fixed_seconds == 0
    for seconds in (0.3, 0.1, 0.2):
        auto.stepped(seconds)
    assert auto.fixed_seconds == pytest.approx(0.1 * 1.001)
    for _ in range(2000):  # the least one is forgotten
        auto.stepped(0.2)
    assert auto.fixed_seconds == pytest.approx(0.2)
    known = policy(step=0.01, weights=0.02)
    known.stepped(0.3)
    assert known.fixed_seconds == pytest.approx(0.03)


def test_preemptions_are_averaged() -> None:
    auto = policy()
    for _ in range(200):
        auto.finished(10, num_preemptions=3)
    assert auto.num_preemptions == pytest.approx(3, rel=1e-3)


def test_a_newcomer_takes_the_batch_along_where_that_is_cheap() -> None:
    calls = policy(**CALLS, **DEAR_MAPS)
    around = Situation(num_virtual=3)
    # Alone it would pay for 50 calls to save four maps.
    alone = calls.choose(request_of(), around)
    assert (alone.regime, alone.reason, alone.moves_batch) == (Regime.VIRTUAL, "batch", False)
    choice = calls.choose(request_of(), around, lambda: 3e-3)
    assert (choice.regime, choice.reason, choice.moves_batch) == (Regime.PAGED, "maps", True)
    dear = calls.choose(request_of(), around, lambda: 5e-3)
    assert (dear.regime, dear.moves_batch) == (Regime.VIRTUAL, False)
    assert dear.forgone == pytest.approx(4e-3)
    # Who would rather be where the batch is moves nobody, and does not ask what that costs.
    mapped = around._replace(unmapped_share=0.0)
    asked: list[float] = []
    content = calls.choose(request_of(), mapped, lambda: asked.pop())
    assert not content.moves_batch


def test_a_hit_moves_the_batch_however_small_its_part() -> None:
    """Its pages are mapped for sure; that a kernel is faster by as little may be chance."""
    same = replace(FREE, call=1e-3, read=1e-4)  # beside 0.6 s, 4 ms are little
    auto = policy(virtual=same, paged=same, map_page=1e-3)
    for num_hit, moves in ((0, False), (96, True)):
        around = Situation(num_virtual=3, num_hit=num_hit)
        assert auto.choose(request_of(), around, lambda: 0.0).moves_batch == moves


def test_what_newcomers_forgo_for_the_batch_adds_up_until_it_pays_to_move_it() -> None:
    calls = policy(**CALLS, **DEAR_MAPS)
    around = Situation(num_virtual=3)

    def newcomer() -> bool:
        choice = calls.choose(request_of(), around, lambda: 9e-3)
        calls.kept(choice)
        return choice.moves_batch

    assert [newcomer() for _ in range(3)] == [False, False, True]  # 4 ms each
    # It is paid with that: the next one counts from nothing.
    assert [newcomer() for _ in range(3)] == [False, False, True]


def test_whoever_is_better_off_in_the_batch_makes_up_for_those_who_are_not() -> None:
    dear = replace(FREE, call=1e-3, read=1e-6)
    auto = policy(virtual=replace(FREE, call=1e-3), paged=dear, map_page=1e-3)

    def newcomer(unmapped: float, moving: float) -> RegimeChoice:
        """Saves 4 ms of maps in the paged view, or none, and loses 2.21 ms to its kernels."""
        around = Situation(num_virtual=1, unmapped_share=unmapped)
        choice = auto.choose(request_of(max_tokens=20), around, lambda: moving)
        auto.kept(choice)
        return choice

    assert newcomer(1.0, moving=1.0).forgone == pytest.approx(1.79e-3)
    assert newcomer(0.0, moving=1.0).forgone == pytest.approx(-2.21e-3)
    assert not newcomer(1.0, moving=1.8e-3).moves_batch  # nothing is left of the first
    assert newcomer(1.0, moving=3.5e-3).moves_batch


def test_expected_lengths_follow_what_ended() -> None:
    auto = policy()
    request = make_request("r", 8, max_tokens=1000)
    assert auto.expected_output(request) == 256
    for _ in range(200):
        auto.finished(10)
    assert auto.expected_output(request) == 10
    assert auto.expected_output(make_request("r", 8, max_tokens=4)) == 4


def test_the_batch_leaves_a_regime_when_that_pays() -> None:
    calls = policy(**CALLS)
    one = RunningLength(100, 50)
    lone = {Regime.VIRTUAL: [one], Regime.PAGED: [one] * 4}
    # To the block table costs nothing; to a slot it would cost maps.
    maps = policy(**CALLS, **DEAR_MAPS)
    assert calls.reconsider(lone) is Regime.VIRTUAL
    assert maps.reconsider(lone) is Regime.VIRTUAL
    # What forks stays; the others may come to it.
    assert maps.reconsider(lone, forking={Regime.PAGED}) is Regime.VIRTUAL
    assert maps.reconsider(lone, forking=set(Regime)) is None
    # The call is saved only while both would have run.
    ending = {Regime.VIRTUAL: [RunningLength(100, 500)], Regime.PAGED: [RunningLength(100, 1)]}
    slow = policy(virtual=replace(FREE, call=1e-3), paged=replace(FREE, read=1e-6))
    assert slow.reconsider(ending, forking={Regime.PAGED}) is None
    assert policy().reconsider(lone) is None
    assert RegimePolicy("paged").reconsider(lone) is None


def test_what_it_saves_and_costs_to_move_two_sequences() -> None:
    """10 tokens each; the last page is 16 tokens emptier than the last block, at 0.5 s a page."""
    kernels = {
        "virtual": replace(FREE, sequence=3e-3, read=2e-6),
        "paged": replace(FREE, sequence=1e-3, read=1e-6),
    }
    model = CostModel(replace(NOTHING, **kernels, **DEAR_MAPS), LAYOUT)
    two, saved = [RunningLength(100, 10)] * 2, 2 * (10 * (2e-3 + 0.125) + 10 * 105 * 1e-6)
    assert model.gain_of_leaving(Regime.VIRTUAL, two, 0, 0.5) == (pytest.approx(saved), 0.0)
    back = model.gain_of_leaving(Regime.PAGED, two, 0, 0.5)
    assert back == (pytest.approx(-saved), pytest.approx(2 * 4e-3))


def test_a_step_is_charged_for_each_regime_that_it_has() -> None:
    kernel = KernelCosts(call=1.0, sequence=0.1, read=0.01, pair=0.001)
    profile = replace(NOTHING, virtual=kernel, paged=kernel, step=5.0, weights=2.0, token=0.5)
    virtual = SequenceWork(Regime.VIRTUAL, 9, 1)
    prompt = SequenceWork(Regime.PAGED, 4, 6)
    assert prompt.num_pairs == 5 + 6 + 7 + 8 + 9 + 10
    assert profile.attention_seconds([virtual]) == pytest.approx(1 + 0.1 + 0.1)
    assert profile.attention_seconds([virtual, virtual]) == pytest.approx(1 + 0.4)
    assert profile.attention_seconds([virtual, prompt]) == pytest.approx(1.2 + 1.1 + 0.045)
    assert profile.attention_seconds([]) == 0
    assert profile.linear_seconds(1) == 7.0
    assert profile.linear_seconds(10) == 10.0
    step = replace(profile, map_page=0.25, copy_bytes_per_second=8.0).step_seconds(
        [virtual], unhidden_pages=2, copied_bytes=4
    )
    assert step == pytest.approx(7 + 1.2 + 0.5 + 0.5)


def test_profiles_are_stored_and_read_again() -> None:
    profile = steady_profile()
    assert DeviceProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d.pop("version"), "no device profile of version 1"),
        (lambda d: d.pop("map_page"), "DeviceProfile has the fields"),
        (lambda d: d["paged"].pop("read"), "KernelCosts has the fields"),
        (lambda d: d.update(map_page="5"), "map_page is '5'"),
        (lambda d: d.update(map_page=-1), "map_page is -1; it must be 0 or more"),
        (lambda d: d["virtual"].update(call=float("nan")), "virtual.call is nan"),
        (lambda d: d.update(copy_bytes_per_second=0), "must be greater than 0"),
    ],
)
def test_a_broken_profile_is_refused(change: Any, text: str) -> None:
    data = json.loads(steady_profile().to_json())
    change(data)
    with pytest.raises(ConfigurationError, match=text):
        DeviceProfile.from_json(json.dumps(data))


def test_the_error_of_attention_is_learnt_for_each_number_of_sequences() -> None:
    costs = KernelCosts(call=1e-4, sequence=1e-5, read=1e-7, pair=1e-9)
    auto = policy(virtual=costs, paged=costs)
    request = request_of()
    before = auto.choose(request, Situation(num_virtual=7)).predicted
    past = 300
    for num_seqs, error in ((1, 1.2), (8, 3.0), (32, 2.0)):
        batch = RaggedBatch.build([*range(num_seqs)], [past] * num_seqs, [1] * num_seqs)
        truth = error * (1e-4 + num_seqs * (1e-5 + 1e-7 * (past + 1)))
        predictions = [auto.attended(Regime.PAGED, batch, truth) for _ in range(200)]
        assert predictions[1:] == pytest.approx([truth] * 199, rel=0.15)
    prompt = RaggedBatch.build([0], [0], [100])
    auto.attended(Regime.PAGED, prompt, 1.0)
    assert auto.attended(Regime.VIRTUAL, prompt, 1.0) == pytest.approx(1.0)  # the same for both
    after = auto.choose(request, Situation(num_virtual=7)).predicted
    # Its decodes are those of a batch of eight, its prompt costs what one has cost.
    pairs = 100 * 101 / 2 * 1e-9
    decodes = before["virtual"] - pairs
    assert after["virtual"] == pytest.approx(3.0 * decodes + 1.0 * pairs / (1.1e-4 + 5050e-9))


def test_a_busy_machine_is_forgotten_when_it_is_idle_again() -> None:
    costs = KernelCosts(call=0.0, sequence=0.0, read=1e-6, pair=0.0)
    auto = policy(virtual=costs, paged=costs)
    batch = RaggedBatch.build([0], [99], [1])
    for seconds in [5e-4] * 100 + [1e-4] * 600:
        last = auto.attended(Regime.VIRTUAL, batch, seconds)
    assert last == pytest.approx(1e-4, rel=0.15)
