"""A model of ``transformers`` over a ragged batch, with attention from our KV memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from vmserve.attention.base import AttentionCall, LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.foreign.inspection import MODEL_ERRORS, ForeignConfig, reason
from vmserve.models.foreign.rehearsal import rehearse
from vmserve.models.hidden import HiddenRows
from vmserve.models.loader import Progress, listed, weight_files
from vmserve.models.safetensors_file import SafetensorsFile

__all__ = ["ForeignModel", "load_foreign"]

_SERVE = "vmserve"


@dataclass(frozen=True, slots=True)
class _StepAttention:
    """A step's attention, passed through the model as a keyword argument."""

    call: AttentionCall
    layers: tuple[LayerAttention, ...]


class ForeignModel:
    """A model that sees all new tokens of a step as one row; only attention knows the sequences."""

    def __init__(self, config: ForeignConfig, model: PreTrainedModel) -> None:
        self._layers = config.layers
        self._model = model

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        logits_rows: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
    ) -> torch.Tensor:
        """See :meth:`vmserve.models.decoder.Decoder.forward`."""
        assert hidden is None, "requests for embeddings were refused"
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if logits_rows is None else logits_rows,
            vmserve_attention=_StepAttention(attention, self._layers),
        )
        logits: torch.Tensor = output.logits
        return logits.squeeze(0).to(torch.float32)


def load_foreign(
    directory: Path,
    config: ForeignConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[ForeignModel, int]:
    """The model and the bytes of its weights.

    ``transformers`` reads the files (``progress`` is called when it is done); then the model
    is rehearsed against itself with its own attention
    (:func:`~vmserve.models.foreign.rehearsal.rehearse`).

    Raises :class:`~vmserve.errors.ConfigurationError` for missing or damaged files, and
    :class:`~vmserve.errors.UnsupportedError` if the rehearsal shows other logits.
    """
    for path in weight_files(directory):
        SafetensorsFile(path)  # says so if it is damaged
    AttentionInterface.register(_SERVE, _attend)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=copy.deepcopy(config.hf),
            dtype=dtype,
            attn_implementation=_SERVE,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, *MODEL_ERRORS) as error:
        raise ConfigurationError(
            f"transformers cannot load the weights of {config.architecture} ({reason(error)}): "
            "fetch the model again"
        ) from error
    _check_complete(info)
    model = model.to(device).eval().requires_grad_(False)
    foreign = ForeignModel(config, model)
    try:
        rehearse(config, model, foreign.forward, _SERVE)
    except UnsupportedError as error:
        raise UnsupportedError(f"{config.architecture} cannot be served: {error}") from error
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if progress is not None:
        progress("loading weights", parameter_bytes, parameter_bytes)
    return foreign, parameter_bytes


def _check_complete(info: dict[str, Any]) -> None:
    """Refuse missing weights: ``transformers`` only warns and fills in random numbers."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigurationError(
            f"the checkpoint lacks {len(missing)} tensors that config.json implies: "
            f"{listed(missing)}; fetch the model again"
        )
    surplus = sorted(info["unexpected_keys"])
    if surplus:
        raise ConfigurationError(
            f"the checkpoint has {len(surplus)} tensors that config.json does not imply: "
            f"{listed(surplus)}; config.json and the weights do not belong together"
        )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,  # its rule is in the layer's spec
    vmserve_attention: _StepAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """``[1, heads, tokens, head_dim]``, already rotated, to ``[1, tokens, heads, head_dim]``."""
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    spec = vmserve_attention.layers[layer]
    return vmserve_attention.call(spec, q, k, v).unsqueeze(0), None
