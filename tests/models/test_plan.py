"""One plan of a decoder's tensors: both loaders read all of it, and ranks divide it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.models.checkpoints import FOREIGN, MODELS, NATIVE, Saved
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

ALL = [name for name in MODELS if name not in FOREIGN]


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


@pytest.mark.parametrize("name", ALL)
def test_torch_reads_every_tensor(name: str, checkpoint: Saved) -> None:
    network = network_of(checkpoint(name))
    plan = DecoderPlan.of(network)
    names = [name for name, _ in plan.tensors()]
    assert len(names) == len(set(names))
    for joined in (False, True):
        tensors = Tensors(plan)
        assemble(network, tensors, joined=joined)
        assert tensors.read.keys() == set(names)


@pytest.mark.parametrize("name", NATIVE)
def test_the_native_decoder_reads_every_tensor_in_one_turn(
    name: str, checkpoint: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's pages are dropped after it, so a tensor that a later turn reads is read twice."""
    turns: list[set[str]] = []

    class Watched(Source):
        def __exit__(self, *error: object) -> None:
            turns.append(set(self._used))
            super().__exit__(*error)

    monkeypatch.setattr(build, "Source", Watched)
    path = checkpoint(name)
    load_native(path, ModelConfig.from_directory(path), DType.FLOAT32, 64)
    plan = DecoderPlan.of(network_of(path))
    whole = {name for name, _ in plan.tensors()}
    table = {plan.embedding.name} if plan.head is not None else set()  # its rows are read later
    assert set().union(*turns) == whole - table
    experts = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, ExpertsPlan)]
    stacked = [each.stacked.tensors() for each in experts if each.stacked is not None]
    read = Counter(name for turn in turns for name in turn)
    twice = {name for name, count in read.items() if count > 1}
    assert twice == {name for tensors in stacked for name, _ in tensors}


@pytest.mark.parametrize("name", ALL)
def test_the_parts_of_ranks_are_the_whole(name: str, checkpoint: Saved) -> None:
    """And what a rank has are the tensors that its own configuration implies."""
    network = network_of(checkpoint(name))
    if (reason := refusal_of_ranks(network, 2)) is not None:
        with pytest.raises(UnsupportedError, match=reason):
            Shard(network, 0, 2)
        assert not MODELS[name].ranks
        return
    plan, shards = DecoderPlan.of(network), [Shard(network, rank, 2) for rank in range(2)]
    own = dict(DecoderPlan.of(shards[1].config).tensors())
    shapes = dict(plan.tensors())
    assert shards[0].parts.keys() <= shapes.keys()
    for tensor, shape in shapes.items():
        parts = [part for shard in shards if (part := shard.parts.get(tensor)) is not None]
        if not parts:
            assert own[tensor] == shape
            continue
        axis = parts[0].axis
        covered = Counter(
            row for part in parts for each in part.ranges for row in range(each.start, each.stop)
        )
        assert covered.keys() == set(range(shape[axis]))
        if network.kv_heads > 1 or ("k_proj" not in tensor and "v_proj" not in tensor):
            assert set(covered.values()) == {1}, tensor
        pieces = parts[-1].of(torch.empty(shape, device="meta"))
        found = list(shape)
        found[axis] = sum(piece.shape[axis] for piece in pieces)
        if tensor not in (plan.embedding.name, f"{network.names.head}.weight"):
            assert tuple(found) == own[tensor], tensor


def test_layers_with_experts_are_those_of_the_configuration(checkpoint: Saved) -> None:
    network = network_of(checkpoint("deepseek-v3"))
    assert network.experts is not None
    kinds = [type(layer.mlp) for layer in DecoderPlan.of(network).layers]
    assert set(kinds) == {MlpPlan, ExpertsPlan}
    with_experts = {layer for layer, kind in enumerate(kinds) if kind is ExpertsPlan}
    assert with_experts == network.experts.layers
