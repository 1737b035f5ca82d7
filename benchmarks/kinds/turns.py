"""Count what a conversation of several turns computes again, by kinds of layers.

    PYTHONPATH=. python benchmarks/kinds/turns.py [--turns N] [--models NAME ...]

Each turn sends all that was said and adds some. The checkpoints are small and random, so these are
counts and no times.
"""

from __future__ import annotations

import json
import random
import tempfile
from importlib.resources import files
from pathlib import Path

from tests.models import checkpoints
from vmserve import LLM, SamplingParams
from vmserve_bench.lab import script

_CONTEXT = {"max_position_embeddings": 16_384}
_MODELS = {
    "qwen3.5": checkpoints.qwen3_next("qwen3_5_text", **_CONTEXT),
    "gemma3": checkpoints.gemma3(num_hidden_layers=4, sliding_window=24, **_CONTEXT),
    "gpt-oss": checkpoints.gpt_oss(num_hidden_layers=4, sliding_window=20, **_CONTEXT),
    "llama": checkpoints.llama(**_CONTEXT),
}
_TOKENIZER = str(files("vmserve") / "assets" / "embedded")


def converse(llm: LLM, rng: random.Random, turns: int, num_tokens: int) -> dict[str, int]:
    """Prompt tokens of all turns, and those that were computed."""
    greedy = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    prompt = [rng.randrange(3, 100) for _ in range(num_tokens)]
    asked = cached = 0
    for _ in range(turns):
        [result] = llm.generate({"prompt_token_ids": prompt}, greedy)
        asked += len(prompt)
        cached += result.metrics.num_cached_tokens
        said = [rng.randrange(3, 100) for _ in range(rng.randrange(50, 300))]
        prompt = [*prompt, *result.outputs[0].token_ids, *said]
    return {"prompt_tokens": asked, "computed_tokens": asked - cached}


def main() -> None:
    args = script.parser(__doc__, turns=12, prompt_tokens=3000, models=tuple(_MODELS)).parse_args()
    rng = random.Random(0)
    size = {"kv_cache_memory": "64MiB", "max_model_len": 8192}
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            checkpoints.save(_MODELS[name], Path(directory))
            with LLM(directory, tokenizer=_TOKENIZER, **size) as llm:
                counts = converse(llm, rng, args.turns, args.prompt_tokens)
        print(json.dumps({"model": name, **counts}), flush=True)


if __name__ == "__main__":
    main()
