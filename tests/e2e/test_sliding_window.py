"""Pages behind a sliding window are given up while the sequence runs, and nobody misses them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.models.checkpoints import VARIANTS, save
from vmserve import LLM, SamplingParams


def test_a_windowed_model_holds_only_its_window(tmp_path: Path, model_dir: Path) -> None:
    directory = save(VARIANTS["mistral-window"], tmp_path / "windowed")
    prompt = [2 + (7 * i) % 90 for i in range(100)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(60):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))

    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    with LLM(
        model=str(directory),
        tokenizer=str(model_dir),
        dtype="float32",
        kv_page_size="8KiB",  # 32 tokens of one layer
        kv_cache_memory="1MiB",
        max_num_batched_tokens=64,
    ) as llm:
        most_pages = 0
        step = llm.engine.step

        def watched_step() -> object:
            nonlocal most_pages
            result = step()
            most_pages = max(most_pages, int(llm.stats()["used_pages"]))
            llm.engine.memory.check()
            return result

        llm.engine.step = watched_step  # type: ignore[method-assign, assignment]
        [result] = llm.generate([prompt], params)
        page_tokens = int(llm.stats()["page_tokens"])
    assert result.outputs[0].token_ids == tokens[100:]
    # A chunk of 64 and a window of 7 touch this many pages; all 160 tokens would take twice that.
    assert most_pages <= -(-(64 + 7) // page_tokens) + 1
    assert most_pages < -(-160 // page_tokens)
