"""The sampler: exact values where they are known, distributions where they are not."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from vmserve.sampling import SampledToken, Sampler, SamplingParams, SamplingRow
from vmserve.sampling import sampler as sampler_module
from vmserve.sampling import torch_sampler as torch_module
from vmserve.sampling.params import with_checked
from vmserve.sampling.torch_sampler import TorchSampler

INF = float("inf")


@pytest.fixture(autouse=True, params=["core", "torch"])
def way(request, monkeypatch):
    """Everything holds for the C++ core and for torch, which has the logits of devices."""
    if request.param == "torch":
        monkeypatch.setitem(globals(), "Sampler", TorchSampler)
    return request.param


def row(params=None, *, prompt=(), output=(), seed=0, index=0, stop_ids=(), bad_words=(), **kwargs):
    params = params or SamplingParams(**{"temperature": 0.0, **kwargs})
    return SamplingRow(
        params=with_checked(params, bad_words=tuple(bad_words)),
        seed=seed,
        index=index,
        tokens=[*prompt, *output],
        num_prompt=len(prompt),
        stop_ids=frozenset(stop_ids),
    )


def token(logits, **kwargs):
    """The token sampled from one row."""
    [sampled] = Sampler(len(logits)).sample(torch.tensor([logits]), [row(**kwargs)])
    return sampled.token_id


def log_softmax(logits):
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


# -- greedy and log-probabilities -------------------------------------------------------


def test_greedy_takes_the_likeliest_and_the_lowest_id_of_equals():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0], [-5.0, -4.0, -4.0]])
    sampled = Sampler(3).sample(logits, [row(), row(), row()])
    assert [s.token_id for s in sampled] == [1, 0, 1]
    expected = [log_softmax(x)[i] for x, i in zip(logits.tolist(), [1, 0, 1], strict=True)]
    assert [s.logprob for s in sampled] == pytest.approx(expected, abs=1e-6)
    assert [s.top for s in sampled] == [None, None, None]


def test_no_rows():
    assert Sampler(5).sample(torch.empty(0, 5), []) == []
    assert Sampler(5).prompt_logprobs(torch.empty(0, 5), [], 3) == []


def test_the_shape_is_checked():
    with pytest.raises(ValueError, match=r"logits are \(1, 4\), expected \(1, 5\)"):
        Sampler(5).sample(torch.zeros(1, 4), [row()])


def test_log_probabilities_are_the_models_own():
    """Bias, masks, penalties and temperature choose the token; they leave its probability."""
    logits = [1.0, 2.0, 3.0, 0.5]
    own = log_softmax(logits)
    changed = SamplingParams(
        temperature=0.3,
        logit_bias={0: 100},
        top_k=1,
        repetition_penalty=1.5,
        allowed_token_ids=[0, 1],
        logprobs=1,
    )
    [sampled] = Sampler(4).sample(torch.tensor([logits]), [row(changed, prompt=[2], output=[1])])
    assert sampled.token_id == 0
    assert sampled.logprob == pytest.approx(own[0], abs=1e-6)
    assert list(sampled.top) == [0, 2]
    assert sampled.top[0] == (pytest.approx(own[0], abs=1e-6), 3)
    assert sampled.top[2] == (pytest.approx(own[2], abs=1e-6), 1)


def test_likeliest_tokens():
    logits = [1.0, 4.0, 2.0, 3.0]
    own = [pytest.approx(x, abs=1e-6) for x in log_softmax(logits)]
    rows = [
        row(logprobs=0),
        row(logprobs=2),
        row(logprobs=2, allowed_token_ids=[0]),
        row(logprobs=-1),
        row(),
        row(logprobs=0, logprob_token_ids=[2, 1, 0]),
        row(logprobs=5, logprob_token_ids=[2, 1, 0], allowed_token_ids=[3]),
    ]
    found = [s.top for s in Sampler(4).sample(torch.tensor([logits] * len(rows)), rows)]
    assert [top and list(top.items()) for top in found] == [
        [(1, (own[1], 1))],
        [(1, (own[1], 1)), (3, (own[3], 2))],
        [(0, (own[0], 4)), (1, (own[1], 1)), (3, (own[3], 2))],
        [(1, (own[1], 1)), (3, (own[3], 2)), (2, (own[2], 3)), (0, (own[0], 4))],
        None,
        [(1, (own[1], 1)), (2, (own[2], 3)), (0, (own[0], 4))],
        [(3, (own[3], 2)), (2, (own[2], 3)), (1, (own[1], 1)), (0, (own[0], 4))],
    ]


def test_equal_logits_are_ranked_by_id():
    logits = [1.0, 2.0, 1.0, 2.0, 1.0]
    rows = [row(logprobs=3), row(logprobs=1, allowed_token_ids=[4]), row(logprobs=-1)]
    found = [s.top for s in Sampler(5).sample(torch.tensor([logits] * 3), rows)]
    assert [[(i, rank) for i, (_, rank) in top.items()] for top in found] == [
        [(1, 1), (3, 2), (0, 3)],
        [(4, 5), (1, 1)],
        [(1, 1), (3, 2), (0, 3), (2, 4), (4, 5)],
    ]


def test_prompt_log_probabilities():
    logits = [[1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 5.0, 0.0]]
    own = [[pytest.approx(x, abs=1e-6) for x in log_softmax(x)] for x in logits]
    sampler = Sampler(4)
    tensor = torch.tensor(logits)
    assert [list(top.items()) for top in sampler.prompt_logprobs(tensor, [2, 3], 2)] == [
        [(2, (own[0][2], 3)), (1, (own[0][1], 1)), (3, (own[0][3], 2))],
        [(3, (own[1][3], 4)), (2, (own[1][2], 1)), (0, (own[1][0], 2))],
    ]
    assert [list(top.items()) for top in sampler.prompt_logprobs(tensor, [2, 2], 0)] == [
        [(2, (own[0][2], 3))],
        [(2, (own[1][2], 1))],
    ]
    everything = sampler.prompt_logprobs(tensor, [2, 3], -1)
    assert [list(top) for top in everything] == [[2, 1, 3, 0], [3, 2, 0, 1]]


def test_prompts_are_scored_in_parts(monkeypatch):
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(1))
    targets = list(range(11))
    expected = Sampler(50).prompt_logprobs(logits, targets, 4)
    for module in (sampler_module, torch_module):
        monkeypatch.setattr(module, "PART_ELEMENTS", 150)
    assert Sampler(50).prompt_logprobs(logits, targets, 4) == expected


# -- changes to the logits --------------------------------------------------------------


def test_logit_bias():
    assert token([1.0, 2.0, 3.0], logit_bias={0: 2.5}) == 0
    assert token([1.0, 2.0, 3.0], logit_bias={2: -1.5}) == 1
    assert token([1.0, 2.0, 3.0], logit_bias={2: -0.5, 0: 1.0}) == 2


def test_allowed_token_ids():
    assert token([1.0, 2.0, 3.0], allowed_token_ids=[0, 1]) == 1
    assert token([1.0, 2.0, 3.0], allowed_token_ids=[0]) == 0


def test_bad_words():
    logits = [1.0, 2.0, 3.0, 0.0]
    assert token(logits, bad_words=[(2,)]) == 1
    assert token(logits, bad_words=[(0, 2)]) == 2
    assert token(logits, bad_words=[(0, 2)], output=[0]) == 1
    assert token(logits, bad_words=[(0, 2)], output=[1]) == 2
    assert token(logits, bad_words=[(3, 0, 2), (1,)], output=[1, 3, 0]) == 0
    assert token(logits, bad_words=[(3, 0, 2)], output=[0]) == 2
    # A prompt is given; what the answer must not say is judged by the answer alone.
    assert token(logits, bad_words=[(0, 2)], prompt=[0]) == 2


def test_min_tokens_holds_stop_ids_back():
    assert token([1.0, 2.0, 3.0], min_tokens=2, output=[0], stop_ids=[2]) == 1
    assert token([1.0, 2.0, 3.0], min_tokens=2, output=[0], stop_ids=[1, 2]) == 0
    assert token([1.0, 2.0, 3.0], min_tokens=2, output=[0, 0], stop_ids=[2]) == 2
    # A tokenizer may have more ids than the model.
    assert token([1.0, 2.0, 3.0], min_tokens=1, stop_ids=[2, 3], bad_words=[(7,)]) == 1


def test_repetition_penalty():
    # 3 / 2 = 1.5 < 1.6; a negative logit is multiplied: -1 * 2 = -2 < -1.9.
    assert token([3.0, 1.6, 0.0], repetition_penalty=2.0, prompt=[0]) == 1
    assert token([3.0, 1.4, 0.0], repetition_penalty=2.0, prompt=[0]) == 0
    assert token([3.0, 1.6, 0.0], repetition_penalty=2.0, output=[0, 0]) == 1
    assert token([-1.0, -1.9], repetition_penalty=2.0, output=[0]) == 1
    assert token([-1.0, -2.1], repetition_penalty=2.0, output=[0]) == 0
    # Below 1 it encourages: 2 / 0.5 = 4.
    assert token([3.9, 2.0], repetition_penalty=0.5, prompt=[1]) == 1


def test_presence_and_frequency_penalty():
    assert token([3.0, 2.0], presence_penalty=1.1, output=[0]) == 1
    assert token([3.0, 2.0], presence_penalty=0.9, output=[0, 0, 0]) == 0
    assert token([3.0, 2.0], frequency_penalty=0.4, output=[0, 0]) == 0
    assert token([3.0, 2.0], frequency_penalty=0.4, output=[0, 0, 0]) == 1
    assert token([3.0, 2.0], frequency_penalty=0.4, presence_penalty=0.3, output=[0, 0]) == 1
    # The prompt does not count for these two.
    assert token([3.0, 2.0], presence_penalty=2.0, frequency_penalty=2.0, prompt=[0]) == 0
    assert token([3.0, 2.0], presence_penalty=-1.5, output=[1]) == 1


def test_penalties_come_after_the_bias():
    # (2 + 3) / 2 = 2.5 > 2.4, while 2 / 2 + 3 would be 4.
    assert token([2.0, 2.4], logit_bias={0: 3}, repetition_penalty=2.0, prompt=[0]) == 0
    assert token([2.0, 2.6], logit_bias={0: 3}, repetition_penalty=2.0, prompt=[0]) == 1


def test_rows_are_changed_each_by_its_own_request():
    logits = torch.tensor([[1.0, 2.0, 3.0, 2.5]]).repeat(7, 1)
    rows = [
        row(),
        row(logit_bias={0: 9}),
        row(bad_words=[(2,)]),
        row(allowed_token_ids=[1]),
        row(repetition_penalty=2.0, prompt=[2, 3]),
        row(presence_penalty=2.0, output=[2]),
        row(),
    ]
    before = logits.clone()
    assert [s.token_id for s in Sampler(4).sample(logits, rows)] == [2, 0, 3, 1, 1, 3, 2]
    assert torch.equal(logits, before)


def test_a_request_that_leaves_no_token_gives_up_what_it_allows_and_then_what_it_bans():
    logits = [1.0, 2.0, 3.0]
    assert token(logits, allowed_token_ids=[2], bad_words=[(2,)]) == 1
    assert token(logits, bad_words=[(0,), (1,), (2,)]) == 2
    assert token(logits, allowed_token_ids=[2], min_tokens=3, stop_ids=[2]) == 1
    params = SamplingParams(allowed_token_ids=[2], seed=1)
    sampled = Sampler(3).sample(
        torch.tensor([logits] * 2), [row(params, bad_words=[(2,)]), row(params)]
    )
    assert sampled[0].token_id in (0, 1)
    assert sampled[1].token_id == 2
    assert all(math.isfinite(s.logprob) for s in sampled)


@pytest.mark.parametrize(
    ("logits", "expected", "logprob"),
    [
        ([math.nan, 1.0, 0.0], 1, -math.log(1 + math.exp(-1))),
        ([0.0, INF, 0.0], 1, 0.0),
        ([-INF, -INF, -INF], 0, -math.log(3)),
        ([math.nan] * 3, 0, -math.log(3)),
        ([-INF, 0.0, -INF], 1, 0.0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(logits, expected, logprob, temperature):
    sampler = Sampler(3)
    tensor = torch.tensor([[0.0, 0.0, 5.0], logits])
    params = SamplingParams(temperature=temperature, logprobs=2, top_p=0.01)
    first, second = sampler.sample(tensor, [row(params), row(params)])
    assert first.token_id == 2
    assert second.token_id == expected
    assert second.logprob == pytest.approx(logprob, abs=1e-6)
    assert not any(math.isnan(x) for x, _ in second.top.values())
    assert sampler.num_repaired_rows == (0 if logits.count(-INF) == 2 else 1)


# -- drawing ----------------------------------------------------------------------------


def counts_of(logits, num, **kwargs):
    """How often each token comes, over ``num`` choices of one request."""
    params = SamplingParams(**kwargs)
    rows = [row(params, seed=11, index=j) for j in range(num)]
    sampled = Sampler(len(logits)).sample(torch.tensor([logits]).repeat(num, 1), rows)
    return Counter(s.token_id for s in sampled)


def assert_distributed(counts, weights):
    """Pearson's chi-square at p = 0.001; seeds are fixed, so this never fails by chance."""
    limits = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 7: 24.32}
    num, total = sum(counts.values()), sum(weights.values())
    assert set(counts) <= set(weights)
    expected = {i: num * w / total for i, w in weights.items()}
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in expected.items())
    assert chi_square < limits[len(weights) - 1]


