"""Models: a Hugging Face directory in, a forward pass over a ragged batch out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vmserve.attention.base import AttentionCall
from vmserve.hub import resolve_model
from vmserve.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.dtype import DTYPES, resolve_dtype
from vmserve.models.loader import Progress, load_tensors
from vmserve.models.native import NativeDecoder, choose_native, load_native
from vmserve.models.weights import assemble, canonical_name, is_ignorable, tensor_shapes

if TYPE_CHECKING:
    from vmserve.models.foreign import ForeignModel

__all__ = [
    "DTYPES",
    "SUPPORTED_ARCHITECTURES",
    "LoadedModel",
    "ModelConfig",
    "choose_native",
    "load_model",
    "resolve_dtype",
    "resolve_model",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run; it holds no state between two calls.

    What its layers ask of attention is in ``config.attention``: a backend must offer it.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    #: Bytes of all weights in ``dtype``, tied ones once.
    parameter_bytes: int
    network: Decoder | NativeDecoder | ForeignModel

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionCall,
        logits_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]`` in float32 of one ragged batch; see :class:`Decoder`."""
        return self.network.forward(token_ids, positions, attention, logits_rows)


def load_model(
    path: str | Path,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    config: ModelConfig | None = None,
    max_model_len: int | None = None,
    native: bool = False,
    quantized: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the weights of a model directory.

    ``dtype`` is the type to compute in, as it comes out of :func:`resolve_dtype`.
    ``config`` is what :meth:`ModelConfig.from_directory` read there, if the caller has it.
    ``max_model_len`` is the longest sequence that will be asked for (default: the model's
    own context); it selects the factors of longrope models and nothing else.
    ``native``: as a :class:`NativeDecoder`, for which :func:`vmserve.models.native.refusal` must
    have no objection; ``quantized``: that one's linear layers in int8.
    ``progress(phase, done_bytes, total_bytes)`` is called as tensors arrive.

    Raises :class:`~vmserve.errors.ConfigurationError` naming what is wrong with the files.
    """
    directory, where = Path(path), torch.device(device)
    if config is None:
        config = ModelConfig.from_directory(directory)
    network: Decoder | NativeDecoder | ForeignModel
    if isinstance(config.network, DecoderConfig):
        max_len = max_model_len or config.max_position_embeddings
        if native:
            network = load_native(
                directory, config.network, dtype, max_len, quantized=quantized, progress=progress
            )
            return LoadedModel(config, dtype, where, network.weight_bytes, network)
        network, parameter_bytes = _load_decoder(
            directory, config.network, dtype, where, max_len, progress
        )
    else:
        # Only now: transformers takes seconds to import.
        from vmserve.models.foreign import load_foreign  # noqa: PLC0415

        network, parameter_bytes = load_foreign(directory, config.network, dtype, where, progress)
    return LoadedModel(config, dtype, where, parameter_bytes, network)


def _load_decoder(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Progress | None,
) -> tuple[Decoder, int]:
    shapes = tensor_shapes(config)
    tensors = load_tensors(
        directory,
        shapes,
        dtype,
        device,
        ignore=lambda name: is_ignorable(config, name),
        rename=lambda name: canonical_name(config, shapes, name),
        progress=progress,
    )
    decoder = Decoder(config, assemble(config, tensors), max_len)
    return decoder, sum(tensor.nbytes for tensor in tensors.values())
