"""vLLM on a CPU, by the steps of its engine in this process, as ``vllm.LLM`` makes them."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from engines.stepped import run_all

Json = dict[str, Any]


class VllmEngine:
    def __init__(self, job: Json) -> None:
        options: Json = {
            # Without such instructions oneDNN refuses bfloat16, and vLLM takes plain linears.
            "dtype": "bfloat16" if job["has_bf16"] else "float32",
            "max_num_seqs": job["max_num_seqs"],
            "max_model_len": job["max_model_len"],
            "enable_prefix_caching": False,
            "disable_log_stats": True,
        }
        self._llm = vllm.LLM(model=job["model"], **(options | job["options"]))
        self._engine = self._llm.llm_engine
        self._next_number = 0
        dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        cache = self._engine.vllm_config.cache_config.cache_dtype
        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        if current_platform.is_zen_cpu():
            versions["zentorch"] = metadata.version("zentorch")
        self.facts = {
            "computes_in": dtype,
            "kv_cache": dtype if cache == "auto" else cache,
            "versions": versions,
            "settings": {
                "block_size": self._engine.vllm_config.cache_config.block_size,
                "tcmalloc": "yes" if "tcmalloc" in os.environ.get("LD_PRELOAD", "") else "no",
                "zentorch": "yes" if current_platform.is_zen_cpu() else "no",
            },
        }

    def prepare(self, requests: list[Json]) -> None:
        """Everything is there since the start."""

    def run(self, requests: list[Json]) -> list[Json]:
        first = self._next_number
        self._next_number += len(requests)
        return run_all(self, requests, first)

    def add(self, number: int, request: Json) -> None:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=request["num_output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request["prompt_token_ids"]}
        self._engine.add_request(str(number), prompt, params)

    def step(self) -> list[tuple[int, list[int]]]:
        return [
            (int(output.request_id), list(output.outputs[0].token_ids))
            for output in self._engine.step()
        ]

    def close(self) -> None:
        """The process's end frees everything."""


def create(job: Json) -> VllmEngine:
    return VllmEngine(job)
