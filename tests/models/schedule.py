"""A few sequences in uneven chunks beside each other, and how far two sets of logits are apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.attention.views import dense_view
from tests.models.checkpoints import VOCAB
from vmserve import _core
from vmserve.attention import create_backend
from vmserve.attention.base import RaggedBatch
from vmserve.attention.cpu import tensor_tuple
from vmserve.attention.states import StepStates
from vmserve.memory.views import ContiguousView, HostView, StatePages
from vmserve.models import LoadedModel
from vmserve.models.decoder_config import DecoderConfig, DeltaConfig
from vmserve.models.native import NativeDecoder
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple
from vmserve.numbers.torch_dtypes import as_torch

#: Per step, the tokens of each sequence that are computed: prompts in uneven chunks, decodes
#: beside them, sequences that start late or pause.
SCHEDULE = [
    (11, 1, 0, 0),
    (7, 1, 5, 0),
    (1, 13, 5, 0),
    (1, 1, 0, 1),
    (1, 1, 1, 1),
    (0, 9, 1, 1),
    (23, 1, 1, 1),
]
#: The batch must not rely on slots being in order.
SLOTS = (2, 0, 4, 1)
LENGTHS = [sum(step[i] for step in SCHEDULE) for i in range(len(SLOTS))]


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def view_for(
    model: LoadedModel, max_len: int, kv_heads: int | None = None
) -> ContiguousView | HostView:
    config = model.config
    view = dense_view(
        config.num_layers,
        max(SLOTS) + 1,
        max_len,
        kv_heads or config.kv_heads,
        config.head_dim,
        as_torch(model.dtype),
    )
    network = config.network
    if not isinstance(network, DecoderConfig):
        return view
    if network.latent is not None:
        return ContiguousView(view.keys, view.keys)
    if network.delta is None:
        return view
    return _with_states(view, network.delta, native=isinstance(model.network, NativeDecoder))


def _with_states(
    view: ContiguousView, delta: DeltaConfig, *, native: bool
) -> ContiguousView | HostView:
    """Every number in the states is NaN at first; pages are in another order than slots."""
    slots = view.keys[0].shape[0]
    floats = len(delta.layers) * delta.state_floats
    pages = np.full((slots + 1, floats + 16), np.nan, np.float32)
    table = np.random.default_rng(0).permutation(slots).astype(np.int32)[:, None] + 1
    if not native:
        return replace(view, states=StatePages(torch.from_numpy(pages), table))
    keys, values = (list(map(tensor_tuple, each)) for each in (view.keys, view.values))
    core = _core.CpuKvView(keys, values)
    core.set_states(array_tuple(pages[:, :floats], DType.FLOAT32), table)
    return HostView(core, (view, pages, table))


def run_schedule(
    model: LoadedModel,
    prompts: list[list[int]],
    backend_name: str | None = None,
    kv_heads: int | None = None,
    rank: int = 0,
) -> list[torch.Tensor]:
    """Per prompt ``[tokens, vocab]``, gathered over the steps of ``SCHEDULE``.

    ``kv_heads``: of a rank, where the model is divided; no rank but the first has logits.
    """
    view = view_for(model, max(LENGTHS), kv_heads)
    backend = create_backend(backend_name or "sdpa")
    done = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in SCHEDULE:
        active = [i for i, count in enumerate(step) if count]
        batch = RaggedBatch.build(
            [SLOTS[i] for i in active], [done[i] for i in active], [step[i] for i in active]
        )
        tokens = [t for i in active for t in prompts[i][done[i] : done[i] + step[i]]]
        states = {}
        if view.states is not None:
            states = {"states": StepStates.of(view.states, [batch])}
        logits = model.network.forward(
            torch.tensor(tokens),
            torch.from_numpy(batch.positions),
            backend.bind(view, batch),
            **states,
        )
        assert logits.shape == (0 if rank else batch.num_tokens, VOCAB)
        assert logits.dtype == torch.float32
        if rank:
            logits = logits.new_zeros(batch.num_tokens, VOCAB)
        for i, part in zip(active, torch.split(logits, [step[i] for i in active]), strict=True):
            rows[i].append(part)
            done[i] += step[i]
    assert done == LENGTHS
    return [torch.cat(parts) for parts in rows]


def worst_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Largest absolute difference, as a share of the largest logit."""
    scale = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / scale


def mean_square(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return (torch.cat(ours) - torch.cat(theirs)).square().mean().item()
