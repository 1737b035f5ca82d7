"""Drafters that know answers, with errors, say anything, or search; and engines that have one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from vmserve.config import EngineConfig
from vmserve.engine import engine as engine_module
from vmserve.engine.build import EngineParts, build
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.prompt_lookup import PromptLookup


class Drafting:
    """A drafter that drafts while ``is_on``."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        #: What the oracle knows, by prompt, seed and choice.
        self.answers: dict[tuple[tuple[int, ...], int, int], tuple[int, ...]] = {}
        self.is_on = False
        self.is_hostile = False
        self.accuracy = 0.8
        #: Drafts in place of the others.
        self.searching: PromptLookup | None = None
        self.num_known = 0
        self.rejected: list[int] = []
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size

    def tell(self, prompt: Many[int], seed: int, choice: int, answer: Many[int]) -> None:
        self.answers[tuple(prompt), seed, choice] = tuple(answer)

    def wanted(self, num_decoding: int) -> bool:
        return self.is_on

    def propose(self, sequences: Many[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        if not self.is_on:
            return None
        if self.searching is not None:
            return self.searching.propose(sequences, num_prompt_rows)
        return [self._draft(seq) for seq in sequences]

    def learn(self, seconds: float, attention: float) -> None:
        assert 0 <= attention <= seconds
        if self.is_on and self.searching is not None:
            self.searching.learn(seconds, attention)

    def _draft(self, sequence: Sequence) -> list[int]:
        if sequence.request.beams is not None:
            return []
        most = sequence.request.max_tokens - sequence.num_output - 1
        limit = min(self._rng.choice([0, 1, 3, 7]), most)
        if self.is_hostile:
            return [self._rng.randrange(-1, self._vocab_size + 9) for _ in range(limit)]
        answer = self.answers[key_of(sequence)]
        assert list(answer[: sequence.num_output]) == sequence.output_token_ids
        draft = list(answer[sequence.num_output :][:limit])
        for place in range(len(draft)):
            if self._rng.random() > self.accuracy:
                draft[place] = self._rng.randrange(self._vocab_size)
        self.num_known += len(draft)
        return draft

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.rejected.append(num_drafted - num_accepted)
        if self.searching is not None:
            self.searching.accepted(sequence, num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        if self.searching is not None:
            self.searching.forget(sequence)

    def start_over(self) -> None:
        if self.searching is not None:
            self.searching.start_over()


def key_of(sequence: Sequence) -> tuple[tuple[int, ...], int, int]:
    return tuple(sequence.request.prompt_token_ids), sequence.request.seed, sequence.index


@contextmanager
def drafting_engines(seed: int) -> Iterator[list[Drafting]]:
    """Engines made meanwhile speculate; the list has the drafting of each."""
    made: list[Drafting] = []

    def with_drafts(config: EngineConfig, *others: Any) -> EngineParts:
        parts = build(config, *others)
        made.append(Drafting(parts.model_config.vocab_size, seed))
        return replace(parts, drafter=made[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "build", with_drafts)
        yield made
