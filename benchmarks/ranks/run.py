"""Two ranks with half of the threads each against one process with all of them.

    python benchmarks/ranks/run.py [--model PATH] [--pairs 12]

Without ``--model``: a Llama of 125M random weights in bfloat16. Each side is a process that holds
its model; they run in turns. Under 6 minutes with the defaults on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from vmserve_bench.lab.rounds import compare

#: Concurrent streams, tokens of each prompt, and of each answer.
WORK = {
    "decode, 1 stream": (1, 16, 33),
    "decode, 16 streams": (16, 16, 17),
    "prefill, 1,024 tokens": (1, 1024, 1),
}
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 2048,
}


def _child(model: str, tokenizer: str, size: int) -> None:
    """Answer each line with the seconds that the work of this name took."""
    from vmserve import LLM, SamplingParams  # noqa: PLC0415 - the other side needs none of it

    with LLM(
        model,
        tokenizer=tokenizer,
        tensor_parallel_size=size,
        kv_cache_memory="512MiB",
        max_model_len=1280,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_regime="virtual",
    ) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            streams, prompt, answer = WORK[line.strip()]
            prompts = [[5 + i] * prompt for i in range(streams)]
            params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, params)
            print(time.perf_counter() - began, flush=True)


class _Subject:
    def __init__(self, model: str, tokenizer: str, size: int) -> None:
        command = [sys.executable, __file__, "--child", str(size), "--model", model]
        self._popen = subprocess.Popen(
            [*command, "--tokenizer", tokenizer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def _read(self) -> str:
        out: IO[str] | None = self._popen.stdout
        assert out is not None
        line = out.readline()
        if not line:
            raise SystemExit("a subject ended")
        return line

    def run(self, work: str) -> None:
        assert self._popen.stdin is not None
        print(work, file=self._popen.stdin, flush=True)
        self._read()

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.wait()


def _random_llama(directory: Path) -> str:
    import torch  # noqa: PLC0415 - slow, and not needed with --model
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    model.save_pretrained(directory)
    return str(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.model, options.tokenizer, options.child)
        return
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as room:
        model = options.model or _random_llama(Path(room))
        tokenizer = options.tokenizer or options.model or "vmserve-embedded"
        sides = {"one process": 1, "two ranks": 2}
        subjects = [_Subject(model, tokenizer, size) for size in sides.values()]
        try:
            print(f"{cores} cores; load {os.getloadavg()[0]:.1f}")
            for work in options.work:
                streams, prompt, answer = WORK[work]
                one, two = (lambda s=s, w=work: s.run(w) for s in subjects)
                found = compare(one, two, pairs=options.pairs, warmup=2, labels=tuple(sides))
                tokens = streams * (answer if answer > 1 else prompt)
                rates = (tokens / each for each in (found.median_a_s, found.median_b_s))
                told = ", ".join(f"{rate:,.0f} tokens/s" for rate in rates)
                print(f"{work}: {told}\n    {found}", flush=True)
        finally:
            for subject in subjects:
                subject.close()


if __name__ == "__main__":
    main()
