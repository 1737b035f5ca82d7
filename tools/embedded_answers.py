"""Judges the embedded model's chat answers as a first user gets them: at its default sampling.

The rule: an answer is *made of sentences* when it
1. ended by itself;
2. is printable ASCII: 3 to 200 words, each of which the training text uses (those aside that it
   makes up) or the question;
3. starts with a capital letter, a digit or a quotation mark, and ends with `.`, `!` or `?`, before
   a closing quotation mark too;
4. has no run of four words more than three times.

Whether what it says is right is judged for the questions that have one answer, by its text.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedded_chat import write_chat
from embedded_text import write_document
from embedded_words import SYLLABLES

from vmserve import LLM

SEEDS = range(5)
#: Each with the text of its right answer, where there is one.
QUESTIONS: dict[str, str | None] = {
    "Hello!": None,
    "Who are you?": None,
    "What can you do?": None,
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "What colour is the sky?": "The sky is blue.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What sound does a cow make?": "A cow says moo.",
    "Which day comes after Monday?": "Tuesday comes after Monday.",
    "Which month comes after April?": "May comes after April.",
    "What is 2 + 3?": "2 + 3 = 5.",
    "How much is two plus three?": "Two plus three is five.",
    "How do I make pancakes?": None,
    "Tell me a joke.": None,
    "Tell me a story.": None,
    "Write a short poem about the cat.": None,
    "Explain the sea.": None,
    "What is the meaning of life?": None,
    "Why is the sky blue?": None,
    "How do transistors work?": None,
}
_SENTENCES = re.compile(r'["A-Z0-9][\n -~]*[.!?]"?')


def words(text: str) -> list[str]:
    """The words and numbers of `text`, in small letters."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower())


@functools.cache
def known_words() -> frozenset[str]:
    """Words of 4,000 training texts, but those that the grammars make up of syllables.

    A few real ones could be made up (near, fine, chest): chance does not put a word into 20 texts.
    """
    rng = random.Random(79)
    found: Counter[str] = Counter()
    for _ in range(2000):
        found.update(set(words(write_chat(rng, 1024))))
        found.update(set(words(write_document(rng, 1024))))
    made_up = re.compile(f"(?:{'|'.join(SYLLABLES)}){{2,4}}")
    return frozenset(
        word for word, texts in found.items() if texts >= (20 if made_up.fullmatch(word) else 2)
    )


def made_of_sentences(question: str, answer: str, ended: bool) -> bool:
    """Whether the answer satisfies the rule above."""
    said = words(answer)
    runs = Counter(zip(said, said[1:], said[2:], said[3:], strict=False))
    return (
        ended
        and 3 <= len(said) <= 200
        and known_words().issuperset(set(said) - set(words(question)))
        and max(runs.values(), default=0) <= 3
        and _SENTENCES.fullmatch(answer) is not None
    )


def answers(llm: LLM, questions: Sequence[str], **changes: Any) -> list[list[tuple[str, bool]]]:
    """Each question's answers, one a seed, and whether they ended by themselves.

    ``changes``: fields of SamplingParams that replace the model's defaults.
    """
    asked = [[{"role": "user", "content": question}] for question in questions for _ in SEEDS]
    params = [
        llm.default_sampling_params(max_tokens=None, seed=seed, **changes)
        for _ in questions
        for seed in SEEDS
    ]
    choices = [result.outputs[0] for result in llm.chat(asked, params)]
    given = [(choice.text, choice.finish_reason == "stop") for choice in choices]
    return [given[start : start + len(SEEDS)] for start in range(0, len(given), len(SEEDS))]


def judge(path: Path) -> dict[str, Any]:
    """Counts of answers at the model's default temperature, and at 1 for comparison."""
    with LLM(str(path)) as llm:
        default = llm.default_sampling_params().temperature
        counts = {str(at): _count(llm, temperature=at) for at in (default, 1.0)}
    return {
        "questions": len(QUESTIONS),
        "seeds": len(SEEDS),
        "closed_questions": sum(map(bool, QUESTIONS.values())),
        "default_temperature": default,
        "by_temperature": counts,
    }


def _count(llm: LLM, **changes: Any) -> dict[str, Any]:
    sentences = right = 0
    failed = []
    given = answers(llm, list(QUESTIONS), **changes)
    for (question, expected), texts in zip(QUESTIONS.items(), given, strict=True):
        for text, ended in texts:
            good = made_of_sentences(question, text, ended)
            sentences += good
            right += text == expected
            failed += [] if good else [f"{question} {text}"]
    return {"made_of_sentences": sentences, "right": right, "not_made_of_sentences": failed}
