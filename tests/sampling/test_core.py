"""The C++ core against float64, against torch, and against itself on every instruction set."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vmserve import _core  # first: it sets how torch's threads wait

import torch  # isort: skip

from tests.sampling.rows import MIXTURE, random_cuts, row
from vmserve.sampling import Sampler, SamplingParams
from vmserve.sampling.params import GREEDY_TEMPERATURE
from vmserve.sampling.rng import uniforms
from vmserve.sampling.torch_sampler import TorchSampler

INF = float("inf")
ISAS = _core.cpu_isas()
TEMPERATURES = (0.3, 1.0, 1.0, 1.7)


def described(logits: torch.Tensor) -> Any:
    return logits.data_ptr(), "float32", tuple(logits.shape), logits.stride()


def core(vocab: int, isa: str = "", num_threads: int = 1) -> _core.RowSampler:
    return _core.RowSampler(vocab, GREEDY_TEMPERATURE, num_threads, isa)


# -- exponentials and numbers -----------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
def test_weights_are_exponentials(isa: str) -> None:
    x = np.linspace(-87.0, 0.0, 1_000_003, dtype=np.float32)
    found = _core.row_weights(x, 1.0, 0.0, isa).astype(np.float64)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2.0**-23
    edges = np.array([0.0, -0.0, -87.1, -1e30, -INF], dtype=np.float32)
    assert _core.row_weights(edges, 1.0, 0.0, isa).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert np.array_equal(_core.row_weights(x, 1.0, 0.0, "generic"), found)


def test_temperature_divides_and_stays_finite() -> None:
    x = np.array([3.0, 2.0, 3.0e38, -3.0e38], dtype=np.float32)
    found = _core.row_weights(x[:2], 0.5, 6.0).tolist()
    assert found == pytest.approx([1.0, math.exp(-2.0)])
    largest = float(np.finfo(np.float32).max)
    assert _core.row_weights(x, 1e-5, largest).tolist() == [0.0, 0.0, 1.0, 0.0]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_numbers_are_those_of_the_stream(seed: int, index: int, position: int) -> None:
    assert _core.uniform_of(seed, index, position) == uniforms([seed], [index], [position])[0]


# -- drawing ----------------------------------------------------------------------------


def kept_by(values: NDArray[np.float32], params: SamplingParams) -> NDArray[np.int64]:
    """Ids that the cuts leave, in ascending order, by a stable sort and float64."""
    order = np.argsort(-values, kind="stable")
    weights = np.exp(values.astype(np.float64) - values.max())
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        upto = np.cumsum(weights[order])
        order = order[: np.searchsorted(upto, params.top_p * upto[-1]) + 1]
    if params.min_p > 0.0:
        floor = values.max() + np.float32(math.log(params.min_p))
        order = order[values[order] >= floor]
    return np.sort(order)


def borders(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that can be drawn, and the share of all that each one ends at."""
    values = logits / np.float32(params.temperature)
    ids = kept_by(values, params)
    upto = np.cumsum(np.exp(values[ids].astype(np.float64) - values.max()))
    return ids, upto / upto[-1]


def misdrawn(ids: NDArray[np.int64], ends: NDArray[np.float64], uniform: float, token: int) -> bool:
    """Whether float64 draws another; if so, it must be by a hair.

    Half a unit in the last place of an exponential, and the sums of 128 of them in float32:
    together they move a border by less than 2^-20.
    """
    expected = int(np.searchsorted(ends, uniform, side="right"))
    if token == ids[expected]:
        return False
    place = int(np.searchsorted(ids, token))
    assert ids[place] == token
    between = ends[min(place, expected) : max(place, expected)]
    assert np.abs(between - uniform).max() < 2.0**-20
    return True


