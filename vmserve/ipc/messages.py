"""What server and engine say to each other: msgspec structs, as msgpack arrays.

Requests are named by a *handle*, a number that the server chooses and never uses again, so that
a step's message stays small. Engine and server are of one installation: there are no versions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from vmserve.errors import (
    ConfigurationError,
    DeadlineError,
    DriverError,
    EngineDeadError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedError,
    VmserveError,
)
from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestTerms

__all__ = [
    "Abort",
    "Add",
    "Answer",
    "Ask",
    "FromEngine",
    "Launch",
    "Ping",
    "Pong",
    "Progress",
    "Ready",
    "Refused",
    "Shutdown",
    "StepUpdate",
    "ToEngine",
    "WireError",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
    "params_from_wire",
    "params_to_wire",
]

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- errors -----------------------------------------------------------------------------------

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        VmserveError,
        InvalidRequestError,
        ConfigurationError,
        UnsupportedError,
        OutOfMemoryError,
        DeadlineError,
        DriverError,
        EngineDeadError,
        ValueError,
    )
}


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error that one side raises for what the other had asked for."""

    kind: str
    text: str
    param: str | None = None

    @classmethod
    def of(cls, error: Exception) -> WireError:
        """The nearest kind that both sides know; a subclass arrives as its base."""
        kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _KINDS), None)
        return cls(kind or "VmserveError", str(error), getattr(error, "param", None))

    def error(self) -> Exception:
        kind = _KINDS.get(self.kind, VmserveError)
        if issubclass(kind, InvalidRequestError):
            return kind(self.text, self.param)
        return kind(self.text)


# -- to the engine ----------------------------------------------------------------------------


class Launch(_Message, frozen=True):
    """The first message: what to load, and how to log. ``options``: of :class:`EngineConfig`."""

    options: dict[str, Any]
    parent_pid: int
    log_level: int
    log_format: str


class Add(_Message, frozen=True):
    """A request; ``params`` as :func:`params_to_wire` gives them. A stream is told when it is
    accepted."""

    handle: int
    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    terms: RequestTerms


class Abort(_Message, frozen=True):
    """End a request. ``tell``: with a last update; else the server has forgotten it already."""

    handle: int
    tell: bool


class Ask(_Message, frozen=True):
    """A question by its name (see :mod:`vmserve.ipc.questions`); answered between two steps."""

    serial: int
    question: str
    arguments: dict[str, Any]


class Ping(_Message, frozen=True):
    """Answered between two steps: proof that steps end."""

    serial: int


class Shutdown(_Message, frozen=True):
    """Abort what runs, tell of it, and end."""


# -- from the engine --------------------------------------------------------------------------


class Progress(_Message, frozen=True):
    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """The engine takes requests. ``resolved`` are the fields of :class:`ResolvedConfig`."""

    resolved: dict[str, Any]
    model: dict[str, Any]
    default_sampling: dict[str, Any]
    tokenizer: str
    stats: dict[str, float | int]


class Refused(_Message, frozen=True):
    """The engine cannot start."""

    error: WireError


class StepUpdate(_Message, frozen=True):
    """One step's news of all requests, by their handles: one message, however many they are."""

    num_running: int
    num_waiting: int
    accepted: list[int]
    updates: list[tuple[int, RequestUpdate]]
    failures: list[tuple[int, WireError]]


class Answer(_Message, frozen=True):
    serial: int
    value: Any
    error: WireError | None = None


class Pong(_Message, frozen=True):
    serial: int


ToEngine = Launch | Add | Abort | Ask | Ping | Shutdown
FromEngine = Progress | Ready | Refused | StepUpdate | Answer | Pong

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises ``msgspec.DecodeError`` for what is no such message."""
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises ``msgspec.DecodeError`` for what is no such message."""
    message: FromEngine = _from_engine.decode(data)
    return message


# -- parameters -------------------------------------------------------------------------------

_PARAMS: dict[str, type[SamplingParams] | type[BeamSearchParams]] = {
    "sampling": SamplingParams,
    "beams": BeamSearchParams,
}


def params_to_wire(params: GenerationParams) -> dict[str, Any]:
    """Their kind, and the fields that are not as usual."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            fields[field.name] = msgspec.to_builtins(value)
    return {"beams" if isinstance(params, BeamSearchParams) else "sampling": fields}


def params_from_wire(data: dict[str, Any]) -> GenerationParams:
    """The parameters as they were: the server has checked them, and here that is not repeated."""
    [(kind, fields)] = data.items()
    if (wanted := fields.get("structured_outputs")) is not None:
        fields["structured_outputs"] = _unchecked(StructuredOutputsParams, wanted)
    return _unchecked(_PARAMS[kind], fields)


def _unchecked(kind: type[T], values: Mapping[str, Any]) -> T:
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # all are dataclasses
        value = values.get(field.name, field.default)
        object.__setattr__(made, field.name, tuple(value) if isinstance(value, list) else value)
    return made
