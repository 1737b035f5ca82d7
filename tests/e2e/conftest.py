"""The embedded model twice: in ``transformers`` (the reference) and in the engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sim.conftest import sim, sim_library
from vmserve import LLM  # first: it sets how torch's threads wait, before torch is loaded

import torch  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

from vmserve.models import resolve_model

__all__ = ["sim", "sim_library"]

Reference = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    """``reference(prompt_ids, n)``: the n greedy tokens of ``transformers`` in fp32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        past = None
        tokens = torch.tensor([prompt])
        produced: list[int] = []
        while len(produced) < num_tokens:
            out = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            produced.append(int(out.logits[0, -1].argmax()))
            tokens = torch.tensor([[produced[-1]]])
        return produced

    return generate


@pytest.fixture(scope="session")
def prompts(model_dir: Path) -> Callable[[int, int, int], list[list[int]]]:
    """``prompts(count, longest, seed)``: token ids cut from the model's own kind of text."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def make(count: int, longest: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        text = SAMPLE * (longest // 40)
        stream = tokenizer(text, add_special_tokens=False)["input_ids"]
        result = []
        for i in range(count):
            # Log-uniform lengths, the first one the longest.
            length = longest if i == 0 else round(longest ** rng.random()) + 1
            start = rng.randrange(len(stream) - length)
            result.append([tokenizer.bos_token_id, *stream[start : start + length - 1]])
        return result

    return make


#: Written for the tests; the model has not seen it.
SAMPLE = (
    "Once upon a time there was a little fox named Mia. Mia lived near the river with her "
    "friend Tom. One day they found a red box under the old tree. In the box there were seven "
    'coins and a small blue key. Tom said, "We must ask the owl." The owl was wise and kind. '
    "She told them that the key opened the door of the mill. They ran to the mill and opened "
    "the door. Inside they saw a warm fire, a loaf of bread and a letter for Mia. "
    "1. bread\n2. milk\n3. apples\n4. honey\nQuestion: What did they find under the tree? "
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", kv_cache_memory="128MiB", max_num_batched_tokens=256) as llm:
        yield llm
