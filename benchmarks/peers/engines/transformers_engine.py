"""transformers: ``generate`` on static batches (arrival order, left padding), or its continuous
batching, whose loop runs in a thread of its own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from engines.stepped import Stepped

Json = dict[str, Any]

#: Of a static batch.
BATCH_SIZE = 16
#: transformers' own size of a page, and tokens that a step reads at most, as of the others.
PAGE_TOKENS, BATCHED_TOKENS = 256, 512
#: How long a step may take before it is asked whether the loop is still alive.
PATIENCE_S = 1.0


def load(model: str, dtype: str, num_threads: int, **options: Any) -> Any:
    torch.set_num_threads(num_threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), **options
    ).eval()
    # Without an EOS nothing ends early and no logit is masked to prevent it.
    loaded.generation_config.eos_token_id = None
    return loaded


class Stamps(transformers.StoppingCriteria):
    """Stops nothing: called after every token, it writes down when that was."""

    def __init__(self) -> None:
        self.instants: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.instants.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine(Stepped):
    def __init__(self, job: Json) -> None:
        options = dict(job["options"])
        dtype = options.pop("dtype", "bfloat16" if job["has_bf16"] else "float32")
        self._is_continuous = options.pop("batching", "static") == "continuous"
        self._pad_id = job["pad_id"]
        self._manager: Any = None
        self._num_blocks = 0
        self._num_seen: dict[str, int] = {}
        more = {}
        if self._is_continuous:
            self._max_requests = int(options.pop("max_num_seqs", job["max_num_seqs"]))
            self._batched_tokens = int(options.pop("max_num_batched_tokens", BATCHED_TOKENS))
            more = {"attn_implementation": options.pop("attention", "sdpa")}
            batch = f"continuous, attention {more['attn_implementation']}"
        else:
            self._batch_size = options.pop("batch_size", BATCH_SIZE)
            batch = f"static, {self._batch_size}"
        if options:
            raise ValueError(f"transformers has no option {', '.join(options)} here")
        self._model = load(job["model"], dtype, job["num_threads"], **more)
        self.facts = {
            "computes_in": dtype,
            "kv_cache": dtype,
            "batch": batch,
            "versions": {each.__name__: each.__version__ for each in (transformers, torch)},
        }

    def run(self, requests: list[Json]) -> list[Json]:
        if self._is_continuous:
            return super().run(requests)
        start = time.monotonic()
        size = 1 if requests[0].get("is_sequential") else self._batch_size
        answers: list[Json] = []
        for first in range(0, len(requests), size):
            due = time.monotonic() - start if size == 1 else 0.0
            answers += self._static(requests[first : first + size], start, due)
        return answers

    def _static(self, batch: list[Json], start: float, due: float) -> list[Json]:
        """Answers to one static batch; only the tokens that were asked for count."""
        prompts = [request["prompt_token_ids"] for request in batch]
        width = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        longest = max(request["num_output_tokens"] for request in batch)
        stamps = Stamps()
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
        counts = [request["num_output_tokens"] for request in batch]
        return [
            {
                "due_s": due,
                "times_s": times[:count],
                "token_ids": row[width : width + count].tolist(),
            }
            for row, count in zip(output, counts, strict=True)
        ]

    def prepare(self, requests: list[Json]) -> None:
        """A cache with pages for all requests at once; left to itself, continuous batching takes
        most of the machine's memory.
        """
        lengths = [len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests]
        if requests[0].get("is_sequential"):
            lengths = [max(lengths)]
        num_blocks = sum(-(-length // PAGE_TOKENS) + 1 for length in lengths)
        if not self._is_continuous or num_blocks <= self._num_blocks:
            return
        self.close()
        self._num_blocks = num_blocks
        self._manager = self._model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=None),
            continuous_batching_config=transformers.generation.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=num_blocks,
                max_batch_tokens=self._batched_tokens,
                max_requests_per_batch=self._max_requests,
                allow_block_sharing=False,
            ),
        )
        self._manager.warmup()  # makes the cache now, not with the first request
        self._manager.start()

    def add(self, number: int, request: Json) -> None:
        self._num_seen[str(number)] = 0
        self._manager.add_request(
            request["prompt_token_ids"],
            request_id=str(number),
            max_new_tokens=request["num_output_tokens"],
            streaming=True,
            eos_token_id=-1,  # no token has that id: nothing ends early
        )

    def step(self) -> list[tuple[int, list[int]]]:
        """Waits for the loop's next tokens; gives them with whatever else is there by then."""
        while (result := self._manager.get_result(timeout=PATIENCE_S)) is None:
            if not self._manager.is_running():
                raise RuntimeError("transformers' generation loop has ended")
        found = []
        while result is not None:
            if result.error is not None:
                raise RuntimeError(f"request {result.request_id} failed: {result.error}")
            seen = self._num_seen[result.request_id]
            self._num_seen[result.request_id] = len(result.generated_tokens)
            found.append((int(result.request_id), result.generated_tokens[seen:]))
            result = self._manager.get_result(timeout=0)
        return found

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._manager.destroy()
            self._manager = None
