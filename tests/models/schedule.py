"""A few sequences in uneven chunks beside each other, and how far two sets of logits are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.attention.views import dense_view
from tests.models.checkpoints import CONTEXT, VOCAB, reference_model
from vmserve import _core
from vmserve.attention import create_backend
from vmserve.attention.base import RaggedBatch
from vmserve.attention.cpu import CpuBackend, tensor_tuple
from vmserve.attention.states import StepStates
from vmserve.memory.views import ContiguousView, HostView, StatePages
from vmserve.models import LoadedModel
from vmserve.models.decoder_config import DecoderConfig, DeltaConfig
from vmserve.models.hidden import HiddenRows
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


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = random_prompts(LENGTHS)


def transformers_logits(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    prompts: list[list[int]] = PROMPTS,
    compute_float32: bool = False,
) -> list[torch.Tensor]:
    """Per prompt ``[tokens, vocab]`` in float32, each prompt in one full forward pass.

    ``compute_float32``: with the weights rounded to ``dtype``, but nothing else.
    """
    model = reference_model(directory, dtype)
    if compute_float32:
        model = model.float()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


def view_for(
    model: LoadedModel, max_len: int = CONTEXT, kv_heads: int | None = None
) -> ContiguousView | HostView:
    config = model.config
    heads = kv_heads or config.kv_heads
    view = dense_view(
        config.num_layers, max(SLOTS) + 1, max_len, heads, config.head_dim, as_torch(model.dtype)
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


def parts_of(call: Any) -> Any:
    """What the runner hands the native decoder: the calls of the parts of a batch, here of one."""
    return SimpleNamespace(parts=[SimpleNamespace(call=call, seconds=0.0)])


def compute(
    network: Any,
    view: Any,
    tokens: Sequence[Sequence[int]],
    *,
    past: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    rows: list[int] | None = None,
    hidden: HiddenRows | None = None,
    backend: str = "sdpa",
) -> torch.Tensor:
    """Logits of one step of either decoder: ``tokens`` of the sequences in ``slots``, behind the
    ``past`` that is cached; of all rows or of those asked for."""
    slots = list(range(len(tokens)) if slots is None else slots)
    batch = RaggedBatch.build(slots, list(past or [0] * len(slots)), list(map(len, tokens)))
    flat = np.array([token for each in tokens for token in each])
    if isinstance(network, NativeDecoder):
        wanted = None if rows is None else np.array(rows, np.int64)
        parts = parts_of(CpuBackend().bind(view, batch))
        nowhere = np.zeros(len(flat), np.int64)  # the batch has the positions
        logits = network.forward(flat, nowhere, parts, wanted, hidden)
        assert parts.parts[0].seconds > 0
        return torch.from_numpy(logits)
    states = {} if view.states is None else {"states": StepStates.of(view.states, [batch])}
    return network.forward(
        torch.from_numpy(flat),
        torch.from_numpy(batch.positions),
        create_backend(backend).bind(view, batch),
        None if rows is None else torch.tensor(rows, dtype=torch.int64),
        **states,
    )


def every_row(model: LoadedModel, *prompts: Sequence[int], **options: Any) -> torch.Tensor:
    """Logits of whole prompts in one step."""
    return compute(model.network, view_for(model), prompts, **options)


def run_schedule(
    model: LoadedModel,
    prompts: list[list[int]] = PROMPTS,
    backend: str = "sdpa",
    kv_heads: int | None = None,
    rank: int = 0,
) -> list[torch.Tensor]:
    """Per prompt ``[tokens, vocab]``, gathered over the steps of ``SCHEDULE``.

    ``kv_heads``: of a rank, where the model is divided; no rank but the first has logits.
    """
    view = view_for(model, max(LENGTHS), kv_heads)
    done = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in SCHEDULE:
        active = [i for i, count in enumerate(step) if count]
        counts = [step[i] for i in active]
        logits = compute(
            model.network,
            view,
            [prompts[i][done[i] : done[i] + step[i]] for i in active],
            past=[done[i] for i in active],
            slots=[SLOTS[i] for i in active],
            backend=backend,
        )
        assert logits.shape == (0 if rank else sum(counts), VOCAB)
        assert logits.dtype == torch.float32
        if rank:
            logits = logits.new_zeros(sum(counts), VOCAB)
        for i, part in zip(active, torch.split(logits, counts), strict=True):
            rows[i].append(part)
            done[i] += step[i]
    assert done == LENGTHS
    return [torch.cat(parts) for parts in rows]


def worst_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest absolute difference, as a share of the largest logit."""
    scale = max(t.abs().max().item() for t in theirs)
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) / scale


def mean_square(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return (torch.cat([*ours]) - torch.cat([*theirs])).square().mean().item()
