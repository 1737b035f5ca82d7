"""Sampling on the device draws what the host draws, from the same numbers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.helpers import peak_bytes
from tests.sampling.rows import random_cuts
from tests.sampling.rows import row as any_row
from vmserve.runner.torch_runtime import TorchCpuRuntime
from vmserve.sampling import DeviceSampler, Sampler, SamplingRow
from vmserve.sampling.device import _likeliest
from vmserve.sampling.tokens import sampling_bytes

VOCAB = 300


#: Greedy ones among them.
TEMPERATURES = (0.0, 0.3, 1.0, 1.0, 1.7)


def row(seed: int, position: int, **params: Any) -> SamplingRow:
    return any_row(seed, seed % 3, prompt=[1, 2], output=position, **params)


class Counting(TorchCpuRuntime):
    """Counts the waits."""

    num_waits = 0

    def fetch(self, tensors: Any) -> Any:
        self.num_waits += 1
        return super().fetch(tensors)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("coarse", [False, True])
def test_the_same_tokens(seed: int, coarse: bool) -> None:
    """Coarse logits, as half precision gives them, have many equals at every limit."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = 3 * torch.randn(40, VOCAB)
    if coarse:
        logits = logits.round()
    rows = [
        row(rng.randrange(2**63), rng.randrange(50), **random_cuts(rng, VOCAB, TEMPERATURES))
        for _ in logits
    ]
    runtime = Counting()
    there = DeviceSampler(VOCAB, runtime).sample(logits.clone(), rows)
    here = Sampler(VOCAB).sample(logits.clone(), rows)
    assert [token.token_id for token in there] == [token.token_id for token in here]
    for mine, other in zip(there, here, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert mine.top is None
    assert runtime.num_waits == 1


def test_a_batch_of_one_kind_takes_its_short_way() -> None:
    torch.manual_seed(1)
    logits = torch.randn(30, VOCAB)
    for params in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 7}):
        rows = [row(i, i, **params) for i in range(30)]
        there = DeviceSampler(VOCAB, TorchCpuRuntime()).sample(logits, rows)
        here = Sampler(VOCAB).sample(logits, rows)
        assert [token.token_id for token in there] == [token.token_id for token in here]


def mixed_rows(num_rows: int) -> tuple[torch.Tensor, list[SamplingRow]]:
    rng = random.Random(9)
    torch.manual_seed(9)
    cuts = (random_cuts(rng, VOCAB, TEMPERATURES) for _ in range(num_rows))
    return torch.randn(num_rows, VOCAB), [row(rng.randrange(2**63), 3, **each) for each in cuts]


@pytest.mark.parametrize("part_rows", [1, 7, 40])
def test_tokens_do_not_depend_on_the_parts(part_rows: int) -> None:
    logits, rows = mixed_rows(40)
    sampler = DeviceSampler(VOCAB, TorchCpuRuntime())
    sampler.part_rows = part_rows
    assert sampler.sample(logits, rows) == DeviceSampler(VOCAB, TorchCpuRuntime()).sample(
        logits, rows
    )


class Short(TorchCpuRuntime):
    """Has memory for so many rows at once."""

    memory_errors = (MemoryError,)

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows

    def upload(self, array: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        if array.ndim == 2 and len(array) > self.num_rows:  # numbers and limits of a part
            raise MemoryError("no room for so many rows")
        return super().upload(array, out)


def test_where_memory_is_short_parts_are_smaller_from_then_on() -> None:
    logits, rows = mixed_rows(40)
    expected = DeviceSampler(VOCAB, TorchCpuRuntime()).sample(logits, rows)
    sampler = DeviceSampler(VOCAB, Short(3))
    assert sampler.sample(logits, rows) == expected
    assert 1 <= sampler.part_rows <= 3
    with pytest.raises(MemoryError):
        DeviceSampler(VOCAB, Short(0)).sample(logits, rows)


@pytest.mark.parametrize("params", [{"top_p": 0.9}, {"top_k": 50}, {"temperature": 0.0}, {}])
def test_memory_is_within_the_bound(params: dict[str, Any]) -> None:
    """The parts are half of the batch, or less."""
    vocab, num_rows = 1 << 17, 64
    rows = [row(i, i, **params) for i in range(num_rows)]
    logits = torch.zeros(num_rows, vocab)
    sampler = DeviceSampler(vocab, TorchCpuRuntime())
    assert 2 * sampler.part_rows <= num_rows
    assert 0 < peak_bytes(lambda: sampler.sample(logits, rows)) <= sampling_bytes(vocab, num_rows)


@pytest.mark.parametrize(
    "params", [{"logprobs": 2}, {"logit_bias": {3: 5.0}}, {"presence_penalty": 1.0}]
)
def test_what_is_not_common_goes_the_usual_way(params: dict[str, Any]) -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, VOCAB)
    rows = [row(1, 4), row(2, 4, **params), row(3, 4)]
    runtime = Counting()
    assert DeviceSampler(VOCAB, runtime).sample(logits, rows) == Sampler(VOCAB).sample(logits, rows)
    assert runtime.num_waits == 0


def test_broken_logits_are_repaired() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, VOCAB)
    logits[1, 7] = float("nan")
    logits[2, [11, 9]] = float("inf")
    logits[3] = -float("inf")
    logits[4] = float("nan")
    rows = [row(i, 0, temperature=0.0) for i in range(6)]
    sampler, host = DeviceSampler(VOCAB, TorchCpuRuntime()), Sampler(VOCAB)
    found, expected = sampler.sample(logits.clone(), rows), host.sample(logits, rows)
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    # Summed in another order.
    logprobs = [each.logprob for each in expected]
    assert [each.logprob for each in found] == pytest.approx(logprobs, rel=1e-6)
    assert sampler.num_repaired_rows == host.num_repaired_rows == 4


def test_the_likeliest() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(64, 5000, generator=generator)
    x[::2] = x[::2].to(torch.bfloat16).float()  # equals
    x[1, ::3] = -torch.inf
    x[2] = 0.0
    chosen, own = _likeliest(x)
    assert torch.equal(chosen, x.argmax(dim=-1))
    exact = x.double().log_softmax(dim=-1).gather(1, chosen[:, None])[:, 0]
    torch.testing.assert_close(own, exact.float(), rtol=1e-6, atol=1e-6)
    chosen, own = _likeliest(torch.full((2, 50), -torch.inf))
    assert chosen.tolist() == [0, 0]
    torch.testing.assert_close(own, torch.full((2,), -math.log(50.0)))


def test_no_rows() -> None:
    assert DeviceSampler(VOCAB, TorchCpuRuntime()).sample(torch.empty(0, VOCAB), []) == []