@pytest.mark.parametrize(
    ("vocab", "num"), [(2, 500), (127, 2000), (300, 3000), (5000, 1000), (20_000, 200)]
)
@pytest.mark.parametrize("coarse", [False, True])
def test_draws_are_those_of_float64_and_of_torch(vocab: int, num: int, coarse: bool) -> None:
    """Coarse logits, as half precision gives them, have many equals at every limit."""
    rng = random.Random(vocab)
    logits = 4 * torch.randn(num, vocab, generator=torch.Generator().manual_seed(vocab))
    logits = logits.round() if coarse else logits
    logits[range(num), [rng.randrange(vocab) for _ in range(num)]] = -INF
    rows = [
        row(rng.randrange(2**63), i, output=i % 7, **random_cuts(rng, vocab, TEMPERATURES))
        for i in range(num)
    ]
    sampler = Sampler(vocab)
    mine, other = sampler.sample(logits, rows), TorchSampler(vocab).sample(logits, rows)
    wrong = 0
    for i, (one, two) in enumerate(zip(mine, other, strict=True)):
        number = uniforms([rows[i].seed], [i], [i % 7])[0]
        ids, ends = borders(logits[i].numpy(), rows[i].params)
        wrong += misdrawn(ids, ends, number, one.token_id)
        wrong += misdrawn(ids, ends, number, two.token_id)
        if one.token_id == two.token_id:
            assert one.logprob == pytest.approx(two.logprob, abs=1e-5)
    assert wrong <= 1
    assert sampler.num_core_rows == num


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[float], dict[str, Any]]:
    """Few distinct logits, so that there are many equals, -0.0 among them."""
    size = draw(st.integers(1, 400))
    value = st.sampled_from([-INF, -9.0, -1.0, -0.0, 0.0, 0.5, 1.0, 4.0])
    values = draw(st.lists(value, min_size=size, max_size=size))
    values[draw(st.integers(0, size - 1))] = draw(st.sampled_from([0.0, -3.0, 5.0]))
    params = {
        "top_k": draw(st.integers(0, size + 2)),
        "top_p": draw(st.sampled_from([1.0, 0.999, 0.7, 0.33, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 1e-9, 0.3, 1.0])),
        "temperature": draw(st.sampled_from([0.01, 0.5, 1.0, 2.0])),
    }
    return values, params


@given(cuts())
@settings(deadline=None)
def test_only_what_is_kept_is_drawn(case: tuple[list[float], dict[str, Any]]) -> None:
    values, params = case
    logits = torch.tensor(values)
    rows = [row(5, index, **params) for index in range(30)]
    ids, ends = borders(logits.numpy(), rows[0].params)
    numbers = uniforms([5] * 30, range(30), [0] * 30)
    sampled = Sampler(len(values)).sample(logits.expand(30, -1), rows)
    for number, token in zip(numbers, sampled, strict=True):
        assert values[token.token_id] > -INF
        misdrawn(ids, ends, number, token.token_id)


# -- changes ----------------------------------------------------------------------------


