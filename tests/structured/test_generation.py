"""Answers of the embedded model, drawn at random, match what was asked for in full."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from vmserve import LLM, BeamSearchParams, CompletionOutput, SamplingParams
from vmserve.errors import InvalidRequestError
from vmserve.types import RequestTerms

PROMPT = "Once upon a time"
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "dtype": "float32"}
EBNF = """
root ::= sum "=" number  # a comment
sum ::= term ("+" term)*
term ::= number | "(" sum ")"
number ::= [0-9]{1,3}
"""
LARK = """
start: greeting " " NAME "!"
greeting: "Hello" | "Good " PART
PART: "morning" | "evening"
NAME: /[A-Z][a-z]{1,8}/
"""
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": r"(\d{3}-){2}\d{4}|none"}, r"(\d{3}-){2}\d{4}|none"),
    "anchored": ({"regex": r"^[ab]{2,4}$"}, r"[ab]{2,4}"),
    "choice": (
        {"choice": ["red", "dark red", 'a "b"\n', "grün 😀"]},
        '(dark )?red|a "b"\n|grün 😀',
    ),
    "ebnf": ({"grammar": EBNF}, r"[0-9+()]+=\d{1,3}"),
    "lark": ({"grammar": LARK}, "(Hello|Good (morning|evening)) [A-Z][a-z]{1,8}!"),
}
SHORT = {"type": "string", "maxLength": 6}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory="64MiB", **OPTIONS) as opened:
        yield opened


def drawn(llm: LLM, given: dict[str, Any], **options: Any) -> list[CompletionOutput]:
    options = {"temperature": 1.5, "seed": 5, "max_tokens": 300, "n": 8, **options}
    params = SamplingParams(structured_outputs=given, **options)  # type: ignore[arg-type]
    [result] = llm.generate(PROMPT, params)
    return result.outputs


@pytest.mark.parametrize("name", CASES)
def test_what_stops_matches(llm: LLM, name: str) -> None:
    given, pattern = CASES[name]
    outputs = drawn(llm, given)
    stopped = [output.text for output in outputs if output.finish_reason == "stop"]
    assert len(stopped) >= 4
    assert all(re.fullmatch(pattern, text) for text in stopped), stopped
    assert len(set(stopped)) > 1


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    match rng.choice(kinds):
        case "integer":
            return {
                "type": "integer",
                "minimum": rng.randrange(10),
                "maximum": 10 + rng.randrange(90),
            }
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": 1 + rng.randrange(9)}
        case "string":
            return rng.choice([SHORT, {"type": "string", "pattern": "^[a-f]{2,4}$"}])
        case "enum":
            return {"enum": ["x", 2, None, True, [1], {"a": "ü"}][rng.randrange(3) :]}
        case "const":
            return {"const": {"k": [1, "two"]}}
        case "array":
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": rng.randrange(2), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1), {"type": "null"}]}
        case "object":
            return random_object(rng, depth)
        case plain:
            return {"type": plain}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", "b b", "c-c", "dé"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


@pytest.mark.parametrize("seed", range(8))
def test_json_conforms_to_random_schemas(llm: LLM, seed: int) -> None:
    schema = random_object(random.Random(seed), 2)
    outputs = drawn(llm, {"json": schema}, n=4)
    texts = [output.text for output in outputs if output.finish_reason == "stop"]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
        # Between JSON's tokens there is one space at most.
        assert "  " not in re.sub(r'"([^"\\]|\\.)*"', '""', text)
        assert "\n" not in text


def test_any_json_object(llm: LLM) -> None:
    outputs = drawn(llm, {"json_object": True}, n=8, max_tokens=400, logit_bias=None)
    for output in outputs:
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
        else:
            assert output.text.lstrip().startswith("{")


def test_references_of_a_schema(llm: LLM) -> None:
    schema = {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    }
    for output in drawn(llm, {"json": schema}, n=4):
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)


def test_the_end_needs_no_token_and_counts_none(llm: LLM) -> None:
    [output] = drawn(llm, {"regex": "yes"}, n=1, logprobs=1, ignore_eos=True, min_tokens=20)
    assert (output.text, output.finish_reason, output.stop_reason) == ("yes", "stop", None)
    assert llm.decode(output.token_ids) == "yes"
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_an_open_answer_ends_with_the_end_token(llm: LLM) -> None:
    eos = next(iter(llm.engine.model_config.eos_token_ids))
    [output] = drawn(llm, {"regex": "a+"}, n=1, logit_bias={eos: 100})
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == eos
    assert set(output.text) == {"a"}
    [longer] = drawn(llm, {"regex": "a+"}, n=1, logit_bias={eos: 100}, min_tokens=7)
    assert len(longer.token_ids) == 8
    [endless] = drawn(llm, {"regex": "a+"}, n=1, max_tokens=9, ignore_eos=True, min_tokens=9)
    assert endless.finish_reason == "length"


def test_the_grammar_wins_over_what_else_is_asked_for(llm: LLM) -> None:
    ids = llm.encode("no", add_special_tokens=False)
    [output] = drawn(llm, {"choice": ["yes"]}, n=1, allowed_token_ids=ids, bad_words=["yes", "y"])
    assert (output.text, output.finish_reason) == ("yes", "stop")


def test_stop_ids_end_an_answer_only_where_it_matches(llm: LLM) -> None:
    [stop] = llm.encode("b", add_special_tokens=False)[-1:]
    options: dict[str, Any] = {"n": 1, "stop_token_ids": [stop], "logit_bias": {stop: 100}}
    [output] = drawn(llm, {"regex": "a{3}[ab]*"}, **options)
    assert output.finish_reason == "stop"
    assert output.stop_reason == stop
    assert re.fullmatch("a{3}", output.text)


def test_stop_strings(llm: LLM) -> None:
    [output] = drawn(llm, {"regex": "x{2}y{2}z{2}"}, n=1, stop="yz")
    assert (output.text, output.finish_reason, output.stop_reason) == ("xxy", "stop", "yz")


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    [output] = drawn(llm, {"choice": ["zebra"]}, n=1, logprobs=0)
    prompt = llm.encode(PROMPT)
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    [free] = llm.generate([prompt + output.token_ids], scored)
    assert output.logprobs is not None
    assert free.prompt_logprobs is not None
    expected = [
        position[token].logprob
        for position, token in zip(
            free.prompt_logprobs[len(prompt) :], output.token_ids, strict=True
        )
        if position is not None
    ]
    own = [next(iter(position.values())).logprob for position in output.logprobs]
    assert own == pytest.approx(expected, abs=1e-4)
    assert sum(own) < math.log(0.5)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_beams(llm: LLM, ignore_eos: bool) -> None:
    """The best answers under the grammar, with the model's own log-probabilities."""
    words = ["one", "two", "three", "four"]
    params = BeamSearchParams(
        beam_width=3,
        ignore_eos=ignore_eos,
        structured_outputs={"regex": f"({'|'.join(words)}) [ab]{{3}}"},  # type: ignore[arg-type]
        logprobs=1,
    )
    [result] = llm.beam_search(PROMPT, params)
    assert len(result.outputs) == 3
    for output in result.outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch("(one|two|three|four) [ab]{3}", output.text)
        assert output.logprobs is not None
        total = sum(next(iter(position.values())).logprob for position in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3


def test_a_bad_grammar_refuses_the_whole_call(llm: LLM) -> None:
    good, bad = (SamplingParams(structured_outputs={"regex": r}) for r in ("a", "("))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate([PROMPT, PROMPT], [good, bad])
    assert not llm.engine.has_unfinished
    assert llm.engine.structured.num_compiling == 0


def test_a_grammar_that_nobody_checked_fails_its_request_alone(llm: LLM) -> None:
    """As it comes to the engine of a server: queued, and refused before anything is generated."""
    engine = llm.engine
    bad = SamplingParams(structured_outputs={"regex": "[z-"})  # type: ignore[arg-type]
    ids = llm.encode(PROMPT)
    engine.add_request("bad", ids, bad, RequestTerms(stream=True))
    engine.add_request("plain", ids, SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.accepted_output("bad") is None
    assert engine.accepted_output("plain") is not None
    failures, outputs = [], []
    while engine.has_unfinished:
        result = engine.step()
        failures += result.failures
        outputs += result.outputs
    [failure] = failures
    assert failure.request_id == "bad"
    assert isinstance(failure.error, InvalidRequestError)
    [output] = outputs
    assert output.request_id == "plain"


def test_a_request_that_is_aborted_while_its_grammar_is_compiled(llm: LLM) -> None:
    engine = llm.engine
    slow = SamplingParams(structured_outputs={"regex": "(a{1000}){999}"})  # type: ignore[arg-type]
    engine.add_request("slow", llm.encode(PROMPT), slow)
    for _ in range(3):
        assert engine.step().outputs == ()
    output = engine.abort("slow")
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    assert not engine.has_unfinished
    [result] = llm.generate(PROMPT, SamplingParams(max_tokens=2))
    assert result.outputs[0].token_ids
