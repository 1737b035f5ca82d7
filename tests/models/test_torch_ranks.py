"""Ranks that torch computes give the logits of one, but for the order of sums."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file

from tests.models.checkpoints import (
    VARIANTS,
    llama,
    reference_model,
    save,
    transformers_logits,
)
from tests.models.schedule import (
    LENGTHS,
    mean_square,
    random_prompts,
    run_schedule,
    worst_difference,
)
from tests.models.test_mxfp4 import write as write_mxfp4
from tests.models.torch_ranks import join, load_rank, run_rank, run_ranks
from tests.namespaces import namespaces
from vmserve.errors import DriverError, UnsupportedError
from vmserve.models import load_model, tensor_loader
from vmserve.models.blocks import Joined, StackedExperts
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.shard import Part, Shard, share
from vmserve.models.weights import DecoderWeights, assemble

__all__ = ["namespaces"]

ROOT = Path(__file__).parents[2]
#: Key-value heads fewer than ranks, tied heads, biases behind sums, one matrix of q, k and v and of
#: gate and up, windows and norms behind sums, experts, a shared one, sinks and experts in one
#: tensor, learned positions, a projection of the embedding, matrices ``[in, out]``.
SIZES = {
    "llama-gqa-llama3": (2, 4),
    "llama-mha-tied": (2, 4),
    "llama-mqa-biases": (2,),
    "qwen3-full": (2,),
    "phi3-window": (2,),
    "gemma3-linear": (2,),
    "mixtral": (2,),
    "qwen3-moe": (4,),
    "qwen2-moe": (2,),
    "gpt-oss": (2,),
    "opt-350m": (2,),
    "gpt2": (4,),
}


def assert_like_one(path: Path, sizes: tuple[int, ...]) -> None:
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(path, prompts, torch.float32)
    alone = run_schedule(load_model(path, torch.float32), prompts)
    for size in sizes:
        together = run_ranks(path, torch.float32, size)
        assert worst_difference(together, expected) < 1e-5
        assert worst_difference(together, alone) < 1e-5
        for ours, theirs in zip(together, alone, strict=True):
            assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("variant", SIZES)
def test_float32(variant: str, checkpoint: Callable[[str], Path]) -> None:
    assert_like_one(checkpoint(variant), SIZES[variant])


@pytest.mark.parametrize("variant", ["llama-gqa-llama3", "phi3-window", "mixtral", "qwen3-moe"])
def test_joined_products(
    variant: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    joined: list[DecoderWeights] = []

    def join(_: object, config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> DecoderWeights:
        joined.append(assemble(config, tensors, joined=True))
        return joined[-1]

    path = checkpoint(variant)
    expected = transformers_logits(path, random_prompts(LENGTHS), torch.float32)
    monkeypatch.setattr(tensor_loader, "assemble_on", join)
    assert worst_difference(run_ranks(path, torch.float32, 2), expected) < 1e-5
    [project] = {type(weights.layers[0].project.qkv) for weights in joined}
    assert project is Joined
    if variant in ("mixtral", "qwen3-moe"):
        assert {type(weights.layers[0].mlp) for weights in joined} == {StackedExperts}


def test_three_ranks(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    assert_like_one(save(llama(**heads, intermediate_size=83), tmp_path), (3,))


def test_experts_of_four_bits(tmp_path: Path) -> None:
    quantized, plain = write_mxfp4(tmp_path)
    expected = transformers_logits(plain, random_prompts(LENGTHS), torch.float32)
    assert worst_difference(run_ranks(quantized, torch.float32, 2), expected) < 1e-5


@pytest.mark.parametrize("variant", ["phi3-window", "gpt2"])
def test_slices_of_another_type(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are converted some rows at a time."""
    save(VARIANTS[variant], tmp_path)
    reference_model(tmp_path, torch.bfloat16).save_pretrained(tmp_path)
    expected = transformers_logits(tmp_path, random_prompts(LENGTHS), torch.float32)
    monkeypatch.setattr(tensor_loader, "_BLOCK_BYTES", 1000)
    assert worst_difference(run_ranks(tmp_path, torch.float32, 2), expected) < 1e-5


