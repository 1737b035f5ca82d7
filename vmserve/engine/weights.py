"""How large a model's weights are in an engine, known before anything of them is read."""

from __future__ import annotations

from vmserve.config import EngineConfig, asked_itemsize
from vmserve.models.config import ModelConfig
from vmserve.models.footprint import weight_bytes
from vmserve.models.hub import resolve_model
from vmserve.models.loader import stored_bytes
from vmserve.models.native.choice import choose_native

__all__ = ["linear_backend", "model_weight_bytes"]


def linear_backend(
    config: EngineConfig, device_type: str = "cpu", *, wants_graphs: bool = False
) -> str:
    """Resolve "auto": torch, unless one native call can run the decoder on this device.

    The native decoder runs on a CPU, with our own attention kernels. Other kernels, other devices
    and captured layers need torch.
    """
    others = config.attention_backend not in ("auto", "cpu")
    if config.linear_backend == "auto" and (others or device_type != "cpu" or wants_graphs):
        return "torch"
    return config.linear_backend


def model_weight_bytes(config: EngineConfig) -> int | None:
    """Bytes of a model's weights on a CPU, in the form in which its engine will keep them.

    None for what has to be downloaded first. Raises
    :class:`~vmserve.errors.ConfigurationError` for a model that cannot be served.
    """
    path = resolve_model(config.model, download=False)
    if path is None:
        return None
    model = ModelConfig.from_directory(path)
    native = choose_native(linear_backend(config), config.quantization, config.dtype, model)
    return weight_bytes(
        model,
        asked_itemsize(config, model),
        stored_bytes=None if native is None else stored_bytes(path, model.native_only),
        quantization=config.quantization,
    )
