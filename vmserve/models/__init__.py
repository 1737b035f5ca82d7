"""Models: a Hugging Face directory in, a forward pass over a ragged batch out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vmserve.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from vmserve.models.dtype import DTYPES, asked_dtype
from vmserve.models.hub import resolve_model
from vmserve.models.loader import Progress
from vmserve.models.native import (
    NativeDecoder,
    RankGroup,
    choose_native,
    load_native,
    refusal,
)
from vmserve.numbers.dtypes import DType
from vmserve.options import rules

if TYPE_CHECKING:
    import torch

    from vmserve.models.collective import Collective
    from vmserve.models.decoder import Decoder
    from vmserve.models.foreign import ForeignModel

__all__ = [
    "DTYPES",
    "SUPPORTED_ARCHITECTURES",
    "LoadedModel",
    "ModelConfig",
    "asked_dtype",
    "choose_native",
    "load_model",
    "resolve_model",
]


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run; it holds no state between two calls.

    What its layers ask of attention is in ``config.attention``: a backend must offer it.
    """

    config: ModelConfig
    dtype: DType
    #: Bytes of all weights in ``dtype``; tied ones count once.
    parameter_bytes: int
    #: The network: it takes and gives arrays (the native decoder) or tensors (all others).
    network: Decoder | NativeDecoder | ForeignModel


def load_model(
    path: str | Path,
    dtype: str | torch.dtype,
    device: str = "cpu",
    *,
    config: ModelConfig | None = None,
    max_model_len: int | None = None,
    native: bool = False,
    quantization: str = "none",
    progress: Progress | None = None,
    ranks: Collective | None = None,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load the weights of a model directory or a GGUF file.

    ``dtype`` is the type to compute in; the native decoder's is that of its KV cache.
    ``device``: as torch names it, say "cuda:0".
    ``config`` is what :meth:`ModelConfig.from_directory` read there, if the caller has it.
    ``max_model_len`` is the longest sequence that will be asked for (default: the model's
    own context); it selects the factors of longrope models and nothing else.
    ``native``: as a :class:`NativeDecoder`, for which :func:`vmserve.models.native.refusal` must
    have no objection; ``quantization``: of that one's linear layers, as in ``EngineConfig``.
    ``group``: load what the rank computes of a native decoder; ``ranks``: where torch computes.
    ``kv_heads`` of
    :class:`~vmserve.models.slices.Slices` are in its KV cache.
    ``progress(phase, done_bytes, total_bytes)`` is called as tensors arrive.

    Raises :class:`~vmserve.errors.ConfigurationError` naming what is wrong with the files.
    """
    directory = Path(path)
    if config is None:
        config = ModelConfig.from_directory(directory)
    kind = DType.of(dtype)
    max_len = max_model_len or config.max_position_embeddings
    if native:
        network = load_native(
            directory,
            config,
            kind,
            max_len,
            quantization=quantization,
            progress=progress,
            group=group,
        )
        return LoadedModel(config, kind, network.weight_bytes, network)
    reason = refusal(config.network, kind) or "leave --linear-backend, --device and --dtype alone"
    rules.check(
        {
            "model_name": directory.name,
            "native_only": _native_kind(config),
            "torch_because": reason,
        }
    )
    # Only now: torch, and transformers too, take longer to import than a small model to load.
    from vmserve.models.torch_models import load_torch  # noqa: PLC0415

    computed, parameter_bytes = load_torch(
        directory, config, kind, device, max_len, progress, ranks
    )
    return LoadedModel(config, kind, parameter_bytes, computed)


def _native_kind(config: ModelConfig) -> str | None:
    """What models are called that the native decoder alone can run; None for others."""
    quantized = config.native_only
    if quantized is not None and not getattr(quantized, "expands", False):
        return quantized.kind
    return None
