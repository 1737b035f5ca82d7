"""An answer depends on its request alone: tokens and log-probabilities, bit for bit.

Every way to compute it is compared with the request alone, whose prompt is one chunk.
``VMSERVE_BITS=200`` takes as many requests as that and more kinds of weights, and
``VMSERVE_BITS_RANKS=2`` has the other ways computed by two ranks, where these divide the model.
``VMSERVE_BITS_MODEL=PATH`` takes another model; with a GGUF file or a quantized checkpoint, the
kinds are what ``-k`` leaves of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models import gguf_checkpoints, quantized_checkpoints
from tests.models.checkpoints import (
    DEEPSEEK_ROPE,
    deepseek_v3,
    gemma3,
    gpt_oss,
    phi3,
    qwen3_moe,
    qwen3_next,
    save,
)
from vmserve import LLM, RequestOutput, SamplingParams
from vmserve.memory.base import Regime
from vmserve.models.hub import resolve_model
from vmserve.scheduler.preemption import PreemptionPolicy

import torch  # isort: skip

Prompts = Callable[[int, int, int], list[list[int]]]
#: Token ids and log-probabilities of each choice.
Bits = list[tuple[tuple[int, ...], list[dict[int, float]]]]

COUNT = int(os.environ.get("VMSERVE_BITS", "8"))
MODEL = os.environ.get("VMSERVE_BITS_MODEL")
RANKS = int(os.environ.get("VMSERVE_BITS_RANKS", "1"))
EMBEDDED = str(resolve_model(None))
#: Kinds that are small random models, of the embedded one's vocabulary.
_SIZES = {"vocab_size": 2048, "hidden_size": 64, "max_position_embeddings": 512}
FAMILIES = {
    "phi3": phi3(**_SIZES, partial_rotary_factor=0.75),
    "gpt-oss": gpt_oss(**_SIZES),
    "qwen3-moe": qwen3_moe(**_SIZES, num_experts=9, num_experts_per_tok=4),
    "qwen3-next": qwen3_next(**_SIZES, num_experts=6, moe_intermediate_size=48),
    "deepseek-v3": deepseek_v3(**_SIZES, rope_parameters=DEEPSEEK_ROPE),
    "gemma3": gemma3(**_SIZES, sliding_window=24, final_logit_softcapping=20.0),
}
KINDS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-dynamic": {"dtype": "bfloat16", "quantization": "int8-dynamic"},
    "kv-int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "q4": {"dtype": "bfloat16"},
    "phi3": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
    "gpt-oss": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
    "qwen3-moe": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
    "qwen3-next": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
    "deepseek-v3": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
    "gemma3": {"dtype": "bfloat16", "tokenizer": EMBEDDED},
}
if RANKS > 1:
    for undivided in ("qwen3-next", "deepseek-v3"):
        del KINDS[undivided]
if "VMSERVE_BITS" in os.environ:
    KINDS["q4-dynamic"] = {"dtype": "bfloat16", "quantization": "int8-dynamic"}
    KINDS["gptq"] = {"dtype": "bfloat16"}
    for family in ("gemma3", "gpt-oss", "deepseek-v3", "qwen3-next"):
        KINDS[f"kv-int8-{family}"] = {**KINDS[family], "kv_cache_dtype": "int8"}


def bits_of(result: RequestOutput) -> Bits:
    return [
        (
            tuple(choice.token_ids),
            [{token: each.logprob for token, each in row.items()} for row in choice.logprobs or []],
        )
        for choice in result.outputs
    ]


def asked(index: int) -> SamplingParams:
    """Greedy and sampled, some with two choices."""
    return SamplingParams(
        temperature=0.0 if index % 3 == 0 else 0.9,
        seed=index,
        n=2 if index % 3 == 1 else 1,
        max_tokens=40,
        ignore_eos=True,
        logprobs=2,
    )


class Workload:
    """The requests of one kind of weights, and their answers alone."""

    def __init__(self, model: str | None, options: dict[str, Any], prompts: Prompts) -> None:
        self.model, self.options = model, options
        # Lengths of whole blocks and one token more: after a hit, one row is left to compute.
        rng = random.Random(1)
        pool = prompts(COUNT, 400, 21)
        self.requests = [
            ([*prompt, *pool[0]][: 16 * rng.randrange(1, 25) + 1] if i % 2 else prompt, asked(i))
            for i, prompt in enumerate(pool)
        ]
        with self.llm(enable_prefix_caching=False, tensor_parallel_size=1) as llm:
            self.expected = self.one_by_one(llm)

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        wanted: dict[str, Any] = {
            "kv_cache_memory": "64MiB",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "tensor_parallel_size": RANKS,
            **self.options,
            **options,
        }
        with LLM(self.model, **wanted) as llm:
            yield llm

    def one_by_one(self, llm: LLM) -> list[Bits]:
        return [bits_of(llm.generate([prompt], one)[0]) for prompt, one in self.requests]

    def together(self, llm: LLM) -> list[Bits]:
        prompts, params = zip(*self.requests, strict=True)
        return [bits_of(result) for result in llm.generate(list(prompts), list(params))]

    def check(self, found: list[Bits]) -> None:
        differing = [i for i, bits in enumerate(found) if bits != self.expected[i]]
        assert not differing, f"{len(differing)} of {len(found)} differ: {differing[:10]}"


@pytest.fixture(scope="module", params=KINDS)
def workload(
    request: pytest.FixtureRequest, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory
) -> Workload:
    model = MODEL or checkpoint(request.param, tmp_path_factory.mktemp("model"))
    return Workload(model, KINDS[request.param], prompts)


def checkpoint(kind: str, directory: Path) -> str | None:
    """The embedded model as a GGUF file or in GPTQ's format, for the kinds of 4 bits; or another
    family's."""
    path, embedded = directory / kind, Path(EMBEDDED)
    if (family := kind.removeprefix("kv-int8-")) in FAMILIES:
        save(FAMILIES[family], path)
    elif kind == "gptq":
        scheme = quantized_checkpoints.SCHEMES["gptq-asymmetric"]
        quantized_checkpoints.convert(embedded, path, directory / "plain", scheme)
    elif kind.startswith("q4"):
        path = path.with_suffix(".gguf")
        gguf_checkpoints.convert(embedded, path, gguf_checkpoints.add_embedded_tokenizer, "Q4_1")
    else:
        return None
    return str(path)


