"""Compares engines' tokens with those of transformers, one request at a time.

python reference.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from engines.transformers_engine import load
from worker import die_with_parent

Job = dict[str, Any]


def check_tokens(job: Job) -> Job:
    """Compare engines' tokens with single-request greedy decoding in float32.

    A difference is judged by its margin: how much the reference preferred its own token, in
    logits (whose standard deviation is about 1). Random weights make near-ties, which
    rounding may decide either way; what follows a first difference is not comparable.
    """
    model = load(job["model"], "float32", job["num_threads"])
    reports: dict[str, list[Job]] = {name: [] for name in job["candidates"]}
    for index, request in enumerate(job["requests"]):
        ids = torch.tensor([request["prompt_token_ids"]])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request["num_output_tokens"],
                min_new_tokens=request["num_output_tokens"],
                pad_token_id=job["pad_id"],
                output_logits=True,
                return_dict_in_generate=True,
            )
        expected = output.sequences[0, ids.shape[1] :].tolist()
        for name, tokens in job["candidates"].items():
            reports[name].append(first_divergence(expected, tokens[index], output.logits))
    return reports


def first_divergence(expected: list[int], tokens: list[int], logits: Any) -> Job:
    """First difference of ``tokens`` from ``expected``, with its margin; None if equal.

    ``logits[position][0]`` holds the reference's logits at that position.
    """
    found: Job = {"num_tokens": len(expected), "position": None, "margin": None}
    for position, (wanted, got) in enumerate(zip(expected, tokens, strict=True)):
        if wanted != got:
            row = logits[position][0]
            return found | {"position": position, "margin": float(row[wanted]) - float(row[got])}
    return found


if __name__ == "__main__":
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(check_tokens(job)), encoding="utf-8")
