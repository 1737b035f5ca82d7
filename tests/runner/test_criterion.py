"""The criterion of ``tests/gpu`` for greedy tokens: it lets ties pass, and nothing else."""

from __future__ import annotations

import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.gpu.criterion import disagreement

#: After token t the reference likes t + 1 best; after 5 it likes 7 nearly as much as 6.
TABLE = torch.eye(10).roll(1, dims=1) * 4.0
TABLE[5, 7] = 3.9


def logits(tokens: list[int]) -> torch.Tensor:
    return TABLE[torch.tensor(tokens)]


def test_equal_tokens() -> None:
    assert disagreement([1, 2], [3, 4, 5, 6, 7], logits, 0.0) == (5, 0.0)


def test_a_tie_ends_the_comparison() -> None:
    position, gap = disagreement([1, 2], [3, 4, 5, 7, 0, 0], logits, 0.2)
    assert position == 3
    assert gap == pytest.approx(0.1)


def test_more_than_a_tie_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"token 3 is 7, and the reference prefers 6 by 0\.1"):
        disagreement([1, 2], [3, 4, 5, 7], logits, 0.05)
    with pytest.raises(AssertionError, match="token 0 is 9, and the reference prefers 3 by 4"):
        disagreement([1, 2], [9], logits, 0.4)
