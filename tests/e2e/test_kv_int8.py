"""A KV cache of 8 bits: the tokens of ``transformers`` over keys and values rounded likewise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engines import each_step, greedy, tokens_of
from vmserve import LLM, SamplingParams
from vmserve.attention.sdpa import SdpaBackend
from vmserve.errors import ConfigurationError, UnsupportedError

import torch  # isort: skip
from transformers import AutoModelForCausalLM, DynamicCache  # isort: skip

Prompts = Callable[[int, int, int], list[list[int]]]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows as they are read after they were stored in 8 bits."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


class RoundingCache(DynamicCache):
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


@torch.inference_mode()
def expected(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    cache, tokens, produced = RoundingCache(), torch.tensor([prompt]), []
    while len(produced) < num_tokens:
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        produced.append(int(out.logits[0, -1].argmax()))
        tokens = torch.tensor([[produced[-1]]])
    return produced


@pytest.mark.parametrize("linear_backend", ["native", "torch"])
def test_tokens_of_the_same_rounding(
    linear_backend: str, model_dir: Path, prompts: Prompts
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    batch = prompts(6, 400, 31)
    with LLM(
        dtype="float32",
        kv_cache_dtype="int8",
        kv_cache_memory="64MiB",
        max_num_batched_tokens=100,
        linear_backend=linear_backend,
    ) as llm:
        found = tokens_of(llm.generate(batch, greedy(24)))
        layout = llm.engine.memory.layout
    assert (layout.dtype, layout.shape.token_bytes) == ("int8", 2 * 2 * (64 + 4))
    assert found == [[expected(model, prompt, 24)] for prompt in batch]


def most_running(dtype: str, batch: list[list[int]], params: SamplingParams) -> int:
    options = {"kv_cache_memory": "16MiB", "enable_prefix_caching": False, "max_model_len": 512}
    running: list[int] = []
    with LLM(dtype="bfloat16", kv_cache_dtype=dtype, **options) as llm:
        each_step(llm, after=lambda engine, _: running.append(engine.scheduler.num_running))
        llm.generate(batch, params)
    return max(running)


def test_a_pool_has_room_for_more(prompts: Prompts) -> None:
    """Requests at once in 16 MiB, of 508 tokens each."""
    batch = [(prompt * 50)[:448] for prompt in prompts(40, 448, 3)]
    ours, theirs = (most_running(dtype, batch, greedy(60)) for dtype in ("int8", "auto"))
    assert ours >= 1.8 * theirs


def test_kernels_that_read_no_codes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="the sdpa backend reads no KV cache of int8"):
        LLM(kv_cache_dtype="int8", attention_backend="sdpa")
    assert not SdpaBackend().kv_dtypes
    for backend, why in (
        ("auto", "no kernels read a KV cache of fp8 on the device cpu .* use auto or int8"),
        ("cpu", "the cpu backend reads no KV cache of fp8"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            LLM(kv_cache_dtype="fp8", attention_backend=backend)
    with pytest.raises(ConfigurationError, match="kv_cache_dtype: 'int4' is not one of"):
        LLM(kv_cache_dtype="int4")
