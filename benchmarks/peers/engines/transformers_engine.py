"""transformers' ``generate``: static batches in arrival order, left padding, greedy."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

Json = dict[str, Any]

DEFAULT_BATCH_SIZE = 16


class Stamps(transformers.StoppingCriteria):
    """Stops nothing: called after every token, it writes down when that was."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.instants.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class TransformersEngine:
    def __init__(self, job: Json) -> None:
        torch.set_num_threads(job["num_threads"])
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        options = dict(job["options"])
        self._batch_size = options.pop("batch_size", DEFAULT_BATCH_SIZE)
        dtype = options.pop("dtype", "bfloat16" if job["has_bf16"] else "float32")
        if options:
            raise ValueError(f"transformers has no option {', '.join(options)} here")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, dtype)
        ).eval()
        # Without an EOS nothing ends early and no logit is masked to prevent it.
        self._model.generation_config.eos_token_id = None
        self._pad_id = job["pad_id"]
        self.facts = {
            "computes_in": dtype,
            "kv_cache": dtype,
            "batch": f"static, {self._batch_size}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }

    def prepare(self, requests: list[Json]) -> None:
        """Everything is there since the start."""

    def run(self, requests: list[Json]) -> list[Json]:
        start = time.monotonic()
        size = 1 if requests[0].get("is_sequential") else self._batch_size
        answers: list[Json] = []
        for first in range(0, len(requests), size):
            answers += self._batch(requests[first : first + size], start, is_alone=size == 1)
        return answers

    def _batch(self, batch: list[Json], start: float, *, is_alone: bool) -> list[Json]:
        """Answers to one static batch; only the tokens that were asked for count."""
        prompts = [request["prompt_token_ids"] for request in batch]
        width = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        longest = max(request["num_output_tokens"] for request in batch)
        stamps = Stamps()
        due = time.monotonic() - start if is_alone else 0.0
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=self._pad_id,
                stopping_criteria=transformers.StoppingCriteriaList([stamps]),
            )
        times = [instant - start for instant in stamps.instants]
        return [
            {
                "due_s": due,
                "times_s": times[: request["num_output_tokens"]],
                "token_ids": row[width : width + request["num_output_tokens"]].tolist(),
            }
            for row, request in zip(output, batch, strict=True)
        ]

    def close(self) -> None:
        """Nothing runs between calls."""


def create(job: Json) -> TransformersEngine:
    return TransformersEngine(job)
