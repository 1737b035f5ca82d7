"""Two ranks with half of the threads each against one process with all of them.

    python benchmarks/ranks/run.py [--model PATH] [--pairs 12]

Without ``--model``: a Llama of 125M random weights in bfloat16. Each side is a process that holds
its model; they run in turns. Under 6 minutes with the defaults on two cores.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from functools import partial

from vmserve import SamplingParams
from vmserve.client.client import Client
from vmserve.client.engines.local import start_engine
from vmserve_bench.lab import script
from vmserve_bench.lab.rounds import compare

#: Concurrent streams, tokens of each prompt, and of each answer.
WORK = {
    "decode, 1 stream": (1, 16, 33),
    "decode, 16 streams": (16, 16, 17),
    "prefill, 1,024 tokens": (1, 1024, 1),
}
SHAPE = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 2048,
}  # fmt: skip
SIDES = {"one process": 1, "two ranks": 2}
OPTIONS = {
    "kv_cache_memory": "512MiB", "max_model_len": 1280, "max_num_batched_tokens": 512,
    "enable_prefix_caching": False, "kv_regime": "virtual",
}  # fmt: skip


def save_random_llama(directory: str) -> str:
    import torch  # noqa: PLC0415 - slow, and not needed with --model
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16).save_pretrained(directory)
    return directory


def main() -> None:
    parser = script.parser(__doc__, model=None, tokenizer=None, pairs=12, work=tuple(WORK))
    args = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as room, asyncio.Runner() as runner:
        model = args.model or save_random_llama(room)
        tokenizer = args.tokenizer or args.model or "vmserve-embedded"
        sides = [
            Client(start_engine(model, tokenizer=tokenizer, tensor_parallel_size=size, **OPTIONS))
            for size in SIDES.values()
        ]

        def answer(llm: Client, work: str) -> None:
            streams, num_prompt, num_tokens = WORK[work]
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            prompts = [[5 + number] * num_prompt for number in range(streams)]
            runner.run(script.answers(llm, prompts, params))

        try:
            for work in args.work:
                calls = [partial(answer, llm, work) for llm in sides]
                found = compare(*calls, pairs=args.pairs, warmup=2, labels=tuple(SIDES))
                streams, num_prompt, num_tokens = WORK[work]
                tokens = streams * (num_tokens if num_tokens > 1 else num_prompt)
                rates = (tokens / each for each in (found.median_a_s, found.median_b_s))
                told = ", ".join(f"{rate:,.0f} tokens/s" for rate in rates)
                ratio = script.interval(found.ratio, found.ratio_low, found.ratio_high)
                print(f"{work}: {told}\n    time {ratio}: {found.verdict}", flush=True)
        finally:
            for llm in sides:
                runner.run(llm.shutdown())


if __name__ == "__main__":
    main()
