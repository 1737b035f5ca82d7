"""Of several drafters the first that has drafts, which alone hears what became of them."""

from __future__ import annotations

from typing import Any

from vmserve.speculation.in_order import InOrder


class Drafting:
    """Says what a test wants, and writes down what it hears."""

    def __init__(self) -> None:
        self.drafts: list[list[int]] | None = None
        self.heard: list[Any] = []

    def wanted(self, num_decoding: int) -> bool:
        return self.drafts is not None

    def propose(self, sequences: Any, num_prompt_rows: int) -> list[list[int]] | None:
        self.heard.append("asked")
        return self.drafts

    def accepted(self, sequence: Any, num_drafted: int, num_accepted: int) -> None:
        self.heard.append((num_drafted, num_accepted))

    def learn(self, seconds: float, attention: float) -> None:
        self.heard.append(seconds)

    def forget(self, sequence: Any) -> None:
        self.heard.append("forgotten")

    def start_over(self) -> None:
        self.heard.append("all forgotten")


def test_the_first_that_has_drafts_is_taken() -> None:
    sequence: Any = object()
    first, second = Drafting(), Drafting()
    both = InOrder(first, second)
    assert not both.wanted(1)
    assert both.propose([sequence], 0) is None
    both.learn(1.0, 0.5)
    second.drafts = [[4, 5]]
    assert both.wanted(1)
    first.drafts = [[]]
    assert both.propose([sequence], 0) == [[4, 5]]
    both.accepted(sequence, 2, 1)
    both.learn(2.0, 0.5)
    first.drafts = [[6]]
    assert both.propose([sequence], 0) == [[6]]
    both.accepted(sequence, 1, 0)
    both.learn(3.0, 0.5)
    both.forget(sequence)
    both.start_over()
    ends = ["forgotten", "all forgotten"]
    assert first.heard == ["asked", 1.0, "asked", "asked", (1, 0), 3.0, *ends]
    assert second.heard == ["asked", 1.0, "asked", (2, 1), 2.0, *ends]
