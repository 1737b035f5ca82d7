"""One engine, one run, one process: reads a job, writes a result.

    python worker.py JOB.json RESULT.json

A process of its own gives every engine a fresh allocator and a peak memory that is its own.
Nothing of an engine is imported before the job names it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Job = dict[str, Any]
Tokens = list[list[int]]

PR_SET_PDEATHSIG = 1
WARMUP_REQUESTS = 2
WARMUP_TOKENS = 4


def main(job_path: str, result_path: str) -> None:
    die_with_parent()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    engines = {
        "transformers": run_transformers,
        "vmserve": run_vmserve,
        "reference": check_tokens,
    }
    result = engines[job["engine"]](job)
    result["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path(result_path).write_text(json.dumps(result), encoding="utf-8")


def die_with_parent() -> None:
    """Let the kernel end this process if the one that measures it ends without warning."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def timed(job: Job, load_s: float, generate: Callable[[list[Job]], Tokens]) -> Job:
    """Warm up on a short job, then time the whole one. Instants are CLOCK_MONOTONIC."""
    requests: list[Job] = job["requests"]
    short = [
        {**request, "num_output_tokens": min(WARMUP_TOKENS, request["num_output_tokens"])}
        for request in requests[:WARMUP_REQUESTS]
    ]
    generate(short)
    start, start_cpu_s = time.monotonic(), time.process_time()
    token_ids = generate(requests)
    end, end_cpu_s = time.monotonic(), time.process_time()
    end_pss_bytes = pss_bytes()
    for request, tokens in zip(requests, token_ids, strict=True):
        if len(tokens) != request["num_output_tokens"]:
            raise RuntimeError(
                f"an engine returned {len(tokens)} tokens, "
                f"{request['num_output_tokens']} were requested"
            )
    num_tokens = sum(len(tokens) for tokens in token_ids)
    return {
        "load_s": load_s,
        "start_monotonic": start,
        "end_monotonic": end,
        "elapsed_s": end - start,
        "cpu_s": end_cpu_s - start_cpu_s,
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / (end - start),
        "end_pss_bytes": end_pss_bytes,
        "token_ids": token_ids,
    }


def pss_bytes() -> int:
    """This process's proportional set size."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:") * 1024


# -- transformers ---------------------------------------------------------------------


def load_transformers(job: Job) -> Any:
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(job["num_threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"])
    ).eval()
    # Without an EOS nothing ends early and no logit is masked to prevent it.
    model.generation_config.eos_token_id = None
    return model


def left_padded(prompts: list[list[int]], pad_id: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ids and attention mask, ``[batch, longest]`` each, padding on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return ids, mask


def generate_batch(model: Any, batch: list[Job], pad_id: int, **options: Any) -> Any:
    """``model.generate`` to the longest output of the batch, greedily."""
    torch = importlib.import_module("torch")
    ids, mask = left_padded([request["prompt_token_ids"] for request in batch], pad_id)
    longest = max(request["num_output_tokens"] for request in batch)
    with torch.inference_mode():
        return model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=pad_id,
            **options,
        )


def run_transformers(job: Job) -> Job:
    """Static batches in arrival order; only the tokens that were requested count."""
    started = time.monotonic()
    model = load_transformers(job)
    load_s = time.monotonic() - started
    size = job["batch_size"]

    def generate(requests: list[Job]) -> Tokens:
        tokens: Tokens = []
        for first in range(0, len(requests), size):
            batch = requests[first : first + size]
            output = generate_batch(model, batch, job["pad_id"])
            prompt_length = max(len(request["prompt_token_ids"]) for request in batch)
            tokens += [
                row[prompt_length : prompt_length + request["num_output_tokens"]].tolist()
                for row, request in zip(output, batch, strict=True)
            ]
        return tokens

    return timed(job, load_s, generate)


# -- vmserve --------------------------------------------------------------------------


def run_vmserve(job: Job) -> Job:
    """All requests at once; the engine batches them as it sees fit."""
    started = time.monotonic()
    torch = importlib.import_module("torch")
    torch.set_num_threads(job["num_threads"])
    vmserve = importlib.import_module("vmserve")
    llm = vmserve.LLM(model=job["model"], dtype=job["dtype"], **job["engine_options"])
    load_s = time.monotonic() - started

    def generate(requests: list[Job]) -> Tokens:
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            vmserve.SamplingParams(
                temperature=0,
                max_tokens=request["num_output_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        results = llm.generate(prompts, params)
        return [list(result.outputs[0].token_ids) for result in results]

    with llm:
        result = timed(job, load_s, generate)
        result["stats"] = dict(llm.stats())
    return result


# -- token check ----------------------------------------------------------------------


def check_tokens(job: Job) -> Job:
    """Compare engines' tokens with single-request greedy decoding in ``job["dtype"]``.

    A difference is judged by its margin: how much the reference preferred its own token, in
    logits (whose standard deviation is about 1). Random weights make near-ties, which
    rounding may decide either way; what follows a first difference is not comparable.
    """
    model = load_transformers(job)
    reports: dict[str, list[Job]] = {name: [] for name in job["candidates"]}
    for index, request in enumerate(job["requests"]):
        output = generate_batch(
            model, [request], job["pad_id"], output_logits=True, return_dict_in_generate=True
        )
        expected = output.sequences[0, len(request["prompt_token_ids"]) :].tolist()
        for name, tokens in job["candidates"].items():
            reports[name].append(first_divergence(expected, tokens[index], output.logits))
    return {"candidates": reports}


def first_divergence(expected: list[int], tokens: list[int], logits: Any) -> Job:
    """Where ``tokens`` first differ from ``expected``, and by what margin; None if nowhere.

    ``logits[position][0]`` holds the reference's logits at that position.
    """
    for position, (wanted, got) in enumerate(zip(expected, tokens, strict=True)):
        if wanted != got:
            row = logits[position][0]
            margin = float(row[wanted]) - float(row[got])
            return {"num_tokens": len(expected), "position": position, "margin": margin}
    return {"num_tokens": len(expected), "position": None, "margin": None}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
