"""The metadata of one architecture in a GGUF file, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.gguf.architectures import Architecture
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import GgufModel, shown
from vmserve.numbers.dtypes import DType

__all__ = ["LONG_FACTORS", "PLAIN", "ROPE_FACTORS", "Metadata", "read_factors"]

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
#: Numpy's types of plain numbers; numpy has no bfloat16, so its bits are read.
PLAIN = {
    "F32": (DType.FLOAT32, np.float32),
    "F16": (DType.FLOAT16, np.float16),
    "BF16": (DType.BFLOAT16, np.uint16),
}
_MOST_POSITIONS = 1 << 31
_YARN = "rope.scaling.yarn_log_multiplier"


class Metadata:
    """Keys are those below the architecture's name.

    Methods raise :class:`~vmserve.errors.ConfigurationError` for values that are missing or wrong,
    :class:`~vmserve.errors.UnsupportedError` for those that are not offered.
    """

    def __init__(self, model: GgufModel, name: str, architecture: Architecture) -> None:
        self.model = model
        self.file = model.metadata
        self.name = name
        self._architecture = architecture
        for key in (
            "expert_shared_count",
            "expert_gating_func",
            "expert_weights_scale",
            "rope.dimension_sections",
            "attention.causal",
        ):
            if key in self and key not in architecture.reads and self.scalar(key) not in (0, True):
                raise self.unsupported(key)

    def __contains__(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.file

    def scalar(self, key: str) -> object:
        """None if it is a list."""
        value = self.file.metadata[f"{self.name}.{key}"]
        return None if isinstance(value, np.ndarray) else value

    def unsupported(self, key: str) -> UnsupportedError:
        value = self.file.metadata[f"{self.name}.{key}"]
        said = shown(str(value)) if not isinstance(value, int | float) else f"{value}"
        return UnsupportedError(
            f"{self.file.path.name}: {self.name}.{key} = {said} is not supported"
        )

    def size(
        self, key: str, default: int | None = None, least: int = 1, limit: int = _MOST_POSITIONS
    ) -> int:
        name = f"{self.name}.{key}"
        if isinstance(self.file.metadata.get(name), np.ndarray):
            raise UnsupportedError(
                f"{self.file.path.name}: {name} is a list: layers that differ are not supported"
            )
        value = self.file.integer(name, default)
        if not least <= value < limit:
            raise ConfigurationError(
                f"{self.file.path.name}: {name} is {value:,}; it must be {least} or more, and "
                f"below {limit:,}"
            )
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self.file.number(f"{self.name}.{key}", default)
        if value <= 0 or value < least:
            allowed = f"{least:g} or more" if least else "above 0"
            raise ConfigurationError(
                f"{self.file.path.name}: {self.name}.{key} is {value}; it must be {allowed}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self.file.flag(f"{self.name}.{key}", default)

    def string(self, key: str, default: str) -> str:
        return self.file.string(f"{self.name}.{key}", default)

    def rope(self) -> dict[str, Any]:
        """``rope_parameters``: none, linear or YaRN."""
        parameters: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10_000.0, 2)}
        kind = self.string("rope.scaling.type", "none")
        if kind == "none" and "rope.scale_linear" in self:
            return {
                **parameters,
                "rope_type": "linear",
                "factor": self.number("rope.scale_linear", least=1),
            }
        if kind == "none":
            return parameters
        if kind not in ("linear", "yarn"):
            raise UnsupportedError(
                f"{self.file.path.name}: {self.name}.rope.scaling.type {shown(kind)} is not "
                "supported; supported: none, linear, yarn"
            )
        parameters |= {"rope_type": kind, "factor": self.number("rope.scaling.factor", least=1)}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = self.size(
                "rope.scaling.original_context_length"
            )
            for key in ("beta_fast", "beta_slow"):
                if f"rope.scaling.yarn_{key}" in self:
                    parameters[key] = self.number(f"rope.scaling.yarn_{key}")
            for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
                if f"rope.scaling.{key}" in self:
                    raise self.unsupported(f"rope.scaling.{key}")
            parameters |= self._sharpness()
        return parameters

    def _sharpness(self) -> dict[str, float]:
        """What YaRN multiplies DeepSeek's scores by: files have a tenth of it."""
        if _YARN not in self:
            return {}
        if _YARN not in self._architecture.reads:
            raise self.unsupported(_YARN)
        multiplier = round(self.number(_YARN) * 10, 6)
        return {"mscale": multiplier, "mscale_all_dim": multiplier}

    def factors(self, name: str) -> list[float]:
        """Factors of longrope, from a tensor."""
        if name not in self.model.tensors:
            raise ConfigurationError(
                f"{self.file.path.name} lacks tensor {name}: fetch the model again"
            )
        return [float(factor) for factor in read_factors(self.model, name)]


def read_factors(model: GgufModel, name: str) -> NDArray[np.float32]:
    file, tensor = model.tensors[name]
    factors = dequantize(tensor.type, file.raw(tensor)).reshape(-1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigurationError(
            f"{file.path.name}: tensor {name} has factors that are not above 0"
        )
    return factors
