"""Beam search in ``transformers``, a table that stands for a model there, and our own driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from vmserve.decoding import BeamSearch, BeamStep, Hypothesis
from vmserve.sampling import Sampler

#: Token sequences (prompt and answer) -> the next token's logits, [sequences, vocab].
Logits = Callable[[Sequence[Sequence[int]]], Tensor]


@dataclass(frozen=True)
class Case:
    """What is searched for; the fields are those of ``BeamSearch``."""

    width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: Any = False
    eos_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    def new_search(self) -> BeamSearch:
        return BeamSearch(
            self.width,
            self.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            eos_token_ids=self.eos_token_ids,
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True)
class Answer:
    """One of the sequences that ``generate`` returned."""

    token_ids: list[int]
    score: float


class TableModel(PreTrainedModel, GenerationMixin):
    """The next token depends on the last two and the place; some are likely everywhere.

    (On the place, so that two ways through the same tokens do not score the same.)
    """

    config_class = PreTrainedConfig

    def __init__(self, vocab_size: int, seed: int, likely: Iterable[int]) -> None:
        super().__init__(PreTrainedConfig(vocab_size=vocab_size))
        random = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(3, 64, vocab_size, generator=random))
        with torch.no_grad():
            self.table[0, :, list(likely)] += 2.5

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        last, before, place = self.table
        row = last[input_ids[:, -1]] + before[input_ids[:, -2]] + place[input_ids.shape[1]]
        return CausalLMOutput(logits=row[:, None])

    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        with torch.inference_mode():
            return self(torch.tensor(sequences)).logits[:, -1]


def transformers_beams(model: Any, prompt: list[int], case: Case, **kwargs: object) -> list[Answer]:
    """All ``case.width`` sequences of ``generate``, as it orders them."""
    vocab_size = model.config.vocab_size
    config = GenerationConfig(
        num_beams=case.width,
        num_return_sequences=case.width,
        do_sample=False,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos_token_id=list(case.eos_token_ids) or None,
        pad_token_id=vocab_size - 1,
        max_new_tokens=case.max_tokens,
        min_new_tokens=case.min_tokens or None,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **kwargs,
    )
    tokens = torch.tensor([prompt])
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    if case.width == 1:
        return [_greedy_answer(out, len(prompt), case)]
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    sequences = out.sequences[:, len(prompt) :].tolist()
    scores = out.sequences_scores.tolist()
    return [Answer(s[:n], score) for s, n, score in zip(sequences, lengths, scores, strict=True)]


def _greedy_answer(out: Any, num_prompt: int, case: Case) -> Answer:
    token_ids = out.sequences[0, num_prompt:].tolist()
    steps = torch.stack([row[0] for row in out.logits]).log_softmax(-1)
    total = float(steps.gather(1, torch.tensor(token_ids)[:, None]).sum())
    return Answer(token_ids, total / len(token_ids) ** case.length_penalty)


def our_beams(logits: Logits, prompt: list[int], case: Case) -> list[Hypothesis]:
    """A plain loop that drives ``BeamSearch``, and checks what it says of itself on the way."""
    search = case.new_search()
    beams: list[list[int]] = [[]]
    totals = [0.0]
    while not search.done:
        rows = logits([prompt + beam for beam in beams])
        ids, logprobs = Sampler(rows.shape[1]).beam_candidates(rows, search.num_candidates)
        step = search.advance(ids, logprobs)
        check_step(step, beams, totals, search)
        beams = [[*beams[beam.parent], beam.token_id] for beam in step.running]
        totals = [beam.total for beam in step.running]
        assert [search.token_ids(i) for i in range(search.num_beams)] == beams
    return search.best()


def check_step(
    step: BeamStep, beams: list[list[int]], totals: list[float], search: BeamSearch
) -> None:
    assert step.done == search.done == (not step.running)
    assert search.num_beams == len(step.running) <= search.width
    for part in (step.running, step.finished):
        assert sorted((c.total for c in part), reverse=True) == [c.total for c in part]
        assert len({(*beams[c.parent], c.token_id) for c in part}) == len(part)
        for c in part:
            assert c.total == totals[c.parent] + c.logprob


def check_hypotheses(hypotheses: list[Hypothesis], case: Case) -> None:
    """What holds of every result."""
    scores = [h.score for h in hypotheses]
    assert sorted(scores, reverse=True) == scores
    assert len({tuple(h.token_ids) for h in hypotheses}) == len(hypotheses) <= case.width
    eos = set(case.eos_token_ids)
    for h in hypotheses:
        length = len(h.token_ids)
        assert length == len(h.logprobs) <= case.max_tokens
        assert h.cumulative_logprob == np.cumsum([0.0, *h.logprobs])[-1]
        assert h.score == h.cumulative_logprob / length**case.length_penalty
        assert not eos.intersection(h.token_ids[:-1])
        if h.eos_token_id is None:
            assert length == case.max_tokens
            assert h.token_ids[-1] not in eos
        else:
            assert h.eos_token_id == h.token_ids[-1]
            assert h.eos_token_id in eos
            assert length > case.min_tokens


def assert_same(ours: list[Hypothesis], theirs: list[Answer]) -> None:
    assert [h.token_ids for h in ours] == [a.token_ids for a in theirs]
    # rtol for penalties below 0, whose scores go into the hundreds; theirs are float32.
    expected = [answer.score for answer in theirs]
    np.testing.assert_allclose([h.score for h in ours], expected, atol=1e-4, rtol=1e-6)
