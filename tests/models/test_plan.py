"""One plan of a decoder's tensors: both loaders read all of it, and ranks divide it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import NATIVE, VARIANTS
from vmserve.errors import UnsupportedError
from vmserve.models import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.native import build, load_native
from vmserve.models.native.source import Source
from vmserve.models.plan import DecoderPlan, ExpertsPlan, MlpPlan
from vmserve.models.shard import Shard
from vmserve.models.slices import refusal_of_ranks
from vmserve.models.weights import assemble
from vmserve.numbers.dtypes import DType


def network_of(path: Path) -> DecoderConfig:
    network = ModelConfig.from_directory(path).network
    assert isinstance(network, DecoderConfig)
    return network


class Tensors(dict[str, torch.Tensor]):
    """Counts what is read."""

    def __init__(self, plan: DecoderPlan) -> None:
        super().__init__({name: torch.zeros(shape) for name, shape in plan.tensors()})
        self.read: Counter[str] = Counter()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read[name] += 1
        return super().__getitem__(name)

    def pop(self, name: str) -> torch.Tensor:  # type: ignore[override]
        self.read[name] += 1
        return super().pop(name)


@pytest.mark.parametrize("variant", [*VARIANTS, *NATIVE])
def test_torch_reads_every_tensor(variant: str, checkpoint: Callable[[str], Path]) -> None:
    network = network_of(checkpoint(variant))
    plan = DecoderPlan.of(network)
    names = [name for name, _ in plan.tensors()]
    assert len(names) == len(set(names))
    for joined in (False, True):
        tensors = Tensors(plan)
        assemble(network, tensors, joined=joined)
        assert tensors.read.keys() == set(names)


@pytest.mark.parametrize("variant", NATIVE)
def test_the_native_decoder_reads_every_tensor_in_one_turn(
    variant: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's pages are dropped after it, so a tensor that a later turn reads is read twice."""
    turns: list[set[str]] = []

    class Watched(Source):
        def __exit__(self, *error: object) -> None:
            turns.append(set(self._used))
            super().__exit__(*error)

    monkeypatch.setattr(build, "Source", Watched)
    path = checkpoint(variant)
    model = ModelConfig.from_directory(path)
    load_native(path, model, DType.FLOAT32, 64)
    network = network_of(path)
    plan = DecoderPlan.of(network)
    whole = {name for name, _ in plan.tensors()}
    table = {plan.embedding.name} if plan.head is not None else set()  # its rows are read later
    assert set().union(*turns) == whole - table
    stacked = {
        name
        for layer in plan.layers
        if isinstance(layer.mlp, ExpertsPlan) and layer.mlp.stacked is not None
        for name, _ in layer.mlp.stacked.tensors()
    }
    read = Counter(name for turn in turns for name in turn)
    assert {name for name, count in read.items() if count > 1} == stacked


@pytest.mark.parametrize("variant", [*VARIANTS, *NATIVE])
def test_the_parts_of_ranks_are_the_whole(variant: str, checkpoint: Callable[[str], Path]) -> None:
    network = network_of(checkpoint(variant))
    if (reason := refusal_of_ranks(network, 2)) is not None:
        with pytest.raises(UnsupportedError, match=reason):
            Shard(network, 0, 2)
        return
    plan, shards = DecoderPlan.of(network), [Shard(network, rank, 2) for rank in range(2)]
    shapes = dict(plan.tensors())
    assert shards[0].parts.keys() <= shapes.keys()
    for name, shape in shapes.items():
        covered = Counter[int]()
        for shard in shards:
            if (part := shard.parts.get(name)) is not None:
                for each in part.ranges:
                    covered.update(range(each.start, each.stop))
        if not covered:  # whole on each rank
            continue
        assert covered.keys() == set(range(shape[shards[0].parts[name].axis]))
        if network.kv_heads > 1 or ("k_proj" not in name and "v_proj" not in name):
            assert set(covered.values()) == {1}, name


def test_a_rank_has_the_tensors_that_its_own_configuration_implies(
    checkpoint: Callable[[str], Path],
) -> None:
    for variant in ("llama-gqa-llama3", "phi3", "qwen3-moe", "gpt-oss", "opt", "gpt2"):
        network = network_of(checkpoint(variant))
        shard = Shard(network, 1, 2)
        own = dict(DecoderPlan.of(shard.config).tensors())
        for name, shape in DecoderPlan.of(network).tensors():
            part = shard.parts.get(name)
            cut = torch.empty(shape, device="meta")
            pieces = [cut] if part is None else part.of(cut)
            axis = 0 if part is None else part.axis
            found = list(shape)
            found[axis] = sum(piece.shape[axis] for piece in pieces)
            if name not in (DecoderPlan.of(network).embedding.name, f"{network.names.head}.weight"):
                assert tuple(found) == own[name], (variant, name)


def test_layers_with_experts_are_those_of_the_configuration(
    checkpoint: Callable[[str], Path],
) -> None:
    network = network_of(checkpoint("deepseek-v3"))
    assert network.experts is not None
    kinds = [type(layer.mlp) for layer in DecoderPlan.of(network).layers]
    assert kinds == [
        ExpertsPlan if layer in network.experts.layers else MlpPlan
        for layer in range(network.num_layers)
    ]
    assert set(kinds) == {MlpPlan, ExpertsPlan}
