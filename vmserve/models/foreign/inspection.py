"""Find out what a model of ``transformers`` asks of attention, by a run without weights.

The model is built on torch's "meta" device, where tensors have shapes only, and runs once with
an attention function that notes how it is called. So nothing is concluded from the fields of a
configuration, whose meaning differs from family to family.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from vmserve.attention.base import LayerAttention
from vmserve.errors import UnsupportedError
from vmserve.models.foreign.peak import PeakBytes

__all__ = ["MODEL_ERRORS", "ForeignConfig", "MaskRule", "reason"]

_INSPECT = "vmserve-inspect"
#: Tokens of the trial: what grows with them must outweigh one row of logits.
_NUM_TOKENS = 256
#: Rotary embeddings that depend on the longest position of a call: in a batch, that may be another
#: sequence's.
_ROPE_OF_THE_LONGEST = ("dynamic", "longrope")
#: Exceptions of code that meets a device or an attention function which it was not written for.
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
#: Arguments of attention functions that change nothing here, or are read below.
_UNDERSTOOD = frozenset(
    ("cache_position", "dropout", "is_causal", "layer_idx", "output_attentions",
     "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings",
     "position_ids", "return_dict", "scaling", "sliding_window", "softcap", "use_cache")
)  # fmt: skip


@dataclass(frozen=True)
class MaskRule:
    """A mask as its function and window, instead of its values."""

    visible: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    window: int | None


@dataclass
class _Call:
    module: torch.nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    mask: Any
    arguments: Mapping[str, Any]


@dataclass
class _Notes:
    """The record of attention calls, passed to the model as a keyword argument."""

    calls: list[_Call] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ForeignConfig:
    """A model of ``transformers`` that can be served; see :class:`~vmserve.models.ModelConfig`."""

    architecture: str
    hf: PreTrainedConfig
    vocab_size: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerAttention, ...]
    num_weights: int
    activation_width: int

    @classmethod
    def inspect(cls, architecture: str, hf: PreTrainedConfig) -> ForeignConfig:
        """Build the model without weights and look at how it calls attention.

        Raises :class:`~vmserve.errors.UnsupportedError`, naming the model and the reason,
        for whatever could not be served exactly.
        """
        try:
            text = hf.get_text_config()
            if hf.is_encoder_decoder:
                raise UnsupportedError("it has an encoder")
            context = _context(text)
            _check_rope(text)
            notes, num_weights, peak_bytes = _run(hf, text.vocab_size)
            layers = _layers(notes.calls, int(text.num_hidden_layers), context)
        except UnsupportedError as error:
            raise UnsupportedError(f"{architecture} cannot be served: {error}") from error
        except MODEL_ERRORS as error:
            raise UnsupportedError(
                f"{architecture} cannot be served: its implementation in transformers does not "
                f"run through the attention interface ({reason(error)})"
            ) from error
        _, kv_heads, _, head_dim = notes.calls[0].k
        return cls(
            architecture=architecture,
            hf=hf,
            vocab_size=text.vocab_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            layers=layers,
            num_weights=num_weights,
            # It ran in 2 bytes per element; what it keeps in float32 counts twice.
            activation_width=-(-peak_bytes // (2 * _NUM_TOKENS)),
        )


def reason(error: BaseException) -> str:
    """Format an error's class and message in one line of at most 300 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)


def _context(text: PreTrainedConfig) -> int:
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise UnsupportedError(
            f"its max_position_embeddings is {context!r}: how long may a sequence be?"
        )
    return context


def _check_rope(text: PreTrainedConfig) -> None:
    parameters = getattr(text, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):  # of all layers, or by type of layer
        rope_type = entry.get("rope_type") if isinstance(entry, dict) else None
        if rope_type in _ROPE_OF_THE_LONGEST:
            raise UnsupportedError(
                f"its rotary embedding ({rope_type}) depends on the longest sequence of a batch"
            )


def _run(hf: PreTrainedConfig, vocab_size: int) -> tuple[_Notes, int, int]:
    """Run; return the attention calls, the number of weights and the peak bytes of activations."""
    AttentionInterface.register(_INSPECT, _note)
    AttentionMaskInterface.register(_INSPECT, _mask_rule)
    notes, peak = _Notes(), PeakBytes()
    hf = copy.deepcopy(hf)  # transformers writes the type and the attention into it
    with torch.device("meta"), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(
            hf, dtype=torch.bfloat16, attn_implementation=_INSPECT, trust_remote_code=False
        ).eval()
        tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
        with peak:
            output = model(
                input_ids=tokens,
                position_ids=torch.arange(_NUM_TOKENS).unsqueeze(0),
                attention_mask=torch.ones_like(tokens),
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.int64),
                vmserve_attention=notes,
            )
    if output.logits.shape != (1, 1, vocab_size):
        raise UnsupportedError(
            f"one row of logits was asked for, and a tensor of shape {list(output.logits.shape)} "
            f"came for a vocabulary of {vocab_size}"
        )
    return notes, sum(parameter.numel() for parameter in model.parameters()), peak.num_bytes


