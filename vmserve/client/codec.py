"""Encode messages as msgpack arrays, for an engine in another process.

Parameters were checked when they were made, and are restored without another check. Errors:
:mod:`vmserve.errors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from vmserve.client.messages import Add, FromEngine, ToEngine
from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.system.packed_errors import pack_error, unpack_error

__all__ = ["decode_from_engine", "decode_to_engine", "encode"]

T = TypeVar("T")

_PARAMS: dict[str, type[SamplingParams] | type[BeamSearchParams]] = {
    "sampling": SamplingParams,
    "beams": BeamSearchParams,
}


def encode(message: ToEngine | FromEngine) -> bytes:
    if isinstance(message, Add):
        message = msgspec.structs.replace(message, params=_pack_params(message.params))
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Decode a message. Raises ``msgspec.DecodeError`` for anything else."""
    message: ToEngine = _to_engine.decode(data)
    if isinstance(message, Add):
        return msgspec.structs.replace(message, params=_unpack_params(message.params))
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    """Decode a message. Raises ``msgspec.DecodeError`` for anything else."""
    message: FromEngine = _from_engine.decode(data)
    return message


def _pack_params(params: GenerationParams) -> dict[str, Any]:
    """The kind of parameters, and the fields that differ from the default."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            fields[field.name] = msgspec.to_builtins(value)
    return {"beams" if isinstance(params, BeamSearchParams) else "sampling": fields}


def _unpack_params(data: dict[str, Any]) -> GenerationParams:
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


def _unpack(kind: type, data: Any) -> Exception:
    return unpack_error(data)


_encoder = msgspec.msgpack.Encoder(enc_hook=pack_error)
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_unpack)
