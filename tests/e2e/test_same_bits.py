"""An answer depends on its request alone: tokens and log-probabilities, bit for bit.

Every way to compute it is compared with the request alone, whose prompt is one chunk.
``VMSERVE_BITS=200`` takes as many requests as that, and ``VMSERVE_BITS_MODEL=PATH`` another model.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.models.gguf_checkpoints import add_embedded_tokenizer, convert
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
KINDS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-dynamic": {"dtype": "bfloat16", "quantization": "int8-dynamic"},
    "q4": {"dtype": "bfloat16"},
}


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
        with self.llm(enable_prefix_caching=False) as llm:
            self.expected = self.one_by_one(llm)

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        wanted: dict[str, Any] = {
            "kv_cache_memory": "64MiB",
            "max_model_len": 512,
            "max_num_seqs": 16,
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
    model = MODEL
    if request.param == "q4" and MODEL is None:
        path = tmp_path_factory.mktemp("q4") / "model.gguf"
        convert(resolve_model(None), path, add_embedded_tokenizer, "Q4_1")
        model = str(path)
    return Workload(model, KINDS[request.param], prompts)


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


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_after_a_preemption(
    workload: Workload, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is measured on a busy machine must not choose between the two.
    for measured in ("copied", "prefilled"):
        monkeypatch.setattr(PreemptionPolicy, measured, lambda *_: None)
    with workload.llm() as llm:
        stats = llm.stats()
    tokens = 576  # of the pool: one long request, or some short ones
    with workload.llm(
        kv_cache_memory=tokens // stats["page_tokens"] * stats["page_bytes"],
        enable_prefix_caching=False,
        preemption=preemption,
        swap_space="64MiB" if preemption == "swap" else 0,
    ) as llm:
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
