"""The likeliest tokens of each row, which a beam search continues with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vmserve.sampling import Sampler

INF = math.inf


def candidates(logits: list[list[float]], num: int) -> tuple[list[list[int]], np.ndarray]:
    ids, logprobs = Sampler(len(logits[0])).beam_candidates(torch.tensor(logits), num)
    assert (ids.dtype, logprobs.dtype, ids.shape) == (np.int64, np.float32, logprobs.shape)
    return ids.tolist(), logprobs


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 8).flatmap(
        lambda vocab: st.lists(
            st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 3.0]), min_size=vocab, max_size=vocab),
            min_size=1,
            max_size=4,
        )
    ),
    st.integers(1, 10),
)
def test_as_sorted_in_full(logits: list[list[float]], num: int) -> None:
    ids, logprobs = candidates(logits, num)
    for row, row_ids, row_logprobs in zip(logits, ids, logprobs, strict=True):
        if max(row) == -INF:  # repaired: all tokens alike
            row = [0.0] * len(row)
        assert row_ids == sorted(range(len(row)), key=lambda i: (-row[i], i))[:num]
        total = math.log(sum(math.exp(x) for x in row))
        np.testing.assert_allclose(row_logprobs, [row[i] - total for i in row_ids], atol=1e-6)


@pytest.mark.parametrize(
    ("logits", "ids", "logprobs"),
    [
        ([math.nan, 1.0, 0.0], [1, 2], [-math.log(1 + math.exp(-1)), -math.log(1 + math.exp(1))]),
        ([0.0, INF, -INF], [1, 0], [0.0, -torch.finfo(torch.float32).max]),
        ([math.nan] * 3, [0, 1], [-math.log(3)] * 2),
    ],
)
def test_rows_that_are_no_numbers_are_repaired(
    logits: list[float], ids: list[int], logprobs: list[float]
) -> None:
    sampler = Sampler(3)
    found, values = sampler.beam_candidates(torch.tensor([logits, [1.0, 2.0, 3.0]]), 2)
    assert found.tolist() == [ids, [2, 1]]
    assert values[0].tolist() == pytest.approx(logprobs, rel=1e-6)
    assert sampler.num_repaired_rows == 1


def test_no_rows_and_no_candidates() -> None:
    sampler = Sampler(7)
    assert [x.shape for x in sampler.beam_candidates(torch.empty(0, 7), 3)] == [(0, 3)] * 2
    assert [x.shape for x in sampler.beam_candidates(torch.zeros(2, 7), 0)] == [(2, 0)] * 2


def test_the_shape_is_checked() -> None:
    with pytest.raises(ValueError, match=r"logits are \(1, 4\), expected \(1, 5\)"):
        Sampler(5).beam_candidates(torch.zeros(1, 4), 2)


def test_a_row_gets_the_same_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(9, 3000, generator=generator) * 3).round(decimals=1)  # with equals
    before = logits.clone()
    sampler = Sampler(3000)
    ids, logprobs = sampler.beam_candidates(logits, 17)
    assert torch.equal(logits, before)
    for i in range(len(logits)):
        alone = sampler.beam_candidates(logits[i : i + 1], 17)
        assert np.array_equal(alone[0][0], ids[i])
        assert np.array_equal(alone[1][0], logprobs[i])
    # What was returned is the caller's own: later calls leave it.
    assert np.array_equal(sampler.beam_candidates(logits, 17)[1], logprobs)
