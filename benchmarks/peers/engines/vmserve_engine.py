"""vmserve, by the steps of its engine, as ``vmserve.LLM`` makes them."""

from __future__ import annotations

from typing import Any

from engines.stepped import Stepped
from vmserve import LLM, SamplingParams
from vmserve.models import choose_native
from vmserve.types import RequestTerms

Json = dict[str, Any]


class Engine(Stepped):
    def __init__(self, job: Json) -> None:
        # As many threads as OMP_NUM_THREADS says, which the launcher sets.
        options = {name: job[name] for name in ("max_num_seqs", "max_model_len")}
        options |= {"enable_prefix_caching": False} | job["options"]
        self._llm = LLM(model=job["model"], **options)
        self.facts = {"computes_in": computes_in(self._llm.engine)}

    def add(self, number: int, request: Json) -> None:
        num_tokens = request["num_output_tokens"]
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompt = request["prompt_token_ids"]
        self._llm.engine.add_request(str(number), prompt, params, RequestTerms(stream=True))

    def step(self) -> list[tuple[int, list[int]]]:
        result = self._llm.engine.step()
        for failure in result.failures:
            raise failure.error
        # One that is only queued has no outputs.
        return [(int(o.request_id), o.outputs[0].token_ids) for o in result.outputs if o.outputs]

    def close(self) -> None:
        self._llm.close()


def computes_in(engine: Any) -> str:
    config, model = engine.config, engine.model_config
    native = choose_native(config.linear_backend, config.quantization, config.dtype, model)
    if native is not None:
        row_type = engine.runner.model.network.row_type
        return f"activations of {row_type} in products, sums in float32; KV cache {native}"
    # Only here: the native decoder starts without torch, and is measured so.
    from vmserve.models.torch_dtype import resolve_dtype  # noqa: PLC0415

    return str(resolve_dtype(config.dtype, model, "cpu"))
