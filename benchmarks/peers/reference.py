"""Compares engines' tokens with those of transformers, one request at a time.

python reference.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from worker import die_with_parent

Job = dict[str, Any]


def main(job_path: str, result_path: str) -> None:
    die_with_parent()
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    Path(result_path).write_text(json.dumps(check_tokens(job)), encoding="utf-8")


def load_transformers(job: Job) -> Any:
    torch.set_num_threads(job["num_threads"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"])
    ).eval()
    # Without an EOS nothing ends early and no logit is masked to prevent it.
    model.generation_config.eos_token_id = None
    return model


def generate(model: Any, request: Job, pad_id: int) -> tuple[list[int], Any]:
    """Greedy tokens of one request, and the logits that each was chosen from."""
    ids = torch.tensor([request["prompt_token_ids"]])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request["num_output_tokens"],
            min_new_tokens=request["num_output_tokens"],
            pad_token_id=pad_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return output.sequences[0, ids.shape[1] :].tolist(), output.logits


def check_tokens(job: Job) -> Job:
    """Compare engines' tokens with single-request greedy decoding in ``job["dtype"]``.

    A difference is judged by its margin: how much the reference preferred its own token, in
    logits (whose standard deviation is about 1). Random weights make near-ties, which
    rounding may decide either way; what follows a first difference is not comparable.
    """
    model = load_transformers(job)
    reports: dict[str, list[Job]] = {name: [] for name in job["candidates"]}
    for index, request in enumerate(job["requests"]):
        expected, logits = generate(model, request, job["pad_id"])
        for name, tokens in job["candidates"].items():
            reports[name].append(first_divergence(expected, tokens[index], logits))
    return {"candidates": reports}


def first_divergence(expected: list[int], tokens: list[int], logits: Any) -> Job:
    """First difference of ``tokens`` from ``expected``, with its margin; None if equal.

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