def random_changes(rng: random.Random, vocab: int) -> dict[str, Any]:
    ids = lambda most: rng.sample(range(vocab), rng.randint(1, most))  # noqa: E731
    mask = np.array([rng.random() < 0.5 for _ in range(vocab)])
    mask[rng.randrange(vocab)] = True
    everything: dict[str, Any] = {
        "logit_bias": {i: rng.uniform(-9, 9) for i in ids(20)},
        "allowed_token_ids": ids(30),
        "bad_words": ((ids(1)[0],), (1, ids(1)[0]), (7, 1)),
        "mask": mask,
        "min_tokens": 9,
        "repetition_penalty": rng.choice([0.7, 1.3]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
    }
    return {name: everything[name] for name in everything if rng.random() < 0.35}


@pytest.mark.parametrize("vocab", [40, 700])
def test_changes_are_those_of_torch(vocab: int) -> None:
    """Bias, masks, bans and penalties in every combination, greedy and drawn."""
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(600, vocab, generator=generator)).round()
    rows = [
        row(
            seed=i,
            output=[rng.randrange(vocab) for _ in range(rng.randrange(12))],
            prompt=[rng.randrange(vocab) for _ in range(rng.randrange(12))],
            stop_ids=[rng.randrange(vocab + 9) for _ in range(3)],
            temperature=rng.choice([0.0, 1.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            logprobs=rng.choice([None, 2]),
            **random_changes(rng, vocab),
        )
        for i in range(len(logits))
    ]
    before = logits.clone()
    sampler = Sampler(vocab)
    mine, other = sampler.sample(logits, rows), TorchSampler(vocab).sample(logits, rows)
    assert torch.equal(logits, before)
    assert [token.token_id for token in mine] == [token.token_id for token in other]
    assert [token.logprob for token in mine] == pytest.approx(
        [token.logprob for token in other], abs=1e-5
    )
    for one, two in zip(mine, other, strict=True):
        assert (one.top is None) == (two.top is None)
        if one.top is not None and two.top is not None:
            assert list(one.top) == list(two.top)
            assert [rank for _, rank in one.top.values()] == [r for _, r in two.top.values()]


def test_a_grammar_is_heeded_whatever_else_is_asked_for() -> None:
    mask = np.array([False, True, False, True])
    [greedy] = Sampler(4).sample(
        torch.tensor([[9.0, 1.0, 5.0, 0.0]]), [row(temperature=0.0, mask=mask)]
    )
    assert greedy.token_id == 1
    contradictory = row(temperature=0.0, mask=mask, allowed_token_ids=[0], bad_words=((1,), (3,)))
    [found] = Sampler(4).sample(torch.tensor([[9.0, 1.0, 5.0, 0.0]]), [contradictory])
    assert found.token_id == 1


def test_what_does_not_fit_is_refused_before_anything_is_done() -> None:
    logits = torch.zeros(1, 8)
    sampler = Sampler(8)
    with pytest.raises(ValueError, match=r"a mask is of the vocabulary: \[8\]"):
        sampler.sample(logits, [row(mask=np.ones(7, dtype=bool))])
    for wrong in ({"prompt": [8]}, {"output": [-1]}, {"allowed_token_ids": [2**40]}):
        with pytest.raises(ValueError, match="is out of vocabulary: ids are 0 to 7"):
            sampler.sample(logits, [row(repetition_penalty=2.0, **wrong)])
    with pytest.raises(ValueError, match="token id 8 is out of vocabulary"):
        sampler.prompt_logprobs(logits, [8], 1)
    with pytest.raises(ValueError, match=r"logits are not \[2, 8\]"):
        core(8).sample(described(logits), [row(), row()])
    with pytest.raises(ValueError, match="rows of logits are contiguous"):
        core(8).sample(described(torch.zeros(8, 8).t()), [row()] * 8)
    with pytest.raises(ValueError, match="a vocabulary of 0 tokens"):
        core(0)
    with pytest.raises(ValueError, match="a sampler with 0 threads"):
        core(8, num_threads=0)
    assert sampler.num_core_rows == 0


# -- the same bits everywhere -----------------------------------------------------------


@pytest.mark.parametrize("vocab", [1000, 33_001])
def test_every_instruction_set_and_any_number_of_threads_give_the_same_bits(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator) * 3
    logits[7, 3] = float("nan")
    rows = [row(i, i % 3, output=i % 5, **MIXTURE[i % len(MIXTURE)]) for i in range(40)]
    first = core(vocab).sample(described(logits), rows)
    assert first[3] == 1
    for isa in ISAS:
        assert core(vocab, isa).sample(described(logits), rows) == first
    for num_threads in (2, 3):
        assert core(vocab, num_threads=num_threads).sample(described(logits), rows) == first
    with pytest.raises(ValueError, match="instruction set 'wrong'"):
        core(vocab, "wrong")


def test_infinities_at_a_low_temperature() -> None:
    logits = torch.tensor([[0.0, INF, 0.0, INF], [-INF, 3.0e38, 3.0e38, 0.0]])
    rows = [[row(s, temperature=2e-5), row(s, temperature=2e-5, top_p=0.9)] for s in range(50)]
    sampler = Sampler(4)
    found = [[t.token_id for t in sampler.sample(logits, pair)] for pair in rows]
    assert {first for first, _ in found} == {1, 3}
    assert {second for _, second in found} == {1, 2}
    assert sampler.num_repaired_rows == 50
