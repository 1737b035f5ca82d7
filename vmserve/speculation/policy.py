"""The numbers by which drafts are chosen; ``csrc/speculation/draft_policy`` does it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EVIDENCE", "PRICED", "DraftPolicy", "draft_model_policy"]


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How long drafts are.

    With prices, a batch gets the drafts that make most tokens a second, by what steps took and by
    each request's own share of accepted tokens. Without, whatever a match speaks for is drafted.
    """

    is_priced: bool
    #: Most tokens of a draft.
    most_drafted: int
    #: Bounds of the lengths of matches between which acceptance is much the same, and how often the
    #: token after such a match was drawn too. Measured on texts of SmolLM2-135M
    #: (benchmarks/speculation).
    match_bounds: tuple[int, ...] = (3, 4, 5, 8, 16)
    usual_rates: tuple[float, ...] = (0.45, 0.65, 0.7, 0.8, 0.9, 0.95)
    #: Drafted tokens that the usual rates count for, and the most that a request's own count for.
    prior_weight: float = 4.0
    most_weight: float = 16.0
    #: Without prices: rate of accepted tokens down to which matches of two tokens are drafted from.
    least_rate: float = 0.35
    #: Least factor of speed that a draft has to promise.
    margin: float = 1.02
    #: Share of its time that a step without drafts puts aside for drafts that may lose. The second
    #: number is the most such steps' time that is put aside, which is there at the beginning too.
    earned: float = 0.01
    most_credit: float = 4.0
    #: Places that a search visits, newest first, and the length up to which it compares.
    most_visited: int = 256
    longest: int = 32
    #: Assumed cost of a step of the draft model as a part of the model's, until it was measured; 0:
    #: drafts cost nothing.
    round_share: float = 0.0


PRICED = DraftPolicy(is_priced=True, most_drafted=15)
#: Policy of eight rows, which cost little more than one wherever weights are read from memory.
EVIDENCE = DraftPolicy(is_priced=False, most_drafted=7)


def draft_model_policy(num_tokens: int, *, is_priced: bool, round_share: float) -> DraftPolicy:
    """The policy of a draft model. A token's place in the draft stands for a match's length."""
    return DraftPolicy(
        is_priced=is_priced,
        most_drafted=num_tokens,
        match_bounds=(1, 2, 4, 8),
        usual_rates=(0.7,) * 5,
        least_rate=0.0,
        round_share=round_share,
    )
