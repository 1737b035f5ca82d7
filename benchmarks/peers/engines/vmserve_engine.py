"""vmserve, by the steps of its engine, as ``vmserve.LLM`` makes them."""

from __future__ import annotations

from typing import Any

from engines.stepped import run_all
from vmserve import LLM, SamplingParams
from vmserve.models import choose_native
from vmserve.models.config import ModelConfig
from vmserve.numbers.dtypes import DType
from vmserve.types import RequestTerms

Json = dict[str, Any]


class VmserveEngine:
    def __init__(self, job: Json) -> None:
        # As many threads as OMP_NUM_THREADS says, which the launcher sets.
        options = {"max_num_seqs": job["max_num_seqs"], "max_model_len": job["max_model_len"]}
        options |= {"enable_prefix_caching": False}
        self._llm = LLM(model=job["model"], **(options | job["options"]))
        engine = self._llm.engine
        config = engine.config
        native = choose_native(
            config.linear_backend, config.quantization, config.dtype, engine.model_config
        )
        row_type = getattr(engine.runner.model.network, "row_type", "")
        self.facts = {
            "computes_in": _computed_in(native, config.dtype, engine.model_config, row_type)
        }
        self._next_number = 0

    def prepare(self, requests: list[Json]) -> None:
        """Everything is there since the start."""

    def run(self, requests: list[Json]) -> list[Json]:
        first = self._next_number
        self._next_number += len(requests)
        return run_all(self, requests, first)

    def add(self, number: int, request: Json) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=request["num_output_tokens"],
            ignore_eos=True,
            detokenize=False,
        )
        self._llm.engine.add_request(
            str(number), request["prompt_token_ids"], params, RequestTerms(stream=True)
        )

    def step(self) -> list[tuple[int, list[int]]]:
        result = self._llm.engine.step()
        for failure in result.failures:
            raise failure.error
        found = []
        for output in result.outputs:
            if not output.outputs:  # queued, nothing else
                continue
            found.append((int(output.request_id), output.outputs[0].token_ids))
        return found

    def close(self) -> None:
        self._llm.close()


def create(job: Json) -> VmserveEngine:
    return VmserveEngine(job)


def _computed_in(native: DType | None, dtype: str, model: ModelConfig, row_type: str) -> str:
    if native is not None:
        return f"activations of {row_type} in products, sums in float32; KV cache {native}"
    # Only here: the native decoder starts without torch, and is measured so.
    from vmserve.models.torch_dtype import resolve_dtype  # noqa: PLC0415

    return str(resolve_dtype(dtype, model, "cpu"))
