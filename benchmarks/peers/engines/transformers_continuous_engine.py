"""transformers' continuous batching: its generation loop runs in a thread of its own.

What this thread does is hand requests over and take tokens as the loop gives them, a step's worth
at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

from engines.stepped import run_all

Json = dict[str, Any]

#: transformers' own size of a page, and tokens that a step reads at most, as of the others.
PAGE_TOKENS = 256
BATCHED_TOKENS = 512
#: How long a step may take before it is asked whether the loop is still alive.
PATIENCE_S = 1.0


class TransformersContinuousEngine:
    def __init__(self, job: Json) -> None:
        torch.set_num_threads(job["num_threads"])
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        options = dict(job["options"])
        options.pop("batching")
        dtype = options.pop("dtype", "bfloat16" if job["has_bf16"] else "float32")
        self._max_requests = int(options.pop("max_num_seqs", job["max_num_seqs"]))
        self._batched_tokens = int(options.pop("max_num_batched_tokens", BATCHED_TOKENS))
        attention = options.pop("attention", "sdpa")
        if options:
            raise ValueError(f"transformers has no option {', '.join(options)} here")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=getattr(torch, dtype), attn_implementation=attention
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._manager: Any = None
        self._num_blocks = 0
        self._num_seen: dict[str, int] = {}
        self._next_number = 0
        self.facts = {
            "computes_in": dtype,
            "kv_cache": dtype,
            "batch": f"continuous, attention {attention}",
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        }

    def prepare(self, requests: list[Json]) -> None:
        """A cache with pages for all requests at once; left to itself, it takes most of the
        machine's memory.
        """
        lengths = [len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests]
        if requests[0].get("is_sequential"):
            lengths = [max(lengths)]
        num_blocks = sum(-(-length // PAGE_TOKENS) + 1 for length in lengths)
        if self._manager is not None and num_blocks <= self._num_blocks:
            return
        self.close()
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=num_blocks,
            max_batch_tokens=self._batched_tokens,
            max_requests_per_batch=self._max_requests,
            allow_block_sharing=False,
        )
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=None)
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config
        )
        self._num_blocks = num_blocks
        self._manager.warmup()  # makes the cache now, not with the first request
        self._manager.start()

    def run(self, requests: list[Json]) -> list[Json]:
        first = self._next_number
        self._next_number += len(requests)
        return run_all(self, requests, first)

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
        results = [self._wait()]
        while True:
            result = self._manager.get_result(timeout=0)
            if result is None:
                return [self._new_tokens(each) for each in results]
            results.append(result)

    def _wait(self) -> Any:
        while True:
            result = self._manager.get_result(timeout=PATIENCE_S)
            if result is not None:
                return result
            if not self._manager.is_running():
                raise RuntimeError("transformers' generation loop has ended")

    def _new_tokens(self, result: Any) -> tuple[int, list[int]]:
        if result.error is not None:
            raise RuntimeError(f"request {result.request_id} failed: {result.error}")
        seen = self._num_seen[result.request_id]
        self._num_seen[result.request_id] = len(result.generated_tokens)
        return int(result.request_id), result.generated_tokens[seen:]

    def close(self) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, hard_stop=True)
            self._manager.destroy()
            self._manager = None


def create(job: Json) -> TransformersContinuousEngine:
    return TransformersContinuousEngine(job)
