"""The interface through which messages reach an engine and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from vmserve.client.callers import Callers
from vmserve.client.messages import FromEngine, Happened, ModelFacts, ToEngine
from vmserve.config import ResolvedConfig
from vmserve.engine.limits import RequestLimits
from vmserve.errors import ConfigurationError
from vmserve.models.config import ModelConfig
from vmserve.text.tokenizer import Tokenizer

__all__ = ["Facts", "Receive", "Transport"]

Receive: TypeAlias = Callable[[FromEngine | Happened], None]


@dataclass(kw_only=True, eq=False)
class Facts:
    """What is known of an engine without asking it. Its transport keeps it up to date.

    ``identity`` changes with the weights and with settings that can change the bits of an answer;
    empty: unknown. ``weights``: a digest of their files. ``latest`` returns the engine's metrics as
    of its last word, and ``num_running`` is the number of requests that run then; at most
    ``max_num_running`` do. ``kv_cache_memory``: the option with which it would be started again.
    ``is_apart``: whether it is in another process. ``is_dead``: it has ended by itself and does not
    serve again yet; in ``retry_seconds`` at least it is started again, if that is not None.
    ``is_ended``: it is not. ``is_suspect``: it owes an answer for much longer than it has of late.
    ``can_sleep``: whether it can be started again after :meth:`Transport.close`. ``num_engines``:
    where there may be several, which all have the same settings.
    """

    resolved: ResolvedConfig
    limits: RequestLimits
    model: ModelConfig | ModelFacts
    tokenizer: Tokenizer
    default_sampling: Mapping[str, Any]
    identity: str = ""
    weights: str = ""
    kv_cache_memory: int | str | None = None
    is_apart: bool = False
    can_sleep: bool = False
    num_engines: int = 1
    latest: Callable[[], Mapping[str, float | int]] = dict
    num_running: int = 0
    max_num_running: int = 0
    is_dead: bool = False
    is_ended: bool = False
    is_suspect: bool = False
    retry_seconds: float | None = None

    def check_same(self, other: Facts) -> None:
        """Check that a request means the same to another engine.

        Raises :class:`~vmserve.errors.ConfigurationError`, which names the first thing that
        differs.
        """
        others = other._meaning()
        for name, value in self._meaning().items():
            if others[name] != value:
                both = f": {others[name]}, not {value}"
                raise ConfigurationError(
                    f"an engine has another {name} than the others"
                    f"{both if len(both) < 200 else ''}: all must serve one model"
                )

    def _meaning(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "limits": self.limits,
            "tokenizer": self.tokenizer.fingerprint,
            "chat template": self.tokenizer.chat_template_text,
            "default sampling": dict(self.default_sampling),
            "block size": self.resolved.block_tokens,
            "type of the KV cache": self.resolved.kv_cache_dtype,
            "content of the weights": self.weights,
        }


class Transport(Protocol):
    """Carries messages to an engine and back, in order and each once. For one client.

    What a client needs besides answers comes as :data:`~vmserve.client.messages.Happened`, between
    the engine's messages.
    """

    @property
    def facts(self) -> Facts: ...

    @property
    def callers(self) -> Callers: ...

    def on(self, receive: Receive) -> None:
        """Call ``receive`` with each message."""

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises :class:`~vmserve.errors.EngineDeadError` if no engine takes it."""

    async def start(self, *, again: bool = False) -> None:
        """Begin to listen. Every call begins with it; only the first does something.

        ``again``: after :meth:`close` and after the engine's death, start an engine. Raises what
        loading raises; then there is none.
        """

    async def close(self) -> None:
        """End the engine, which tells what it has of each request."""
