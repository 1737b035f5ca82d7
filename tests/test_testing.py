"""The public fakes."""

from __future__ import annotations

from vmserve import SamplingParams
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.testing import NullRuntime


def test_an_engine_without_a_forward_pass_says_the_token_that_was_chosen() -> None:
    runtime = NullRuntime(token_id=7)
    config = EngineConfig(device="cpu", kv_cache_memory="16MiB", max_model_len=256)
    engine = LLMEngine(config, runtime=runtime)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2)
    for index in range(2):
        engine.add_request(str(index), [5, 6 + index], params)
    tokens = {}
    while engine.has_unfinished:
        for output in engine.step().outputs:
            tokens[output.request_id] = [choice.token_ids for choice in output.outputs]
    assert tokens == {"0": [[7, 7, 7]] * 2, "1": [[7, 7, 7]] * 2}
    assert runtime.num_tokens == 4
    engine.memory.check()
    engine.close()
