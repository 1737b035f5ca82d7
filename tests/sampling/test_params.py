"""Sampling parameters: what is taken, what is refused, and how the error reads."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from vmserve.errors import InvalidRequestError
from vmserve.options import declared_options
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve.sampling.params import LIMITS

GOOD = [
    *[(name, None) for name in ("seed", "max_tokens", "stop", "stop_token_ids", "prediction")],
    ("min_tokens", 16),
    ("stop", []),
    ("stop", ["x"] * 16),
    ("stop", "x" * 4096),
    ("stop_token_ids", [0, 5]),
    ("allowed_token_ids", [3]),
    ("bad_words", ["a b"]),
    ("prediction", "as it was"),
    ("prediction", [5, 5, 0]),
    ("logit_bias", {5: 100, 6: -100.0}),
    ("logit_bias", {}),
]

BAD = [
    ("max_tokens", 0, "max_tokens must be at least 1, got 0 (greater_than_equal)"),
    ("min_tokens", 17, "min_tokens must be at most max_tokens=16, got 17 (less_than_equal)"),
    ("stop", "", "stop must not contain an empty string"),
    ("stop", ["a", ""], "stop must not contain an empty string"),
    ("stop", [1], "stop must be a string or a list of strings"),
    ("prediction", 5, "prediction must be a list of token ids"),
    ("prediction", [-1], "prediction: token id -1 is out of vocabulary"),
    ("stop", 1, "stop must be a string or a list of strings"),
    ("stop", [str(i) for i in range(17)], "stop must have at most 16 strings, got 17"),
    ("stop", "x" * 4097, "strings of at most 4096 characters, got 4097"),
    ("stop_token_ids", [-1], "stop_token_ids: token id -1 is out of vocabulary"),
    ("stop_token_ids", [1.0], "stop_token_ids must contain integers only, not float"),
    ("stop_token_ids", [True], "stop_token_ids must contain integers only, not bool"),
    ("stop_token_ids", "12", "stop_token_ids must be a list of token ids"),
    ("stop_token_ids", 12, "stop_token_ids must be a list of token ids"),
    ("allowed_token_ids", [], "allowed_token_ids is empty"),
    ("allowed_token_ids", [-5], "allowed_token_ids: token id -5 is out of vocabulary"),
    ("bad_words", [""], "bad_words must not contain an empty string"),
    ("bad_words", ["a"] * 1025, "bad_words must have at most 1024 strings"),
    ("bad_words", ["a" * 1025], "bad_words must have strings of at most 1024 characters"),
    ("logit_bias", [1], "logit_bias must map token ids to numbers"),
    ("logit_bias", {1: 100.5}, "logit_bias of key 1 must be at most 100, got 100.5"),
    ("logit_bias", {1: -101}, "logit_bias of key 1 must be at least -100, got -101.0"),
    ("logit_bias", {7: "x"}, "logit_bias of key 7 must be a number, not str"),
    ("logit_bias", {7: True}, "logit_bias of key 7 must be a number, not bool"),
    ("logit_bias", {7: math.nan}, "logit_bias must be a finite number"),
    ("logit_bias", {"a": 1, "2": 1, "b1": 1}, "keys that are no integers: a, b1"),
    ("logit_bias", {"1.5": 1, True: 1, "--1": 2}, "keys that are no integers: 1.5, True, --1"),
    ("logit_bias", dict.fromkeys(range(1025), 1), "logit_bias must have at most 1024 entries"),
    ("detokenize", 1, "detokenize must be true or false"),
    ("ignore_eos", None, "ignore_eos must be true or false"),
    ("skip_special_tokens", "yes", "skip_special_tokens must be true or false"),
    ("include_stop_str_in_output", 0, "include_stop_str_in_output must be true or false"),
    ("logprob_token_ids", [1], "logprob_token_ids needs logprobs"),
]


#: Other fields that a value needs beside it.
BESIDE = {"min_tokens": {"max_tokens": 2**31 - 1}}


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, name)
        for owner in (SamplingParams, BeamSearchParams)
        for name in declared_options(owner)
        if name in LIMITS
    ],
)
def test_numbers_are_held_to_their_ranges(owner, name):
    """Both ends are taken; beyond them the error names the field, the bound and the value."""
    bounds = LIMITS[name]
    fields = {"beam_width": 2} if owner is BeamSearchParams else {"n": 1}

    def told(value):
        with pytest.raises(InvalidRequestError) as caught:
            owner(**{**fields, **BESIDE.get(name, {}), name: value})
        assert caught.value.param == name
        return str(caught.value)

    low = max(bounds.low, 1) if name == "max_tokens" else bounds.low
    step = 1 if bounds.integer else 1e-6
    for value in (low + step if bounds.open_low else low, min(bounds.high, 2**31 - 1)):
        owner(**{**fields, **BESIDE.get(name, {}), name: value})
    high = f"at most {bounds.high}, got {bounds.high + step} (less_than_equal)"
    assert told(bounds.high + step) == f"{name} must be {high}"
    least, under = ("greater than", bounds.low) if bounds.open_low else ("at least", low - step)
    assert told(under).startswith(f"{name} must be {least} {low}, got {under} (greater_than")
    kind = "an integer" if bounds.integer else "a number"
    for value in (True, "2", [1]):
        assert told(value) == f"{name} must be {kind}, not {type(value).__name__}"
    for value in () if bounds.integer else (math.nan, math.inf, 10**400):
        assert f"{name} must be a finite number, got " in told(value)
    if not declared_options(owner)[name].optional:
        assert told(None) == f"{name} must be {kind}, not NoneType"


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_values_inside_the_bounds(name, value):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_values_outside_the_bounds(name, value, message):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert message in str(caught.value)
    assert caught.value.param == name


def test_values_are_normalised():
    params = SamplingParams(
        stop="end",
        stop_token_ids=[5, np.int64(3), 5],
        logit_bias={"7": 1, 8: np.float32(0.5)},
        temperature=1,
        seed=np.int64(4),
        bad_words="word",
    )
    assert params.stop == ("end",)
    assert params.stop_token_ids == (5, 3)
    assert params.logit_bias == {7: 1.0, 8: 0.5}
    assert params.bad_words == ("word",)
    assert type(params.temperature) is float
    assert type(params.seed) is int
    assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a")


def test_replace_checks_again_and_nothing_else_changes_parameters():
    params = SamplingParams(stop=["a"], n=3)
    assert replace(params, n=2).stop == ("a",)
    with pytest.raises(InvalidRequestError, match="n must be at most 128"):
        replace(params, n=200)
    with pytest.raises(FrozenInstanceError):
        params.n = 2
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)
    with pytest.raises(TypeError):
        SamplingParams(1)


def test_fields_that_need_others():
    assert SamplingParams(n=2, best_of=3).best_of == 3
    with pytest.raises(InvalidRequestError, match="best_of must be at least n: best_of=2, n=3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(InvalidRequestError, match="stop strings need the text"):
        SamplingParams(detokenize=False, stop="a")
    SamplingParams(detokenize=False, stop_token_ids=[1])


def test_greedy_is_a_temperature_of_nearly_zero():
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy


@pytest.mark.parametrize(
    "name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias", "prediction"]
)
def test_ids_out_of_vocabulary(name):
    ids = {3: 1.0, 100: 1.0, 250: -1.0} if name == "logit_bias" else [3, 100, 250]
    params = SamplingParams(**{name: ids}, logprobs=0)
    params.validate_for(251, 20)
    with pytest.raises(InvalidRequestError) as caught:
        params.validate_for(100, 20)
    assert f"{name} has token ids that are out of vocabulary: 100, 250;" in str(caught.value)
    assert "the vocabulary size is 100" in str(caught.value)
    assert caught.value.param == name


def test_an_error_names_some_ids_and_counts_the_rest():
    with pytest.raises(InvalidRequestError, match="out of vocabulary: -1;"):
        SamplingParams(logit_bias={-1: 1.0}).validate_for(100, 20)
    params = SamplingParams(stop_token_ids=range(1000, 1100))
    with pytest.raises(InvalidRequestError, match="1063 and 36 more; the vocabulary") as caught:
        params.validate_for(100, 20)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("asked", "limit", "told"),
    [
        (20, 20, None),
        (21, 20, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        (-1, 20, "Requested sample logprobs of 100, which is greater than max allowed: 20"),
        (-1, -1, None),
        (-1, 100, None),
        (-1, 5000, None),
        (101, -1, "greater than max allowed: 100"),
        (0, 0, None),
        (1, 0, "greater than max allowed: 0"),
    ],
)
def test_limits_of_log_probabilities(asked, limit, told):
    for name in ("logprobs", "prompt_logprobs"):
        params = SamplingParams(**{name: asked})
        if told is None:
            params.validate_for(100, limit)
            continue
        with pytest.raises(InvalidRequestError) as caught:
            params.validate_for(100, limit)
        kind = "sample" if name == "logprobs" else "prompt"
        assert told.replace("sample", kind) in str(caught.value)
        assert caught.value.param == name


def test_beam_search_parameters():
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.5)
    assert (params.beam_width, params.max_tokens, params.temperature) == (4, 8, 0.0)
    assert (params.min_tokens, params.early_stopping) == (0, False)
    for early_stopping in (True, False, "never"):
        params = BeamSearchParams(beam_width=2, early_stopping=early_stopping)
        assert params.early_stopping == early_stopping
    for changes, message in [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"early_stopping": 1}, 'early_stopping must be true, false or "never"'),
        ({"early_stopping": "Never"}, 'early_stopping must be true, false or "never"'),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens=8, got 9"),
    ]:
        with pytest.raises(InvalidRequestError) as caught:
            BeamSearchParams(**{"beam_width": 2, **changes})
        assert caught.value.param in changes
        assert message in str(caught.value)