LOGITS = [0.0, 1.0, -1.0, 2.0, 0.5, -0.5]


def weights_of(ids, temperature=1.0):
    return {i: math.exp(LOGITS[i] / temperature) for i in ids}


@pytest.mark.parametrize(
    ("kwargs", "ids", "temperature"),
    [
        ({}, range(6), 1.0),
        ({"temperature": 0.5}, range(6), 0.5),
        ({"temperature": 2.0}, range(6), 2.0),
        ({"top_k": 3}, [3, 1, 4], 1.0),
        ({"top_k": 6}, range(6), 1.0),
        # exp: 7.39, 2.72, 1.65, 1, 0.61, 0.37 of 13.73: 54, 20, 12, 7, 4, 3 %.
        ({"top_p": 0.53}, [3], 1.0),
        ({"top_p": 0.55}, [3, 1], 1.0),
        ({"top_p": 0.85}, [3, 1, 4], 1.0),
        ({"top_p": 0.9}, [3, 1, 4, 0], 1.0),
        ({"min_p": 0.3}, [3, 1], 1.0),
        ({"min_p": 0.1}, [3, 1, 4, 0], 1.0),
        # Of what top-k leaves (11.76) the shares are 63, 23, 14 %.
        ({"top_k": 3, "top_p": 0.85}, [3, 1], 1.0),
        ({"top_k": 3, "top_p": 0.87}, [3, 1, 4], 1.0),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.2}, [3, 1, 4], 1.0),
        ({"allowed_token_ids": [0, 5], "top_p": 0.99}, [0, 5], 1.0),
    ],
)
@pytest.mark.slow
def test_distribution(kwargs, ids, temperature):
    counts = counts_of(LOGITS, 4000, **kwargs)
    assert set(counts) == set(ids)
    if len(counts) > 1:
        assert_distributed(counts, weights_of(ids, temperature))


