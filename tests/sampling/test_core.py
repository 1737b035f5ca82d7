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

from vmserve.sampling import Sampler, SamplingParams, SamplingRow
from vmserve.sampling.params import GREEDY_TEMPERATURE
from vmserve.sampling.rng import uniforms
from vmserve.sampling.torch_sampler import TorchSampler

INF = float("inf")
ISAS = _core.cpu_isas()


def row(seed: int = 0, index: int = 0, position: int = 0, **kwargs: Any) -> SamplingRow:
    own = {"mask": kwargs.pop("mask")} if "mask" in kwargs else {}
    prompt, stop_ids = kwargs.pop("prompt", ()), kwargs.pop("stop_ids", ())
    return SamplingRow(
        params=SamplingParams(max_tokens=10_000, **kwargs),
        seed=seed,
        index=index,
        tokens=[*prompt, *([1] * position if isinstance(position, int) else position)],
        num_prompt=len(prompt),
        stop_ids=frozenset(stop_ids),
        **own,
    )


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


def random_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    return {
        "temperature": rng.choice([0.3, 1.0, 1.0, 1.7]),
        "top_k": rng.choice([0, 0, 1, 5, 40, 200, vocab - 1, vocab, vocab + 1]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": rng.choice([0.0, 0.0, 0.001, 0.05, 1.0]),
    }


@pytest.mark.parametrize("vocab", [2, 127, 300, 5000])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.slow
def test_draws_are_those_of_float64(vocab: int, coarse: bool) -> None:
    """Coarse logits, as half precision gives them, have many equals at every limit.

    20 requests a case and 300 numbers for each: 48,000 draws.
    """
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    sampler = Sampler(vocab)
    num_misdrawn = 0
    for _ in range(20):
        x = 3 * torch.randn(vocab, generator=generator)
        x = x.round() if coarse else x
        x[rng.randrange(vocab)] = -INF
        seed, params = rng.randrange(2**63), random_params(rng, vocab)
        rows = [row(seed, index, **params) for index in range(300)]
        ids, ends = borders(x.numpy(), rows[0].params)
        numbers = uniforms([seed] * 300, range(300), [0] * 300)
        sampled = sampler.sample(x.expand(300, vocab), rows)
        for number, token in zip(numbers, sampled, strict=True):
            num_misdrawn += misdrawn(ids, ends, number, token.token_id)
    assert num_misdrawn <= 1
    assert sampler.num_core_rows == 6000


@pytest.mark.parametrize("vocab", [300, 20_000])
def test_draws_are_those_of_torch(vocab: int) -> None:
    rng = random.Random(vocab)
    num = 3000 if vocab < 1000 else 200
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(num, vocab, generator=generator)
    rows = [row(rng.randrange(2**63), i, i % 7, **random_params(rng, vocab)) for i in range(num)]
    sampler = Sampler(vocab)
    mine, other = sampler.sample(logits, rows), TorchSampler(vocab).sample(logits, rows)
    different = [i for i in range(num) if mine[i].token_id != other[i].token_id]
    for i in different:
        number = uniforms([rows[i].seed], [i], [i % 7])[0]
        ids, ends = borders(logits[i].numpy(), rows[i].params)
        misdrawn(ids, ends, number, mine[i].token_id)
        misdrawn(ids, ends, number, other[i].token_id)
    assert len(different) <= 1
    same = [i for i in range(num) if i not in different]
    assert [mine[i].logprob for i in same] == pytest.approx(
        [other[i].logprob for i in same], abs=1e-5
    )
    assert sampler.num_core_rows == num


def test_a_large_vocabulary_is_drawn_by_its_weights() -> None:
    """Pearson's chi-square over up to 32 groups of about equal weight, at p = 0.001."""
    vocab, num, num_groups = 20_000, 2048, 32
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    for params in ({}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 2000}, {"min_p": 0.02}):
        rows = [row(17, index, **params) for index in range(num)]
        ids, ends = borders(logits.numpy(), rows[0].params)
        shares = np.diff(ends, prepend=0.0)
        group = ((ends - shares / 2) * num_groups).astype(np.int64)
        found = [token.token_id for token in Sampler(vocab).sample(logits.expand(num, -1), rows)]
        assert set(found) <= set(ids.tolist())
        counts = np.bincount(group[np.searchsorted(ids, found)], minlength=num_groups)
        expected = num * np.bincount(group, weights=shares, minlength=num_groups)
        filled = expected > 0
        # 31 degrees of freedom; fewer where a token is heavier than a group.
        assert filled.sum() > 20
        assert ((counts - expected)[filled] ** 2 / expected[filled]).sum() < 61.1


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
            position=[rng.randrange(vocab) for _ in range(rng.randrange(12))],
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
    for wrong in ({"prompt": [8]}, {"position": [-1]}, {"allowed_token_ids": [2**40]}):
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


