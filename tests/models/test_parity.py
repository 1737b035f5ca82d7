"""Logits against ``transformers``, through uneven prefill chunks mixed with decodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.attention.views import dense_view
from tests.models.checkpoints import (
    CONTEXT,
    LONG_ROPE,
    VARIANTS,
    VOCAB,
    llama,
    save,
    transformers_logits,
)
from vmserve.attention import create_backend
from vmserve.attention.base import ContiguousView, RaggedBatch
from vmserve.models import LoadedModel, load_model

#: Per step, the tokens of each sequence that are computed: prompts in uneven chunks, decodes
#: beside them, sequences that start late or pause.
SCHEDULE = [
    (11, 1, 0, 0),
    (7, 1, 5, 0),
    (1, 13, 5, 0),
    (1, 1, 0, 1),
    (1, 1, 1, 1),
    (0, 9, 1, 1),
    (23, 1, 1, 1),
]
#: The batch must not rely on slots being in order.
SLOTS = (2, 0, 4, 1)
LENGTHS = [sum(step[i] for step in SCHEDULE) for i in range(len(SLOTS))]


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def view_for(model: LoadedModel, max_len: int) -> ContiguousView:
    config = model.config
    return dense_view(
        config.num_layers, max(SLOTS) + 1, max_len, config.kv_heads, config.head_dim, model.dtype
    )


def run_schedule(model: LoadedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt ``[tokens, vocab]``, gathered over the steps of ``SCHEDULE``."""
    view = view_for(model, max(LENGTHS))
    backend = create_backend("sdpa")
    done = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in SCHEDULE:
        active = [i for i, count in enumerate(step) if count]
        batch = RaggedBatch.build(
            [SLOTS[i] for i in active], [done[i] for i in active], [step[i] for i in active]
        )
        tokens = [t for i in active for t in prompts[i][done[i] : done[i] + step[i]]]
        logits = model.forward(
            torch.tensor(tokens), batch.token_positions, backend.bind(view, batch)
        )
        assert logits.shape == (batch.num_tokens, VOCAB)
        assert logits.dtype == torch.float32
        for i, part in zip(active, torch.split(logits, [step[i] for i in active]), strict=True):
            rows[i].append(part)
            done[i] += step[i]
    assert done == LENGTHS
    return [torch.cat(parts) for parts in rows]


def worst_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest absolute difference, as a share of the largest logit."""
    scale = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / scale


def mean_square(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return (torch.cat(ours) - torch.cat(theirs)).square().mean().item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(variant: str, checkpoint: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(checkpoint(variant), prompts, torch.float32)
    actual = run_schedule(load_model(checkpoint(variant), torch.float32), prompts)
    assert worst_difference(actual, expected) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16(variant: str, checkpoint: Callable[[str], Path]) -> None:
    """Both round to 8 bits at the same places, in sums of a different order.

    So both are equally far from float32 (on the same rounded weights), nearer to each other
    than a few roundings, and where the choice of a token is clearer than that, it is the same.
    """
    prompts = random_prompts(LENGTHS)
    directory = checkpoint(variant)
    exact = transformers_logits(directory, prompts, torch.bfloat16, compute_float32=True)
    expected = transformers_logits(directory, prompts, torch.bfloat16)
    actual = run_schedule(load_model(directory, torch.bfloat16), prompts)
    bound = 2**-5
    assert worst_difference(actual, expected) < bound
    assert mean_square(actual, exact) < 1.25 * mean_square(expected, exact)
    num_clear = 0
    for ours, theirs in zip(actual, expected, strict=True):
        best, second = theirs.topk(2).values.unbind(-1)
        clear = best - second > bound * theirs.abs().max()
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
        num_clear += int(clear.sum())
    assert num_clear > sum(LENGTHS) / 2


@pytest.mark.parametrize("variant", ["llama-gqa-llama3", "qwen3-windows"])
def test_only_the_rows_asked_for(variant: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint(variant), torch.float32)
    batch = RaggedBatch.build([2, 0], [0, 0], [9, 6])
    tokens = torch.tensor(random_prompts([15])[0])
    results = []
    for rows in (None, torch.tensor([14, 8, 8]), torch.tensor([], dtype=torch.int64)):
        call = create_backend("sdpa").bind(view_for(model, 9), batch)
        results.append(model.forward(tokens, batch.token_positions, call, rows))
    assert results[2].shape == (0, VOCAB)
    torch.testing.assert_close(results[1], results[0][[14, 8, 8]], rtol=1e-5, atol=1e-5)


def longrope_logits(directory: Path, prompt: list[int], max_model_len: int) -> torch.Tensor:
    model = load_model(directory, torch.float32, max_model_len=max_model_len)
    batch = RaggedBatch.build([0], [0], [len(prompt)])
    call = create_backend("sdpa").bind(view_for(model, len(prompt)), batch)
    return model.forward(torch.tensor(prompt), batch.token_positions, call)


@pytest.mark.parametrize(("length", "max_model_len"), [(20, 24), (60, CONTEXT)])
def test_longrope_takes_the_factors_of_the_longest_sequence(
    tmp_path: Path, length: int, max_model_len: int
) -> None:
    """``transformers`` switches at 24 tokens; here ``max_model_len`` decides for all."""
    directory = save(llama(rope_parameters=LONG_ROPE), tmp_path)
    [prompt] = random_prompts([length])
    [expected] = transformers_logits(directory, [prompt], torch.float32)
    actual = longrope_logits(directory, prompt, max_model_len)
    assert worst_difference([actual], [expected]) < 1e-5
    other = longrope_logits(directory, prompt, 24 if max_model_len == CONTEXT else CONTEXT)
    assert worst_difference([other], [expected]) > 1e-2
