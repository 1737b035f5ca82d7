"""Ranks that torch computes give the logits of one, but for the order of sums."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file

from tests.models.checkpoints import MODELS, TORCH, Saved, llama, reference_model, save
from tests.models.quantized_checkpoints import write_mxfp4
from tests.models.schedule import (
    mean_square,
    run_schedule,
    transformers_logits,
    worst_difference,
)
from tests.models.torch_ranks import join, parameter_bytes, run_rank, run_ranks
from tests.namespaces import namespaces
from vmserve.errors import DriverError, UnsupportedError
from vmserve.models import load_model, tensor_loader
from vmserve.models.blocks import Joined, StackedExperts
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.shard import Part, Shard, share
from vmserve.models.weights import DecoderWeights, assemble

__all__ = ["namespaces"]

ROOT = Path(__file__).parents[2]


def alone(path: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return run_schedule(load_model(path, dtype))


def assert_like_one(path: Path, *sizes: int) -> None:
    expected, one = transformers_logits(path), alone(path)
    for size in sizes:
        together = run_ranks(path, torch.float32, size)
        assert worst_difference(together, expected) < 1e-5
        assert worst_difference(together, one) < 1e-5
        for ours, theirs in zip(together, one, strict=True):
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


#: Key-value heads fewer than ranks, tied heads, biases behind sums, one matrix of q, k and v and of
#: gate and up, windows and norms behind sums, experts, a shared one, sinks and experts in one
#: tensor, learned positions, a projection of the embedding, matrices ``[in, out]``.
@pytest.mark.parametrize("name", [name for name in TORCH if MODELS[name].ranks])
def test_float32(name: str, checkpoint: Saved) -> None:
    assert_like_one(checkpoint(name), *MODELS[name].ranks)


@pytest.mark.parametrize(
    "name", ["llama-gqa-llama3", "phi3-window", "mixtral-narrow", "qwen3-moe-narrow"]
)
def test_joined_products(name: str, checkpoint: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    joined: list[DecoderWeights] = []

    def join(_: object, config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> DecoderWeights:
        joined.append(assemble(config, tensors, joined=True))
        return joined[-1]

    expected = transformers_logits(checkpoint(name))
    monkeypatch.setattr(tensor_loader, "assemble_on", join)
    assert worst_difference(run_ranks(checkpoint(name), torch.float32, 2), expected) < 1e-5
    assert {type(weights.layers[0].project.qkv) for weights in joined} == {Joined}
    if "experts" in MODELS[name].has:
        assert {type(weights.layers[0].mlp) for weights in joined} == {StackedExperts}


def test_three_ranks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    assert_like_one(save(llama(**heads, intermediate_size=83), tmp_path), 3)


def test_experts_of_four_bits(tmp_path: Path) -> None:
    quantized, plain = write_mxfp4(tmp_path)
    together = run_ranks(quantized, torch.float32, 2)
    assert worst_difference(together, transformers_logits(plain)) < 1e-5


@pytest.mark.parametrize("name", ["phi3-window", "gpt2"])
def test_slices_of_another_type(
    name: str, checkpoint: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are converted some rows at a time."""
    reference_model(checkpoint(name), torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(tensor_loader, "_BLOCK_BYTES", 1000)
    together = run_ranks(tmp_path, torch.float32, 2)
    assert worst_difference(together, transformers_logits(tmp_path)) < 1e-5


def test_bfloat16(checkpoint: Saved) -> None:
    """Partial sums are rounded too: a few roundings more than those of one rank."""
    path = checkpoint("llama-gqa-llama3")
    exact = transformers_logits(path, torch.bfloat16, compute_float32=True)
    one = alone(path, torch.bfloat16)
    for size in (2, 4):
        together = run_ranks(path, torch.bfloat16, size)
        assert worst_difference(together, one) < 2**-4
        assert mean_square(together, exact) < 1.5 * mean_square(one, exact)


def start_rank(
    path: Path, meeting: str, rank: int, host: str, results: str, *prefix: str
) -> subprocess.Popen[bytes]:
    command = [*prefix, sys.executable, "-m", "tests.models.torch_ranks"]
    return subprocess.Popen([*command, str(path), meeting, str(rank), "2", host, results], cwd=ROOT)


@pytest.fixture
def second_rank(checkpoint: Saved, tmp_path: Path) -> Any:
    """A process that is rank 1 of 2, and the store that it comes to."""
    meeting = str(tmp_path / "meeting")
    process = start_rank(checkpoint("llama-gqa-llama3"), meeting, 1, "127.0.0.1", "")
    try:
        yield process, distributed.FileStore(meeting, 2)
    finally:
        process.kill()
        process.wait()


def test_processes(second_rank: Any, checkpoint: Saved) -> None:
    path = checkpoint("llama-gqa-llama3")
    process, store = second_rank
    together = run_rank(path, torch.float32, join(store, 0, 2))
    assert process.wait(60) == 0
    assert worst_difference(together, alone(path)) < 1e-5


def test_a_killed_rank_ends_the_step_of_the_others(second_rank: Any) -> None:
    process, store = second_rank
    first = join(store, 0, 2)  # when this returns, the other one loads or waits for the first sum
    process.kill()
    process.wait()
    for _ in range(2):
        with pytest.raises(DriverError, match="rank 0 of 2 has lost another rank") as raised:
            first.sum(torch.zeros(4))
        assert raised.value.sticky


@pytest.mark.slow
def test_two_hosts(namespaces: tuple[str, str], checkpoint: Saved, tmp_path: Path) -> None:
    path, results = checkpoint("llama-gqa-llama3"), tmp_path / "logits"
    ranks = [
        start_rank(path, "10.77.0.1:29400", rank, f"10.77.0.{rank + 1}", str(results),
                   "ip", "netns", "exec", name)
        for rank, name in enumerate(namespaces)
    ]  # fmt: skip
    try:
        assert [rank.wait(90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = load_file(results)
    together = [found[str(number)] for number in range(len(found))]
    assert worst_difference(together, alone(path)) < 1e-5


def test_each_tensor_is_divided_or_whole(checkpoint: Saved) -> None:
    path = checkpoint("llama-mha-tied")
    model = load_model(path, torch.float32)
    network = model.config.network
    norms = 4 * network.hidden_size * (2 * network.num_layers + 1)
    assert sum(parameter_bytes(path, 4)) == model.parameter_bytes + 3 * norms


@pytest.mark.parametrize("count", [4, 54, 101, 2880])
def test_shares_are_all_outputs(count: int) -> None:
    ends = [0]
    for rank in range(4):
        part = share(count, rank, 4)
        assert part.start == ends[-1]
        assert part.stop > part.start
        ends.append(part.stop)
    assert ends[-1] == count
    if count >= 64:
        assert all(end % 16 == 0 for end in ends[:-1])


def test_a_fused_matrix_gives_ranges() -> None:
    rows = torch.arange(12)[:, None]
    part = Part(0, (slice(2, 4), slice(8, 9)))
    assert torch.cat(part.of(rows)).flatten().tolist() == [2, 3, 8]


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama-gqa-llama3", 3, "are divided among 1, 2, 4 ranks, not 3"),
        ("deepseek-v2", 2, "layers of latents"),
        ("qwen3-next", 2, "delta layers"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    name: str, size: int, reason: str, checkpoint: Saved
) -> None:
    network = load_model(checkpoint(name), torch.float32).config.network
    with pytest.raises(UnsupportedError, match=reason):
        Shard(network, 0, size)