def test_distribution_over_a_large_vocabulary():
    """300 tokens are three blocks of the inverse CDF; most weight is in the last, cut one."""
    logits = [-20.0] * 300
    weights = {0: 1.0, 127: 2.0, 128: 1.0, 255: 1.0, 256: 1.0, 290: 3.0, 299: 4.0, 298: 1.0}
    for i, weight in weights.items():
        logits[i] = math.log(weight)
    counts = counts_of(logits, 5000)
    assert_distributed(counts, weights)


def test_top_k_of_one_is_greedy_also_among_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    params = SamplingParams(top_k=1)
    for seed in range(20):
        rows = [row(params, seed=seed), row(params, seed=seed)]
        assert [s.token_id for s in Sampler(4).sample(logits, rows)] == [1, 0]


def test_equals_at_a_limit_are_kept_from_the_lowest_id():
    assert set(counts_of([1.0, 0.0, 1.0, 1.0, 1.0], 500, top_k=3)) == {0, 2, 3}
    assert set(counts_of([1.0] * 8, 500, top_p=0.5)) == {0, 1, 2, 3}
    assert set(counts_of([0.0, 1.0, 1.0], 500, min_p=1.0)) == {1, 2}


def test_choices_differ_and_repeat():
    params = SamplingParams()
    logits = torch.zeros(8, 1000)
    rows = [row(params, seed=3, index=j) for j in range(8)]
    first = [s.token_id for s in Sampler(1000).sample(logits, rows)]
    assert first == [s.token_id for s in Sampler(1000).sample(logits, rows)]
    assert len(set(first)) == 8
    later = [row(params, seed=3, index=j, output=[1, 2]) for j in range(8)]
    assert first != [s.token_id for s in Sampler(1000).sample(logits, later)]
    other = [row(params, seed=4, index=j) for j in range(8)]
    assert first != [s.token_id for s in Sampler(1000).sample(logits, other)]


