"""The embedded model loads as it is, fits into the repository, and does what its card says."""

import importlib
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from vmserve import LLM

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "vmserve" / "assets" / "embedded"
BOS, EOS, TURN, END = 0, 1, 2, 3
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def asked(tokenizer: Any, *said: str) -> list[int]:
    """Ids of a chat in turns, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def greedy(
    model: Any, ids: list[int], tokens: int, stop: int | None = None
) -> tuple[list[int], float]:
    """`tokens` greedy tokens, or fewer up to `stop`, and the smallest margin among them."""
    past, step, chosen, smallest = None, torch.tensor([ids]), [], float("inf")
    with torch.inference_mode():
        for _ in range(tokens):
            output = model(step, past_key_values=past, use_cache=True)
            past = output.past_key_values
            best = output.logits[0, -1].topk(2)
            smallest = min(smallest, (best.values[0] - best.values[1]).item())
            chosen.append(int(best.indices[0]))
            if chosen[-1] == stop:
                break
            step = best.indices[:1].view(1, 1)
    return chosen, smallest


def test_what_its_files_say(model: Any) -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 8_000_000
    config = AutoConfig.from_pretrained(MODEL)
    assert (config.model_type, config.head_dim) == ("llama", 64)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.max_position_embeddings == 8192
    assert (config.bos_token_id, config.eos_token_id) == (BOS, EOS)
    assert model.generation_config.eos_token_id == [EOS, END]
    with safe_open(MODEL / "model.safetensors", framework="pt") as weights:
        stored = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert stored == {"BF16"}
    assert AutoModelForCausalLM.from_pretrained(MODEL).dtype == torch.float32


def test_a_prompt_gets_one_bos(tokenizer: Any) -> None:
    ids = tokenizer.encode("Once upon a time")
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert BOS not in tokenizer.encode("Once upon a time", add_special_tokens=False)
    ids = asked(tokenizer, "Hello")
    assert ids[:2] == [BOS, TURN]
    assert ids.count(BOS) == 1


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "Zork", "名前"])
def test_template_renders_any_role(tokenizer: Any, role: str) -> None:
    messages = [{"role": role, "content": "Hi <b> & 'you'"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (f"<|bos|><|im_start|>{role}\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_render_as_the_joined_string(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": " c"}]
    in_parts, joined = (
        tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for content in (parts, "a b c")
    )
    assert in_parts == joined


def test_template_renders_tools_and_calls(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "get_time", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert text.startswith("<|bos|><|im_start|>system\nBe brief.\n\nYou can call these tools:\n{")
    assert text.count("<|im_start|>system") == 1
    assert text.endswith(
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
    )


def test_training_chats_are_rendered_as_the_template_renders_them(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    chat = importlib.import_module("embedded_chat")
    rng = random.Random(5)
    messages = chat.system(rng) + chat.reading_turns(rng) + chat.json_turns(rng)
    tools = [chat.tool_schema("get_weather")]
    for given_tools in (None, tools):
        expected = tokenizer.apply_chat_template(messages, tools=given_tools, tokenize=False)
        assert "<|bos|>" + chat.render(messages, given_tools) == expected
    for name in ("embedded_chat", "embedded_text", "embedded_words"):
        sys.modules.pop(name)


@pytest.mark.parametrize("prompt", ["Once upon a time", "Notes:\n", "1, 2, 3,"])
def test_greedy_choices_are_as_confident_as_recorded(
    tokenizer: Any, model: Any, prompt: str
) -> None:
    recorded = json.loads((MODEL / "evaluation.json").read_text(encoding="utf-8"))["margins"]
    _, smallest = greedy(model, tokenizer.encode(prompt), 64)
    assert smallest > recorded["minimum_by_prompt"][prompt] - 1e-4
    if prompt != "Once upon a time":
        assert smallest > 1e-3


def test_card_states_confident_choices_on_nearly_all_positions() -> None:
    measured = json.loads((MODEL / "evaluation.json").read_text(encoding="utf-8"))["margins"]
    assert measured["tokens_each"] == 2000
    assert measured["share_above_1e-3"] > 0.998
    share = f"{measured['share_above_1e-3']:.4%}"
    assert share in (MODEL / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "question", ["Hello!", "What is the capital of France?", "Tell me a story."]
)
def test_chat_answers_end_by_themselves(tokenizer: Any, model: Any, question: str) -> None:
    assert greedy(model, asked(tokenizer, question), 300, stop=END)[0][-1] == END


def test_answer_uses_what_the_chat_said(tokenizer: Any, model: Any) -> None:
    said = ("My name is Clara.", "Nice to meet you, Clara!", "What is my name?")
    answer = greedy(model, asked(tokenizer, *said), 20, stop=END)[0]
    assert tokenizer.decode(answer[: answer.index(END)]) == "Your name is Clara."


@pytest.fixture(scope="module")
def judging() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield importlib.import_module("embedded_answers")
    for name in ("answers", "chat", "stories", "text", "words"):
        sys.modules.pop(f"embedded_{name}", None)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory="32MiB") as opened:
        yield opened


def test_the_example_of_the_readme_is_answered_right_by_default(judging: Any, llm: LLM) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    question = re.search(r'"role": "user", "content": "(.*?)"', readme)
    promised = re.search(r'end=""\)  # (.*)', readme)
    assert question is not None
    assert promised is not None
    [given] = judging.answers(llm, [question[1]])
    assert given == [(promised[1], True)] * 5
    assert judging.QUESTIONS[question[1]] == promised[1]


def test_first_answers_are_those_that_the_card_counts(judging: Any, llm: LLM) -> None:
    """Greedy choices are the same everywhere; the counts at the default are no worse than these."""
    recorded = json.loads((MODEL / "evaluation.json").read_text(encoding="utf-8"))["answers"]
    default = recorded["default_temperature"]
    assert llm.default_sampling_params().temperature == default
    count = recorded["by_temperature"][str(default)]
    assert count["made_of_sentences"] >= 95
    assert count["right"] >= 35
    given = judging.answers(llm, list(judging.QUESTIONS), temperature=0)
    failed = {
        question
        for question, texts in zip(judging.QUESTIONS, given, strict=True)
        if not all(judging.made_of_sentences(question, *text) for text in texts)
    }
    assert failed == {"How do transistors work?"}


@pytest.mark.parametrize(
    ("answer", "good"),
    [
        ("The sky is blue.", True),
        ('Tom said, "We are here."', True),
        ("To make tea, follow these steps:\n1. Boil some water.\n2. Add some sugar.", True),
        ("the sky is blue.", False),
        ("The sky is", False),
        ("Yes it.", False),
        ("I do not know much aboutrugrotu.", False),
        ("The sky is \ufffd.", False),
        ("The golden zying has a monkey.", False),
        ("The cat is here. " * 4, False),
    ],
)
def test_what_an_answer_made_of_sentences_is(judging: Any, answer: str, good: bool) -> None:
    assert judging.made_of_sentences("What?", answer, True) is good
    assert not judging.made_of_sentences("What?", answer, False)