def _note(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    vmserve_attention: _Notes | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    if vmserve_attention is None:
        raise UnsupportedError(
            f"{type(module).__name__} does not receive the keyword arguments of the model's forward"
        )
    vmserve_attention.calls.append(
        _Call(module, query.shape, key.shape, value.shape, attention_mask, arguments)
    )
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


def _mask_rule(
    mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: Any
) -> MaskRule:
    return MaskRule(mask_function, local_size)


def _layers(calls: list[_Call], num_layers: int, context: int) -> tuple[LayerAttention, ...]:
    indices = [getattr(call.module, "layer_idx", None) for call in calls]
    if indices != list(range(num_layers)):
        raise UnsupportedError(
            f"its {num_layers} layers call attention {len(calls)} times: each must once, in order "
            "(cross-attention and recurrent layers have a state for which there is no place)"
        )
    layers = tuple(_layer(index, call, context) for index, call in enumerate(calls))
    shapes = sorted({(call.q[1], call.k[1], call.k[3]) for call in calls})
    if len(shapes) > 1:
        listed = ", ".join(f"{q} / {kv} heads of {dim}" for q, kv, dim in shapes)
        raise UnsupportedError(f"its layers differ in their heads ({listed})")
    return layers


def _layer(index: int, call: _Call, context: int) -> LayerAttention:
    arguments = call.arguments
    if call.k[2] != call.q[2]:
        raise UnsupportedError(f"layer {index} attends {call.k[2]} keys from {call.q[2]} tokens")
    if call.k != call.v or call.q[3] != call.k[3]:
        raise UnsupportedError(
            f"layer {index} has queries of {call.q[3]}, keys of {call.k[3]} and values of "
            f"{call.v[3]} elements per head, with {call.k[1]} and {call.v[1]} heads"
        )
    if False in (arguments.get("is_causal"), getattr(call.module, "is_causal", None)):
        raise UnsupportedError(f"attention in layer {index} is not causal")
    others = [
        name
        for name, value in sorted(arguments.items())
        if name not in _UNDERSTOOD and value is not None
    ]
    if others:
        raise UnsupportedError(f"attention in layer {index} takes {', '.join(others)}")
    scale = arguments.get("scaling")
    scale = call.q[3] ** -0.5 if scale is None else scale
    softcap = arguments.get("softcap")
    if not isinstance(scale, float | int) or not isinstance(softcap, float | int | None):
        raise UnsupportedError(f"the scale or the softcap in layer {index} is no number")
    return LayerAttention(
        index, float(scale), _window(index, call.mask, context), float(softcap) if softcap else None
    )


def _window(index: int, mask: Any, context: int) -> int | None:
    """The window of a layer; refuses a mask that is not causal with at most a window.

    The rule is evaluated where windows, chunks and blocks of any size would differ.
    """
    if not isinstance(mask, MaskRule):
        raise UnsupportedError(f"layer {index} makes a mask of its own")
    window = mask.window
    if window is not None and window < 1:
        raise UnsupportedError(f"layer {index} has a window of {window} positions")
    near = {0, 1, 2, 3, context - 2, context - 1}
    near |= {2**power + offset for power in range(2, 31) for offset in (-1, 0, 1)}
    if window is not None:
        ends = (window, 2 * window, context - window)
        near |= {end + offset for end in ends for offset in (-1, 0, 1)}
    positions = torch.tensor(sorted(p for p in near if 0 <= p < context))
    query, key = positions.unsqueeze(1), positions.unsqueeze(0)
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    first = torch.tensor(0)
    try:
        is_plain = torch.equal(mask.visible(first, first, query, key).expand_as(expected), expected)
    except MODEL_ERRORS:  # it looks at more than positions, of which there is nothing here
        is_plain = False
    if not is_plain:
        raise UnsupportedError(
            f"the mask of layer {index} is not causal attention with at most a window"
        )
    return window if window is not None and window < context else None
