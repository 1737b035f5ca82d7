"""Thoughts apart from answers, wherever the text is cut."""

from __future__ import annotations

import pytest

from vmserve.tools.base import CallArguments, CallBegins, Content, Event, Reasoning
from vmserve.tools.hermes import HermesParser
from vmserve.tools.reasoning import (
    ReasoningParser,
    TextParser,
    begins_in_thought,
    template_thinks,
)

CASES = [
    ("<think>\nTwo and two.\n</think>\n\nFour.", False, "Two and two.", "Four."),
    ("\n<think>a</think>b", False, "a", "b"),
    ("Two and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
    ("no thought", False, "", "no thought"),
    ("  a space before", False, "", "  a space before"),
    ("<thin", False, "", "<thin"),
    ("<think>never ends </thi", False, "never ends </thi", ""),
    ("<think></think>b", False, "", "b"),
    ("a <think>later</think> b", False, "", "a <think>later</think> b"),
    ("<think>a</think>b </think> c", False, "a", "b </think> c"),
    ("<think>a  \n b</think>", False, "a  \n b", ""),
    ("", True, "", ""),
]


def read(parser: ReasoningParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def texts(events: list[Event]) -> tuple[str, str]:
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    return thought, "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize(("text", "inside", "thought", "answer"), CASES)
def test_a_thought_is_apart_wherever_the_text_is_cut(
    text: str, inside: bool, thought: str, answer: str
) -> None:
    cuts = [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]
    for pieces in cuts:
        parser = ReasoningParser(TextParser(), is_inside=inside)
        assert texts(read(parser, pieces)) == (thought, answer), pieces


def test_nothing_is_held_back_that_can_be_told() -> None:
    parser = ReasoningParser(TextParser(), is_inside=True)
    assert parser.feed("I see") == [Reasoning("I see")]
    assert parser.feed(" that </") == [Reasoning(" that")]
    assert parser.feed("think>\nYes") == [Content("Yes")]
    assert parser.feed(" it is") == [Content(" it is")]


def test_calls_come_after_a_thought_and_not_from_within_it() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = ReasoningParser(HermesParser(frozenset({"now"})), is_inside=False)
    events = read(parser, [f"<think>perhaps {call}</think>", call])
    assert events[-2:] == [CallBegins("now"), CallArguments("{}")]
    assert [type(event) for event in events].count(CallBegins) == 1
    assert texts(events) == (f"perhaps {call}", "")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ],
)
def test_the_prompt_tells_whether_it_ends_in_a_thought(prompt: str, inside: bool) -> None:
    assert begins_in_thought(prompt) is inside


def test_the_template_tells_whether_a_model_thinks() -> None:
    assert template_thinks("{{ content.split('</think>')[-1] }}")
    assert not template_thinks("{{ content }}")