def test_bfloat16(checkpoint: Callable[[str], Path]) -> None:
    """Partial sums are rounded too: a few roundings more than those of one rank."""
    prompts = random_prompts(LENGTHS)
    path = checkpoint("llama-gqa-llama3")
    exact = transformers_logits(path, prompts, torch.bfloat16, compute_float32=True)
    alone = run_schedule(load_model(path, torch.bfloat16), prompts)
    for size in (2, 4):
        together = run_ranks(path, torch.bfloat16, size)
        assert worst_difference(together, alone) < 2**-4
        assert mean_square(together, exact) < 1.5 * mean_square(alone, exact)


def start_rank(
    path: str, meeting: str, rank: int, host: str, results: str, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.models.torch_ranks", path, meeting, str(rank), "2"]
    return subprocess.Popen([*prefix, *command, host, results], cwd=ROOT)


@pytest.fixture
def second_rank(checkpoint: Callable[[str], Path], tmp_path: Path) -> Any:
    """``second_rank()``: a process that is rank 1 of 2, and the store that it comes to."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], distributed.Store]:
        meeting = str(tmp_path / "meeting")
        path = str(checkpoint("llama-gqa-llama3"))
        process = start_rank(path, meeting, 1, "127.0.0.1", "")
        started.append(process)
        return process, distributed.FileStore(meeting, 2)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_processes(second_rank: Any, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama-gqa-llama3")
    process, store = second_rank()
    together = run_rank(path, torch.float32, store, 0, 2)
    assert process.wait(60) == 0
    alone = run_schedule(load_model(path, torch.float32), random_prompts(LENGTHS))
    assert worst_difference(together, alone) < 1e-5


def test_a_killed_rank_ends_the_step_of_the_others(second_rank: Any) -> None:
    process, store = second_rank()
    first = join(store, 0, 2)  # when this returns, the other one loads or waits for the first sum
    process.kill()
    process.wait()
    for _ in range(2):
        with pytest.raises(DriverError, match="rank 0 of 2 has lost another rank") as raised:
            first.sum(torch.zeros(4))
        assert raised.value.sticky


@pytest.mark.slow
def test_two_hosts(
    namespaces: tuple[str, str], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path, results = checkpoint("llama-gqa-llama3"), tmp_path / "logits"
    ranks = [
        start_rank(
            str(path), "10.77.0.1:29400", rank, f"10.77.0.{rank + 1}", str(results),
            ("ip", "netns", "exec", name),
        )
        for rank, name in enumerate(namespaces)
    ]  # fmt: skip
    try:
        assert [rank.wait(90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    alone = run_schedule(load_model(path, torch.float32), random_prompts(LENGTHS))
    together = load_file(results)
    together = [together[str(number)] for number in range(len(alone))]
    assert worst_difference(together, alone) < 1e-5


def test_each_tensor_is_divided_or_whole(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("llama-mha-tied")
    alone = load_model(path, torch.float32).parameter_bytes
    store = distributed.HashStore()
    with ThreadPoolExecutor(4) as pool:
        ranks = [pool.submit(load_rank, path, torch.float32, store, rank, 4) for rank in range(4)]
        sizes = [each.result(60).parameter_bytes for each in ranks]
    network = load_model(path, torch.float32).config.network
    assert isinstance(network, DecoderConfig)
    norms = 4 * network.hidden_size * (2 * network.num_layers + 1)
    assert sum(sizes) == alone + 3 * norms


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


def test_what_cannot_be_divided_is_refused(checkpoint: Callable[[str], Path]) -> None:
    for variant, reason in [
        ("llama-gqa-llama3", "are divided among 1, 2, 4 ranks, not 3"),
        ("deepseek-v2", "layers of latents"),
        ("qwen3-next", "delta layers"),
    ]:
        network = load_model(checkpoint(variant), torch.float32).config.network
        assert isinstance(network, DecoderConfig)
        with pytest.raises(UnsupportedError, match=reason):
            Shard(network, 0, 3 if variant.startswith("llama") else 2)
