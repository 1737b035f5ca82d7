"""Row operations against plain Python, on the host's path and on the device's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vmserve.sampling import rows as R


@st.composite
def matrices(draw):
    """Few distinct values, so that there are many equals."""
    num_rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    value = st.sampled_from([-3.5, -1.0, 0.0, 0.25, 1.0, 7.0, -float("inf")])
    values = draw(st.lists(value, min_size=num_rows * width, max_size=num_rows * width))
    return torch.tensor(values, dtype=torch.float32).view(num_rows, width)


@given(matrices(), st.data())
@settings(deadline=None)
def test_kth_largest(x, data):
    ks = [data.draw(st.integers(1, x.shape[1])) for _ in range(x.shape[0])]
    expected = [sorted(row, reverse=True)[k - 1] for row, k in zip(x.tolist(), ks, strict=True)]
    assert R.kth_largest(x, ks).tolist() == expected
    assert R.kth_largest_on_device(x, ks).tolist() == expected


@given(matrices(), st.sampled_from([-float("inf"), -1.0, 0.1, 8.0]))
@settings(deadline=None)
def test_at_least(x, floor):
    floors = torch.full((x.shape[0],), floor)
    expected = [[(i, v) for i, v in enumerate(row) if v >= floor] for row in x.tolist()]
    found = [list(zip(i.tolist(), v.tolist(), strict=True)) for i, v in R.at_least(x, floors)]
    assert found == expected
    flat, values = R.at_least_on_device(x, floors)
    assert flat.tolist() == [r * x.shape[1] + i for r, row in enumerate(expected) for i, _ in row]
    assert values.tolist() == [v for row in expected for _, v in row]


@given(matrices(), st.data())
@settings(deadline=None)
def test_num_before_and_argmax(x, data):
    ids = [data.draw(st.integers(0, x.shape[1] - 1)) for _ in range(x.shape[0])]
    order = [sorted(range(x.shape[1]), key=lambda i, row=row: (-row[i], i)) for row in x.tolist()]
    expected = [row.index(i) for row, i in zip(order, ids, strict=True)]
    assert R.num_before(x, torch.tensor(ids)).tolist() == expected
    assert R.num_before_on_device(x, torch.tensor(ids)).tolist() == expected
    assert R.argmax(x).tolist() == [row[0] for row in order]
    assert R.argmax(x).dtype == torch.int64


def test_entries_iterate_by_row():
    entries = R.Entries(np.array([4, 5, 6]), np.array([1, 2, 3], dtype=np.float32), [0, 2, 2, 3])
    assert [ids.tolist() for ids, _ in entries] == [[4, 5], [], [6]]


def test_peaks_tell_rows_that_are_no_logits():
    inf = float("inf")
    x = torch.zeros(6, 300)
    x[0, 299] = inf
    x[1, 7] = float("nan")
    x[2, 299] = float("nan")
    x[3] = -inf
    x[4, 1:] = -inf
    totals = R.peaks(x).totals
    assert np.isnan(totals).tolist() == [True, True, True, True, False, False]
    assert totals[4:].tolist() == [1.0, 300.0]


@given(matrices())
@settings(deadline=None)
def test_log_probabilities_from_peaks(x):
    x[:, 0] = 2.0  # no row without a finite value
    peaks = R.peaks(x)
    expected = x.double().log_softmax(dim=-1)
    assert peaks.ids.tolist() == R.argmax(x).tolist()
    for column in range(x.shape[1]):
        chosen = torch.full((x.shape[0],), column)
        own = peaks.logprobs(x, chosen)
        np.testing.assert_allclose(own, expected[:, column].numpy(), rtol=0, atol=2e-5)
    likeliest = expected.gather(1, peaks.ids[:, None])[:, 0].numpy()
    np.testing.assert_allclose(peaks.logprobs(x, peaks.ids), likeliest, rtol=0, atol=2e-5)
