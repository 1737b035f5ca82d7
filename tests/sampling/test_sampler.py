"""The sampler: exact values where they are known, distributions where they are not."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

import pytest
import torch

from tests.sampling.rows import MIXTURE
from tests.sampling.rows import row as drawn
from vmserve.sampling import SampledToken, Sampler
from vmserve.sampling import sampler as sampler_module
from vmserve.sampling import torch_sampler as torch_module
from vmserve.sampling.torch_sampler import TorchSampler

INF = float("inf")


@pytest.fixture(autouse=True, params=["core", "torch"])
def way(request, monkeypatch):
    """Everything holds for the C++ core and for torch, which has the logits of devices."""
    if request.param == "torch":
        monkeypatch.setitem(globals(), "Sampler", TorchSampler)
    return request.param


row = functools.partial(drawn, temperature=0.0)


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
    changes = {"temperature": 0.3, "logit_bias": {0: 100}, "top_k": 1, "repetition_penalty": 1.5}
    changes |= {"allowed_token_ids": [0, 1], "logprobs": 1}
    [sampled] = Sampler(4).sample(torch.tensor([logits]), [row(prompt=[2], output=[1], **changes)])
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


@pytest.mark.parametrize("vocab", [7, 1000, 4099])
@pytest.mark.parametrize("num", [0, 1, 5, 20, 900, -1])
def test_the_likeliest_tokens_of_a_prompt_are_those_of_a_sort(way, vocab, num):
    """Equals by their ids; the prompt's own token first."""
    logits = 4 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
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
    assert way == "torch" or sampler.num_core_rows == 3


@pytest.mark.parametrize("num_listed", [3, 32, 33, 500])
def test_listed_tokens_are_ranked(num_listed):
    logits = torch.randn(1, 900, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    listed = random.Random(2).sample(range(900), num_listed)
    [sampled] = Sampler(900).sample(logits, [drawn(3, logprobs=0, logprob_token_ids=listed)])
    order = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    assert list(sampled.top) == list(dict.fromkeys([sampled.token_id, *listed]))
    assert [rank for _, rank in sampled.top.values()] == [order.index(i) + 1 for i in sampled.top]


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


def test_a_request_that_leaves_no_token_gives_up_what_it_allows_and_then_what_it_bans():
    logits = [1.0, 2.0, 3.0]
    assert token(logits, allowed_token_ids=[2], bad_words=[(2,)]) == 1
    assert token(logits, bad_words=[(0,), (1,), (2,)]) == 2
    assert token(logits, allowed_token_ids=[2], min_tokens=3, stop_ids=[2]) == 1
    rows = [drawn(allowed_token_ids=[2], bad_words=words) for words in ([(2,)], [])]
    sampled = Sampler(3).sample(torch.tensor([logits] * 2), rows)
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
    first, second = sampler.sample(
        tensor, [row(temperature=temperature, logprobs=2, top_p=0.01)] * 2
    )
    assert first.token_id == 2
    assert second.token_id == expected
    assert second.logprob == pytest.approx(logprob, abs=1e-6)
    assert not any(math.isnan(x) for x, _ in second.top.values())
    assert sampler.num_repaired_rows == (0 if logits.count(-INF) == 2 else 1)


# -- drawing ----------------------------------------------------------------------------


def kept(logits, **kwargs):
    """Which tokens come in 500 draws."""
    rows = [drawn(11, j, **kwargs) for j in range(500)]
    sampled = Sampler(len(logits)).sample(torch.tensor([logits]).repeat(500, 1), rows)
    return {each.token_id for each in sampled}


# exp: 1, 2.72, 0.37, 7.39, 1.65, 0.61 of 13.73: 7, 20, 3, 54, 12, 4 %.
LOGITS = [0.0, 1.0, -1.0, 2.0, 0.5, -0.5]


@pytest.mark.parametrize(
    ("kwargs", "ids"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 3}, {3, 1, 4}),
        ({"top_k": 6}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.53}, {3}),
        ({"top_p": 0.55}, {3, 1}),
        ({"top_p": 0.85}, {3, 1, 4}),
        ({"top_p": 0.9}, {3, 1, 4, 0}),
        ({"min_p": 0.3}, {3, 1}),
        ({"min_p": 0.1}, {3, 1, 4, 0}),
        # Of what top-k leaves (11.76) the shares are 63, 23, 14 %.
        ({"top_k": 3, "top_p": 0.85}, {3, 1}),
        ({"top_k": 3, "top_p": 0.87}, {3, 1, 4}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.2}, {3, 1, 4}),
        ({"allowed_token_ids": [0, 5], "top_p": 0.99}, {0, 5}),
    ],
)
def test_what_is_cut_is_never_drawn_and_all_else_is(kwargs, ids):
    """How often: test_core.py, number by number."""
    assert kept(LOGITS, **kwargs) == ids


def test_top_k_of_one_is_greedy_also_among_equals():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    for seed in range(20):
        rows = [drawn(seed, top_k=1)] * 2
        assert [s.token_id for s in Sampler(4).sample(logits, rows)] == [1, 0]


def test_equals_at_a_limit_are_kept_from_the_lowest_id():
    assert kept([1.0, 0.0, 1.0, 1.0, 1.0], top_k=3) == {0, 2, 3}
    assert kept([1.0] * 8, top_p=0.5) == {0, 1, 2, 3}
    assert kept([0.0, 1.0, 1.0], min_p=1.0) == {1, 2}


def test_choices_differ_and_repeat():
    def tokens(seed=3, **kwargs):
        rows = [drawn(seed, j, **kwargs) for j in range(8)]
        return [s.token_id for s in Sampler(1000).sample(torch.zeros(8, 1000), rows)]

    assert tokens() == tokens()
    assert len(set(tokens())) == 8
    assert tokens() != tokens(output=[1, 2])
    assert tokens() != tokens(seed=4)


# -- batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1000, 33_000])
def test_a_row_gets_the_same_in_any_batch(vocab):
    """Bitwise: alone, among others, in another order, at any number of threads."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(MIXTURE) * 3, vocab, generator=generator) * 3
    rows = [
        drawn(
            i,
            i % 3,
            prompt=range(i, 40),
            output=range(100, 100 + i % 5),
            stop_ids=[int(logits[i].argmax())],
            bad_words=[(int(logits[i].argmax()), 5), (17,)] if i % 4 == 0 else [],
            **MIXTURE[i % len(MIXTURE)],
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
        drawn(
            i,
            prompt=range(i, 40),
            output=outputs[i],
            stop_ids=outputs[i][:1],
            bad_words=[(*outputs[i][2:], outputs[i][0])] if i % 4 == 0 else [],
            **MIXTURE[i % len(MIXTURE)],
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
    wide = 3 * torch.randn(26, 1010, generator=torch.Generator().manual_seed(0))
    logits = wide[:, :1000]
    rows = [drawn(i, **MIXTURE[i % len(MIXTURE)]) for i in range(26)]
    assert Sampler(1000).sample(logits, rows) == Sampler(1000).sample(logits.clone(), rows)
    for halves in (logits.bfloat16(), logits.half()):
        assert Sampler(1000).sample(halves, rows) == Sampler(1000).sample(halves.float(), rows)


def test_results_are_plain_numbers():
    [sampled] = Sampler(4).sample(torch.zeros(1, 4), [drawn(top_k=2, logprobs=1)])
    assert isinstance(sampled, SampledToken)
    assert (type(sampled.token_id), type(sampled.logprob)) == (int, float)
    for token_id, (logprob, rank) in sampled.top.items():
        assert (type(token_id), type(logprob), type(rank)) == (int, float, int)