@pytest.mark.parametrize("budget", [16, 37, 50, 64, 512])
def test_any_budget(workload: Workload, budget: int) -> None:
    with workload.llm(max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        workload.check(workload.together(llm))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_any_view_and_number_of_threads(workload: Workload, regime: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # a fixture sets it back
    with workload.llm(kv_regime=regime, enable_prefix_caching=False) as llm:
        workload.check(workload.together(llm))
        if num_threads != 1:
            workload.check(workload.one_by_one(llm))


def test_after_a_prefix_hit(workload: Workload) -> None:
    with workload.llm() as llm:
        workload.check(workload.one_by_one(llm))
        before = llm.stats()["prefix_hit_blocks_total"]
        workload.check(workload.one_by_one(llm))
        workload.check(workload.together(llm))
        assert llm.stats()["prefix_hit_blocks_total"] > before


def test_a_choice_with_and_without_another(workload: Workload) -> None:
    prompts, params = zip(*workload.requests, strict=True)
    with workload.llm(enable_prefix_caching=False) as llm:
        results = llm.generate(list(prompts), [replace(one, n=3 - one.n) for one in params])
        assert llm.stats()["forks_total"] > 0
    found = [bits_of(result) for result in results]
    # What only one of the two has is taken from the other.
    both = zip(found, workload.expected, strict=True)
    workload.check([one[: len(want)] + want[len(one) :] for one, want in both])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_after_a_preemption(
    workload: Workload, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is measured on a busy machine must not choose between the two.
    for measured in ("copied", "prefilled"):
        monkeypatch.setattr(PreemptionPolicy, measured, lambda *_: None)
    with workload.llm() as llm:
        stats = llm.stats()
        states = 2 * llm.engine.memory.layout.state_bytes
    tokens = 576  # of the pool: one long request, or some short ones
    with workload.llm(
        kv_cache_memory=RANKS * tokens // stats["page_tokens"] * stats["page_bytes"] + states,
        enable_prefix_caching=False,
        preemption=preemption,
        swap_space="64MiB" if preemption == "swap" else 0,
    ) as llm:
        step, num_steps = llm.engine.step, 0

        def refused_step() -> object:
            nonlocal num_steps
            num_steps += 1
            if num_steps % 8 == 0:  # windows leave so much room that nobody would have to go
                llm.engine.scheduler.make_room()
            return step()

        llm.engine.step = refused_step  # type: ignore[method-assign, assignment]
        workload.check(workload.together(llm))
        stats = llm.stats()
    assert stats["num_preemptions_total"] > 0
    assert (stats["swapped_in_blocks_total"] > 0) == (preemption == "swap")


def test_while_regimes_change(workload: Workload) -> None:
    with workload.llm(max_num_batched_tokens=96, enable_prefix_caching=False) as llm:
        step, num_steps = llm.engine.step, 0

        def changed_step() -> object:
            nonlocal num_steps
            result = step()
            num_steps += 1
            for index in range(num_steps % 4, COUNT, 4):
                to = Regime.PAGED if (num_steps + index) % 8 else Regime.VIRTUAL
                llm.engine.convert(str(index), to)
            return result

        llm.engine.step = changed_step  # type: ignore[method-assign, assignment]
        workload.check(workload.together(llm))
        stats = llm.stats()
    assert stats["converted_to_paged_total"] > 0
    assert stats["converted_to_virtual_total"] > 0
