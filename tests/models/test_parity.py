"""Logits of torch against ``transformers``, through uneven prefill chunks mixed with decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from tests.models.checkpoints import (
    CONTEXT,
    FOREIGN,
    LONG_ROPE,
    TORCH,
    VOCAB,
    Saved,
    llama,
    on,
    phi3,
    save,
)
from tests.models.schedule import (
    LENGTHS,
    every_row,
    mean_square,
    random_prompts,
    run_schedule,
    transformers_logits,
    worst_difference,
)
from vmserve.attention import BACKENDS, check_backend, create_backend
from vmserve.attention.base import LayerAttention
from vmserve.errors import UnsupportedError
from vmserve.models import gated_delta, load_model
from vmserve.models.decoder import Decoder

#: Softcaps need a backend that has them.
BACKEND = {"vaultgemma": "cpu"}


def run(name: str, checkpoint: Saved, dtype: torch.dtype) -> list[torch.Tensor]:
    model = load_model(checkpoint(name), dtype)
    assert isinstance(model.network, Decoder) is (name not in FOREIGN)
    return run_schedule(model, backend=BACKEND.get(name, "sdpa"))


@pytest.mark.parametrize("name", [*TORCH, *on("torch32"), *FOREIGN])
def test_float32(name: str, checkpoint: Saved) -> None:
    expected = transformers_logits(checkpoint(name))
    assert worst_difference(run(name, checkpoint, torch.float32), expected) < 1e-5


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_states_after_several_chunks(
    name: str, checkpoint: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta, "CHUNK_TOKENS", 4)
    test_float32(name, checkpoint)


@pytest.mark.parametrize("needs", [{"value_dim": 8}, {"has_sinks": True}])
def test_what_kernels_cannot_do_is_refused(needs: dict[str, Any]) -> None:
    layers = [LayerAttention(0, 0.5, **needs)]
    with pytest.raises(UnsupportedError, match=r"which the flashinfer backend cannot do: use .*au"):
        check_backend(BACKENDS["flashinfer"](), layers)
    assert create_backend("auto", layers=layers, device="cuda").name == "sdpa"


#: How far apart the two may be. A rounded choice of experts moves more; with sinks the reference
#: rounds scores too. VaultGemma has no attention but "eager" there, which rounds every score.
ROUNDED = {
    "mixtral-narrow": 2**-4, "gpt-oss-narrow": 2**-4, "vaultgemma-no-cap": 2**-3, "vaultgemma": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", [*TORCH, *(name for name in FOREIGN if name != "olmoe")])
def test_bfloat16(name: str, checkpoint: Saved) -> None:
    """Both round to 8 bits at the same places, in sums of a different order.

    So both are equally far from float32 (on the same rounded weights), nearer to each other
    than a few roundings, and where the choice of a token is clearer than that, it is the same.
    """
    exact = transformers_logits(checkpoint(name), torch.bfloat16, compute_float32=True)
    expected = transformers_logits(checkpoint(name), torch.bfloat16)
    actual = run(name, checkpoint, torch.bfloat16)
    bound = ROUNDED.get(name, 2**-5)
    assert worst_difference(actual, expected) < bound
    assert mean_square(actual, exact) < 1.25 * mean_square(expected, exact)
    num_clear = 0
    for ours, theirs in zip(actual, expected, strict=True):
        best, second = theirs.topk(2).values.unbind(-1)
        clear = best - second > bound * theirs.abs().max()
        assert torch.equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])
        num_clear += int(clear.sum())
    assert num_clear > sum(LENGTHS) / 2 or name in FOREIGN


@pytest.mark.parametrize("name", ["llama-gqa-llama3", "qwen3-windows", "opt-350m", "gpt2", "phi"])
def test_only_the_rows_asked_for(name: str, checkpoint: Saved) -> None:
    model = load_model(checkpoint(name), torch.float32)
    tokens = random_prompts([15])[0]
    every, some, none = (
        every_row(model, tokens[:9], tokens[9:], slots=[2, 0], rows=rows)
        for rows in (None, [14, 8, 8], [])
    )
    assert none.shape == (0, VOCAB)
    assert every.dtype == torch.float32
    torch.testing.assert_close(some, every[[14, 8, 8]], rtol=1e-5, atol=1e-5)


#: Of a half of each head, by the names of checkpoints on the hub.
PHI3_ROPE = {"type": "longrope", "short_factor": LONG_ROPE["short_factor"][:3],
             "long_factor": LONG_ROPE["long_factor"][:3]}  # fmt: skip
OF_A_HALF = {"original_max_position_embeddings": 24, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "config",
    [llama(rope_parameters=LONG_ROPE), phi3(rope_scaling=PHI3_ROPE, **OF_A_HALF)],
    ids=["llama", "phi3"],
)
@pytest.mark.parametrize(("length", "max_len", "other"), [(20, 24, CONTEXT), (60, CONTEXT, 24)])
def test_longrope_takes_the_factors_of_the_longest_sequence(
    tmp_path: Path, config: PreTrainedConfig, length: int, max_len: int, other: int
) -> None:
    """``transformers`` switches at 24 tokens; here ``max_model_len`` decides for all."""
    save(config, tmp_path)
    [prompt] = random_prompts([length])
    expected = transformers_logits(tmp_path, prompts=[prompt])
    found, wrong = (
        every_row(load_model(tmp_path, torch.float32, max_model_len=each), prompt)
        for each in (max_len, other)
    )
    assert worst_difference([found], expected) < 1e-5
    assert worst_difference([wrong], expected) > 1e-2