# -- log-probabilities ------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [7, 1000, 4099])
@pytest.mark.parametrize("num", [0, 1, 5, 20, 900, -1])
def test_the_likeliest_tokens_are_those_of_a_sort(vocab: int, num: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(3, vocab, generator=generator)
    logits[1] = logits[1].round()
    logits[2] = 0.0
    targets = [vocab - 1, vocab // 2, 0]
    exact = logits.double().log_softmax(dim=-1)
    wanted = vocab if num < 0 else min(num, vocab)
    sampler = Sampler(vocab)
    for i, top in enumerate(sampler.prompt_logprobs(logits, targets, num)):
        order = torch.sort(logits[i], descending=True, stable=True).indices.tolist()
        rank_of = {token: rank for rank, token in enumerate(order, start=1)}
        ids = list(dict.fromkeys([targets[i], *order[:wanted]]))
        assert list(top) == ids
        assert [rank for _, rank in top.values()] == [rank_of[token] for token in ids]
        expected = exact[i, ids].tolist()
        assert [x for x, _ in top.values()] == pytest.approx(expected, abs=2e-6, rel=2e-7)
    assert sampler.num_core_rows == 3


@pytest.mark.parametrize("num_listed", [3, 32, 33, 500])
def test_listed_tokens_are_ranked(num_listed: int) -> None:
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    listed = random.Random(2).sample(range(900), num_listed)
    [token] = Sampler(900).sample(logits, [row(3, logprobs=0, logprob_token_ids=listed)])
    order = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    assert token.top is not None
    assert list(token.top) == list(dict.fromkeys([token.token_id, *listed]))
    assert [rank for _, rank in token.top.values()] == [order.index(i) + 1 for i in token.top]


# -- the same bits everywhere -----------------------------------------------------------

MIXTURE: list[dict[str, Any]] = [
    {},
    {"logprobs": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "logprobs": 0},
    {"top_p": 0.9},
    {"top_k": 600},
    {"top_p": 0.5, "min_p": 0.01, "frequency_penalty": 0.7},
    {"min_p": 0.05, "logprobs": 20},
    {"allowed_token_ids": list(range(0, 900, 7)), "temperature": 0.2},
]


@pytest.mark.parametrize("vocab", [1000, 33_001])
def test_every_instruction_set_and_any_number_of_threads_give_the_same_bits(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator) * 3
    logits[7, 3] = float("nan")
    rows = [row(i, i % 3, i % 5, **MIXTURE[i % len(MIXTURE)]) for i in range(40)]
    first = core(vocab).sample(described(logits), rows)
    assert first[3] == 1
    for isa in ISAS:
        assert core(vocab, isa).sample(described(logits), rows) == first
    for num_threads in (2, 3):
        assert core(vocab, num_threads=num_threads).sample(described(logits), rows) == first
    with pytest.raises(ValueError, match="instruction set 'wrong'"):
        core(vocab, "wrong")


def test_a_row_is_the_same_among_others_and_in_bfloat16() -> None:
    logits = (torch.randn(20, 3000, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    rows = [row(i, **MIXTURE[i % len(MIXTURE)]) for i in range(20)]
    together = Sampler(3000).sample(logits, rows)
    assert together == Sampler(3000).sample(logits.float(), rows)
    halves = logits.half()
    assert Sampler(3000).sample(halves, rows) == Sampler(3000).sample(halves.float(), rows)
    for i in range(20):
        assert Sampler(3000).sample(logits[i : i + 1], rows[i : i + 1]) == [together[i]]


def test_infinities_at_a_low_temperature() -> None:
    logits = torch.tensor([[0.0, INF, 0.0, INF], [-INF, 3.0e38, 3.0e38, 0.0]])
    rows = [[row(s, temperature=2e-5), row(s, temperature=2e-5, top_p=0.9)] for s in range(50)]
    sampler = Sampler(4)
    found = [[t.token_id for t in sampler.sample(logits, pair)] for pair in rows]
    assert {first for first, _ in found} == {1, 3}
    assert {second for _, second in found} == {1, 2}
    assert sampler.num_repaired_rows == 50
