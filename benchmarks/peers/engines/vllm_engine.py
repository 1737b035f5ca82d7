"""vLLM on a CPU, by the steps of its engine in this process, as ``vllm.LLM`` makes them."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from engines.stepped import Stepped

Json = dict[str, Any]


class Engine(Stepped):
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
        dtype = str(self._engine.model_config.dtype).removeprefix("torch.")
        cache = self._engine.vllm_config.cache_config
        is_zen = current_platform.is_zen_cpu()
        self.facts = {
            "computes_in": dtype,
            "kv_cache": dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
            "block_size": cache.block_size,
            "tcmalloc": "yes" if "tcmalloc" in os.environ.get("LD_PRELOAD", "") else "no",
            "zentorch": metadata.version("zentorch") if is_zen else "no",
            "more": {"vllm": vllm.__version__, "torch": torch.__version__},
        }

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
        outputs = self._engine.step()
        return [(int(each.request_id), list(each.outputs[0].token_ids)) for each in outputs]
