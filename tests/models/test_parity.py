"""Logits against ``transformers``, through uneven prefill chunks mixed with decodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from tests.models.checkpoints import (
    CONTEXT,
    LONG_ROPE,
    NATIVE,
    VARIANTS,
    VOCAB,
    llama,
    phi3,
    save,
    transformers_logits,
)
from tests.models.schedule import (
    LENGTHS,
    mean_square,
    random_prompts,
    run_schedule,
    view_for,
    worst_difference,
)
from vmserve.attention import BACKENDS, check_backend, create_backend
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.errors import UnsupportedError
from vmserve.models import gated_delta, load_model

#: Those of the native decoder that torch has kernels for, beside the ones that it runs as well.
_ALSO_NATIVE = [name for name in NATIVE if name.startswith(("deepseek", "qwen3-next", "qwen3.5"))]


@pytest.mark.parametrize("variant", [*VARIANTS, *_ALSO_NATIVE])
def test_float32(variant: str, checkpoint: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(checkpoint(variant), prompts, torch.float32)
    actual = run_schedule(load_model(checkpoint(variant), torch.float32), prompts)
    assert worst_difference(actual, expected) < 1e-5


@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3.5"])
def test_states_after_several_chunks(
    variant: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK_TOKENS", 4)
    test_float32(variant, checkpoint)


@pytest.mark.parametrize("needs", [{"value_dim": 8}, {"has_sinks": True}])
def test_what_kernels_cannot_do_is_refused(needs: dict[str, Any]) -> None:
    layers = [LayerAttention(0, 0.5, **needs)]
    with pytest.raises(UnsupportedError, match=r"which the flashinfer backend cannot do: use .*au"):
        check_backend(BACKENDS["flashinfer"](), layers)
    assert create_backend("auto", layers=layers, device="cuda").name == "sdpa"


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
    # A rounded choice of experts moves more; with sinks the reference rounds scores too.
    bound = 2**-4 if variant in ("mixtral", "gpt-oss") else 2**-5
    assert worst_difference(actual, expected) < bound
    assert mean_square(actual, exact) < 1.25 * mean_square(expected, exact)
    num_clear = 0
    for ours, theirs in zip(actual, expected, strict=True):
        best, second = theirs.topk(2).values.unbind(-1)
        clear = best - second > bound * theirs.abs().max()
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
        num_clear += int(clear.sum())
    assert num_clear > sum(LENGTHS) / 2


@pytest.mark.parametrize("variant", ["llama-gqa-llama3", "qwen3-windows", "opt-350m", "gpt2"])
def test_only_the_rows_asked_for(variant: str, checkpoint: Callable[[str], Path]) -> None:
    model = load_model(checkpoint(variant), torch.float32)
    batch = RaggedBatch.build([2, 0], [0, 0], [9, 6])
    tokens = torch.tensor(random_prompts([15])[0])
    results = []
    for rows in (None, torch.tensor([14, 8, 8]), torch.tensor([], dtype=torch.int64)):
        call = create_backend("sdpa").bind(view_for(model, 9), batch)
        results.append(model.network.forward(tokens, torch.from_numpy(batch.positions), call, rows))
    assert results[2].shape == (0, VOCAB)
    torch.testing.assert_close(results[1], results[0][[14, 8, 8]], rtol=1e-5, atol=1e-5)


def longrope_logits(directory: Path, prompt: list[int], max_model_len: int) -> torch.Tensor:
    model = load_model(directory, torch.float32, max_model_len=max_model_len)
    batch = RaggedBatch.build([0], [0], [len(prompt)])
    call = create_backend("sdpa").bind(view_for(model, len(prompt)), batch)
    return model.network.forward(torch.tensor(prompt), torch.from_numpy(batch.positions), call)


#: Of a half of each head, by the names of checkpoints on the hub.
PHI3_ROPE = {"type": "longrope", "short_factor": LONG_ROPE["short_factor"][:3],
             "long_factor": LONG_ROPE["long_factor"][:3]}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        llama(rope_parameters=LONG_ROPE),
        phi3(
            rope_scaling=PHI3_ROPE, original_max_position_embeddings=24, partial_rotary_factor=0.5
        ),
    ],
    ids=["llama", "phi3"],
)
@pytest.mark.parametrize(("length", "max_model_len"), [(20, 24), (60, CONTEXT)])
def test_longrope_takes_the_factors_of_the_longest_sequence(
    tmp_path: Path, config: PreTrainedConfig, length: int, max_model_len: int
) -> None:
    """``transformers`` switches at 24 tokens; here ``max_model_len`` decides for all."""
    directory = save(config, tmp_path)
    [prompt] = random_prompts([length])
    [expected] = transformers_logits(directory, [prompt], torch.float32)
    actual = longrope_logits(directory, prompt, max_model_len)
    assert worst_difference([actual], [expected]) < 1e-5
    other = longrope_logits(directory, prompt, 24 if max_model_len == CONTEXT else CONTEXT)
    assert worst_difference([other], [expected]) > 1e-2
