"""``vmserve plan`` of several models: what each takes, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from vmserve.errors import ConfigurationError
from vmserve.memory.kind_pages import KindPages, held_bytes
from vmserve.memory.longest import LongestSequence
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["ModelNeed", "TogetherReport"]


@dataclass(frozen=True, kw_only=True)
class ModelNeed:
    """What one model takes. ``weight_bytes``: of its files; None for a shape without files.

    ``kinds``: its pages of KV; ``longest``: its longest request, as the engine counts it.
    """

    name: str
    weight_bytes: int | None
    kinds: tuple[KindPages, ...]
    longest: LongestSequence

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers, while no window has passed it."""
        return sum(kind.shape.num_layers * kind.shape.token_bytes for kind in self.kinds)

    @property
    def floor_bytes(self) -> int:
        """With less it cannot answer its longest request."""
        return self.longest.least_bytes()

    def to_dict(self, lengths: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self.name,
            "weight_bytes": self.weight_bytes,
            "token_bytes": self.token_bytes,
            "kinds": [
                {"kind": kind.shape.name, "floor_bytes": num_pages * kind.page_bytes}
                for kind, num_pages in self.longest.by_kind()
            ],
            "max_len": self.longest.max_len,
            "floor_bytes": self.floor_bytes,
            "requests": [
                {"num_tokens": length, "bytes": held_bytes(self.kinds, length)}
                for length in lengths
            ],
        }


@dataclass(frozen=True, kw_only=True)
class TogetherReport:
    """Models that share one pool; prints itself with rich.

    ``limit_bytes``: of the pool; ``free_bytes``: of the machine, ``whose`` (the system's, or the
    control group's).
    """

    models: tuple[ModelNeed, ...]
    lengths: tuple[int, ...]
    limit_bytes: int | None
    free_bytes: int
    whose: str

    @property
    def floor_bytes(self) -> int:
        return sum(model.floor_bytes for model in self.models)

    @property
    def weight_bytes(self) -> int | None:
        """None if some model is a shape."""
        known = [model.weight_bytes for model in self.models if model.weight_bytes is not None]
        return sum(known) if len(known) == len(self.models) else None

    @property
    def left_bytes(self) -> int | None:
        """Of the pool when every model has its floor: whoever is busy takes it."""
        return None if self.limit_bytes is None else self.limit_bytes - self.floor_bytes

    @property
    def machine_left_bytes(self) -> int | None:
        """Free memory besides all weights and the pool, or the floors without a limit."""
        if self.weight_bytes is None:
            return None
        return self.free_bytes - self.weight_bytes - (self.limit_bytes or self.floor_bytes)

    def require_room(self) -> None:
        """Raises :class:`~vmserve.errors.ConfigurationError`, with what each model needs, if the
        floors do not fit in the limit."""
        if self.left_bytes is None or self.left_bytes >= 0 or self.limit_bytes is None:
            return
        each = ", ".join(
            f"{format_size(model.floor_bytes)} for {model.longest.max_len:,} tokens of {model.name}"
            for model in self.models
        )
        raise ConfigurationError(
            f"the longest requests of these models need {each}; the KV cache has "
            f"{format_size(self.limit_bytes)}: raise --kv-cache-memory to "
            f"{format_size(self.floor_bytes)}, lower --max-model-len, or serve fewer models"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "models": [model.to_dict(self.lengths) for model in self.models],
            "limit_bytes": self.limit_bytes,
            "floor_bytes": self.floor_bytes,
            "left_bytes": self.left_bytes,
            "weight_bytes": self.weight_bytes,
            "free_bytes": self.free_bytes,
            "machine_left_bytes": self.machine_left_bytes,
        }

    def __rich__(self) -> RenderableType:
        table = Table(title="In one server, over one pool", caption=self._caption())
        table.add_column("model")
        for heading in ("weights", "a token", "longest request", "floor"):
            table.add_column(heading, justify="right")
        for length in self.lengths:
            table.add_column(f"{length:,} tokens", justify="right")
        for model in self.models:
            table.add_row(
                model.name,
                "" if model.weight_bytes is None else format_size(model.weight_bytes),
                format_size(model.token_bytes),
                f"{model.longest.max_len:,}",
                format_size(model.floor_bytes),
                *(format_size(held_bytes(model.kinds, length)) for length in self.lengths),
            )
        weights = self.weight_bytes
        total = ["all", "" if weights is None else format_size(weights), "", ""]
        table.add_row(*total, format_size(self.floor_bytes), style="bold")
        return table

    def _caption(self) -> str:
        lines = [
            "weights: of the files. floor: KV cache without which the longest request cannot run."
        ]
        if self.limit_bytes is not None and self.left_bytes is not None:
            lines.append(
                f"{format_size(self.left_bytes)} of {format_size(self.limit_bytes)} are left "
                "beside the floors, for whoever is busy."
            )
        left = self.machine_left_bytes
        if left is not None:
            pool = "floors" if self.limit_bytes is None else "pool"
            found = f"{format_size(left)} are left" if left >= 0 else f"{format_size(-left)} lack"
            lines.append(
                f"{found} of {format_size(self.free_bytes)} ({self.whose}) beside weights and "
                f"the {pool}."
            )
        return "\n".join(lines)
