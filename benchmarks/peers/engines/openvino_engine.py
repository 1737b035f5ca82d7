"""OpenVINO GenAI's continuous batching, by its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from engines.stepped import Stepped

Json = dict[str, Any]

#: A step reads so many tokens at most, as vmserve does by default; OpenVINO's own default is 256.
BATCHED_TOKENS = 512


class Engine(Stepped):
    def __init__(self, job: Json) -> None:
        options = dict(job["options"])
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = int(options.pop("max_num_seqs", job["max_num_seqs"]))
        scheduler.max_num_batched_tokens = int(
            options.pop("max_num_batched_tokens", BATCHED_TOKENS)
        )
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = bool(options.pop("enable_prefix_caching", False))
        scheduler.cache_size = int(options.pop("cache_gib", 0))
        properties: Json = {
            "INFERENCE_NUM_THREADS": job["num_threads"],
            "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "bf16" if job["has_bf16"] else "f32",
        }
        if job["weights"] == "f16":
            properties["KV_CACHE_PRECISION"] = "bf16" if job["has_bf16"] else "f16"
        # What is left are properties of the processor's plugin.
        properties |= {key.upper(): value for key, value in options.items()}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            job["files"]["openvino"], scheduler, "CPU", properties
        )
        self._handles: dict[int, Any] = {}
        core = openvino.Core()
        default_cache = core.get_property("CPU", "KV_CACHE_PRECISION").get_type_name()
        self.facts = {
            "computes_in": properties["INFERENCE_PRECISION_HINT"],
            "kv_cache": properties.get("KV_CACHE_PRECISION", default_cache),
            "more": {
                "properties": properties,
                "capabilities": list(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
                "versions": [openvino.__version__, openvino_genai.__version__],
            },
        }

    def add(self, number: int, request: Json) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["num_output_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64))
        self._handles[number] = self._pipeline.add_request(number, ids, config)

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipeline.step()
        found = []
        for number, handle in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                [output] = handle.read().values()
                tokens += output.generated_ids
            found.append((number, tokens))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del self._handles[number]
        return found

    def close(self) -> None:
        self._handles.clear()
