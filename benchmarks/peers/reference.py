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
    found: dict[str, list[Job | None]] = {}
    for check in job["checks"]:
        for index, request in enumerate(check["requests"]):
            answers = {name: each[index] for name, each in check["candidates"].items()
                       if is_whole(each, index, request)}  # fmt: skip
            if answers:
                expected, logits = generate(model, request, job["pad_id"])
            for name, tokens in answers.items():
                found.setdefault(name, []).append(first_divergence(expected, tokens, logits))
    return {name: summary(reports) for name, reports in found.items()}


def is_whole(answers: list[list[int]], index: int, request: Job) -> bool:
    """Text from a server lacks special tokens, which random weights make now and then: such an
    answer is not compared.
    """
    return index < len(answers) and len(answers[index]) == request["num_output_tokens"]


def summary(reports: list[Job | None]) -> Job:
    different = [each for each in reports if each is not None]
    return {
        "num_requests": len(reports),
        "num_identical": len(reports) - len(different),
        "max_margin": max((each["margin"] for each in different), default=None),
        "divergences": different,
    }


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


def first_divergence(expected: list[int], tokens: list[int], logits: Any) -> Job | None:
    """First difference of ``tokens`` from ``expected``; None if they are equal.

    ``logits[position][0]`` holds the reference's logits at that position.
    """
    for position, (wanted, got) in enumerate(zip(expected, tokens, strict=True)):
        if wanted != got:
            row = logits[position][0]
            margin = float(row[wanted]) - float(row[got])
            return {"num_tokens": len(expected), "position": position, "margin": margin}
    return None


if __name__ == "__main__":
    die_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(sys.argv[2]).write_text(json.dumps(check_tokens(job)), encoding="utf-8")
