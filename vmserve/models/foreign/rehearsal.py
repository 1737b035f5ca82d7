"""Compare our attention with the model's own on two short sequences in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.attention.rotary import Rotary
from vmserve.errors import UnsupportedError
from vmserve.models.foreign.inspection import MODEL_ERRORS, ForeignConfig, reason

__all__ = ["rehearse"]

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionCall], torch.Tensor]

#: Tokens of each sequence that each step computes. No chunk aligns with the other sequence's rows,
#: so a model which mixes rows outside attention is found out.
_STEPS = ((7, 0), (4, 5), (1, 6), (3, 1))
_LENGTHS = tuple(sum(step[i] for step in _STEPS) for i in range(2))
#: Tolerance as a part of the largest logit. The arithmetic of attention is repeated as it is. Only
#: the shapes of matrix products differ, hence the order of their sums.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2**-4, torch.float16: 2**-6}
#: Share of rows that may be further apart in half precision, where rounding can choose another
#: expert. Faults with chunks or with the other sequence show in more rows.
_SHARE_OF_OUTLIERS = 0.25


@torch.inference_mode()
def rehearse(config: ForeignConfig, model: PreTrainedModel, forward: Forward, name: str) -> None:
    """Raises :class:`~vmserve.errors.UnsupportedError` where the two disagree.

    ``forward`` runs ``model`` with the attention implementation ``name``.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator) for n in _LENGTHS]
    prompts = [prompt.to(model.device) for prompt in prompts]
    try:
        ours = _in_chunks(prompts, forward, model.dtype)
        model.set_attn_implementation("eager")
        theirs = [_by_itself(model, prompt) for prompt in prompts]
        model.set_attn_implementation(name)
    except UnsupportedError:
        raise
    except MODEL_ERRORS as error:
        raise UnsupportedError(f"a rehearsal in chunks failed ({reason(error)})") from error
    _compare(torch.cat(ours), torch.cat(theirs), model.dtype)


def _compare(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    apart = (ours - theirs).abs().amax(-1) / theirs.abs().max()
    allowed = _TOLERANCE[dtype]
    outliers = int((~(apart <= allowed)).sum())  # NaN is apart, too
    if outliers > (0 if dtype == torch.float32 else _SHARE_OF_OUTLIERS * len(apart)):
        raise UnsupportedError(
            f"computed in chunks beside another sequence, {outliers} of {len(apart)} rows of "
            f"logits differ by up to {apart.max():.2%} from those of its own attention "
            f"({allowed:.2%} is rounding)"
        )


def _in_chunks(
    prompts: list[torch.Tensor], forward: Forward, dtype: torch.dtype
) -> list[torch.Tensor]:
    memory, done = _Memory(dtype), [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in _STEPS:
        spans = [range(past, past + new) for past, new in zip(done, step, strict=True)]
        tokens = [
            prompt[span.start : span.stop] for prompt, span in zip(prompts, spans, strict=True)
        ]
        positions = [torch.arange(span.start, span.stop, device=tokens[0].device) for span in spans]
        rows = forward(torch.cat(tokens), torch.cat(positions), memory.bind(spans))
        for parts, part in zip(logits, torch.split(rows, list(step)), strict=True):
            parts.append(part)
        done = [span.stop for span in spans]
    return [torch.cat(parts) for parts in logits]


def _by_itself(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """``[tokens, vocab]`` as ``generate`` would see them: a prefill, then a step with the cache."""
    prefill = model(input_ids=prompt[None, :-1], use_cache=True)
    step = model(
        input_ids=prompt[None, -1:], use_cache=True, past_key_values=prefill.past_key_values
    )
    logits: torch.Tensor = torch.cat((prefill.logits, step.logits), dim=1)
    return logits.squeeze(0).to(torch.float32)


class _Memory:
    """Keys and values of all sequences as plain tensors, by layer and sequence."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._keys: dict[tuple[int, int], torch.Tensor] = {}
        self._values: dict[tuple[int, int], torch.Tensor] = {}

    def bind(self, spans: list[range]) -> AttentionCall:
        """``spans``: the positions of each sequence's new tokens."""
        sizes = [len(span) for span in spans]

        def attend(
            spec: LayerAttention,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            rotary: Rotary | None = None,
        ) -> torch.Tensor:
            if not q.dtype == k.dtype == v.dtype == self._dtype:
                raise UnsupportedError(
                    f"layer {spec.layer} has queries, keys and values of types {q.dtype}, "
                    f"{k.dtype} and {v.dtype}: all must have that of the weights, {self._dtype}"
                )
            parts = zip(*(torch.split(x, sizes) for x in (q, k, v)), strict=True)
            outputs = []
            for sequence, (queries, keys, values) in enumerate(parts):
                place = (spec.layer, sequence)
                if place in self._keys:
                    keys = torch.cat((self._keys[place], keys))
                    values = torch.cat((self._values[place], values))
                self._keys[place], self._values[place] = keys, values
                outputs.append(_attention(spec, queries, keys, values))
            return torch.cat(outputs)

        return attend


def _attention(
    spec: LayerAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Causal attention of the last rows, rounded as ``eager`` attention rounds."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    key = torch.arange(k.shape[1], device=q.device)
    query = key[k.shape[1] - q.shape[0] :].unsqueeze(1)
    hidden = key > query
    if spec.window is not None:
        hidden |= key <= query - spec.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=torch.float32)
    return (weights.to(v.dtype) @ v).transpose(0, 1)