def test_positions_do_not_repeat_each_other():
    params = SamplingParams(seed=5)
    output: list[int] = []
    for _ in range(200):
        [sampled] = Sampler(50).sample(torch.zeros(1, 50), [row(params, seed=5, output=output)])
        output.append(sampled.token_id)
    assert_distributed(Counter(i // 10 for i in output), dict.fromkeys(range(5), 1.0))


# -- batches ----------------------------------------------------------------------------

MIXTURE = [
    {},
    {"logprobs": 5},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8, "logprobs": 0},
    {"top_p": 0.9},
    {"top_p": 0.5, "min_p": 0.01, "frequency_penalty": 0.7},
    {"min_p": 0.05, "logprobs": 20},
    {"logit_bias": {3: 4.0}, "presence_penalty": 0.5},
    {"allowed_token_ids": list(range(0, 900, 7)), "temperature": 0.2},
    {"min_tokens": 9, "logprobs": 3, "logprob_token_ids": [1, 2, 3]},
]


@pytest.mark.parametrize("vocab", [1000, 33_000])
def test_a_row_gets_the_same_in_any_batch(vocab):
    """Bitwise: alone, among others, in another order, at any number of threads."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(MIXTURE) * 3, vocab, generator=generator) * 3
    rows = [
        row(
            SamplingParams(**MIXTURE[i % len(MIXTURE)]),
            prompt=range(i, 40),
            output=range(100, 100 + i % 5),
            seed=i,
            index=i % 3,
            stop_ids=[int(logits[i].argmax())],
            bad_words=[(int(logits[i].argmax()), 5), (17,)] if i % 4 == 0 else [],
        )
        for i in range(len(logits))
    ]
    sampler = Sampler(vocab)
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    assert together == alone
    order = list(range(len(rows)))[::-2]
    assert sampler.sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert sampler.sample(logits, rows) == alone
    finally:
        torch.set_num_threads(threads)


def test_drafted_tokens_count_as_output():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2 * len(MIXTURE), 1000, generator=generator) * 3
    outputs = logits.topk(4).indices.tolist()  # which penalties concern
    rows = [
        row(
            SamplingParams(**MIXTURE[i % len(MIXTURE)]),
            prompt=range(i, 40),
            output=outputs[i],
            seed=i,
            stop_ids=outputs[i][:1],
            bad_words=[(*outputs[i][2:], outputs[i][0])] if i % 4 == 0 else [],
        )
        for i in range(len(logits))
    ]
    expected = Sampler(1000).sample(logits, rows)
    for num in range(1, 5):
        behind = [
            replace(each, tokens=each.tokens[:-num], drafted=tuple(each.tokens[-num:]))
            for each in rows
        ]
        assert Sampler(1000).sample(logits, behind) == expected


def test_logits_may_be_strided_or_of_another_type():
    wide = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    rows = [row(SamplingParams(top_k=5, logprobs=2), seed=i) for i in range(4)]
    expected = Sampler(10).sample(wide[:, :10].clone(), rows)
    assert Sampler(10).sample(wide[:, :10], rows) == expected
    halves = wide[:, :10].bfloat16()
    assert Sampler(10).sample(halves, rows) == Sampler(10).sample(halves.float(), rows)


def test_results_are_plain_numbers():
    [sampled] = Sampler(4).sample(torch.zeros(1, 4), [row(SamplingParams(top_k=2, logprobs=1))])
    assert isinstance(sampled, SampledToken)
    assert type(sampled.token_id) is int
    assert type(sampled.logprob) is float
    assert all(
        type(i) is int and type(x) is float and type(r) is int for i, (x, r) in sampled.top.items()
    )
