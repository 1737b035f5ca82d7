"""What sequences will take of the memory: exact where that is known, likely where it is not."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.support.scheduling import make_request
from vmserve.memory.base import Regime
from vmserve.memory.layout import plan_layout
from vmserve.scheduler.budget import SchedulerLimits
from vmserve.scheduler.rooms import Rooms
from vmserve.scheduler.sequence import Sequence

#: 32 tokens a page of 2 blocks.
LAYOUT = plan_layout(1, 1, 16, torch.float32, 4096, page_bytes=4096, block_tokens=16)
ROOMS = Rooms(SimpleNamespace(layout=LAYOUT), SchedulerLimits(8, 16))  # type: ignore[arg-type]
ENDLESS = 1e12


def sequence(num_tokens: int, *, left: int = 1000, regime: Regime = Regime.PAGED) -> Sequence:
    request = make_request("r", num_tokens, max_tokens=left)
    [one] = request.sequences
    one.regime = regime
    return one


def test_if_nobody_ends_each_grows_by_32_tokens() -> None:
    # 20 + 32 tokens are 4 blocks, or 2 pages of 2; with the next token they have 2, or 1 page.
    assert ROOMS.headroom([sequence(20)], ENDLESS) == 2
    assert ROOMS.headroom([sequence(20, regime=Regime.VIRTUAL)], ENDLESS) == 2
    assert ROOMS.headroom([sequence(20), sequence(31)], ENDLESS) == 2 + 2
    assert ROOMS.headroom([], ENDLESS) == 0


def test_who_is_about_to_end_takes_no_more_than_until_then() -> None:
    assert ROOMS.headroom([sequence(20, left=3)], ENDLESS) == 0
    assert ROOMS.headroom([sequence(28, left=8)], ENDLESS) == 1
    # What the one leaves, the other may take.
    assert ROOMS.headroom([sequence(20), sequence(100, left=7)], ENDLESS) == 0


def test_of_many_some_will_have_ended() -> None:
    many = [sequence(16 * 20) for _ in range(100)]
    # In 32 steps each would take two blocks more than its 21 ...
    assert ROOMS.headroom(many, ENDLESS) == 100
    # ... but of such as generate 32 tokens two thirds have ended by then.
    assert ROOMS.headroom(many, 32.0) == 0
    # 16 steps of 2,000: 99.2 of 100 go on with 21 blocks, and 0.9 more of them may.
    assert 0 < ROOMS.headroom(many, 2000.0) < 100


def test_no_regime_takes_less_than_the_least() -> None:
    for num_tokens in range(1, 100):
        for num_shared in (0, num_tokens // 2, num_tokens):
            takes = {}
            for regime in Regime:
                one = sequence(num_tokens, regime=regime)
                takes[regime] = ROOMS.next_token(one) - ROOMS.shared(one, num_shared)
            assert ROOMS.at_least(one, num_shared) == takes[Regime.PAGED] <= takes[Regime.VIRTUAL]
