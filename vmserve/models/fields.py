"""Read config.json of the decoder's families without ``transformers``.

Importing the configurations of ``transformers`` takes longer than everything else that happens
before a model's first token, and what a usual config.json says can be read without them. A reading
is the same as theirs, default for default, or it is none. They read whatever is unusual: a type
that is not the field's, a spelling that is not known here, sizes that contradict each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from vmserve.numbers.dtypes import DType

__all__ = [
    "Fields",
    "Schema",
    "read_fields",
    "read_gemma3_rope",
    "read_gpt_oss_rope",
    "read_partial_rope",
    "read_phi3_rope",
    "read_rope",
]

#: Attributes with the names of ``transformers``.
Fields = SimpleNamespace

_DTYPES = frozenset((DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16))
#: Fields that change the meaning of others, in ways that are not repeated here.
_ELSEWHERE = frozenset(
    ("decoder", "generator", "mlp_layer_types", "mtp_layer_types", "partial_rotary_factor",
     "original_max_position_embeddings", "per_layer_config", "text_config", "text_encoder")
)  # fmt: skip
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULT_THETA = 10_000.0
_LAYER_TYPES = frozenset(("full_attention", "linear_attention", "sliding_attention"))


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int?": lambda value: value is None or _is_int(value),
    "float": lambda value: type(value) is float,
    "float?": lambda value: value is None or type(value) is float,
    "bool?": lambda value: value is None or type(value) is bool,
    "number?": lambda value: value is None or _is_number(value),
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
    "str?": lambda value: value is None or type(value) is str,
    "ids": lambda value: (
        value is None or _is_int(value) or (type(value) is list and all(map(_is_int, value)))
    ),
    "ints?": lambda value: value is None or (type(value) is list and all(map(_is_int, value))),
    "layer_types": lambda value: (
        value is None or (type(value) is list and _LAYER_TYPES.issuperset(map(str, value)))
    ),
}


@dataclass(frozen=True)
class Schema:
    """``fields``: name -> (kind, default), as in the family's configuration class.

    ``finish`` fills in what follows from other fields; False: they contradict each other.
    """

    fields: Mapping[str, tuple[str, Any]]
    #: Reads ``rope_parameters`` from config.json and the fields found; None: it has none.
    rope: Callable[[Mapping[str, Any], Fields], dict[str, Any] | None] | None
    finish: Callable[[Fields], bool]
    #: Other names of fields, which no checkpoint uses.
    aliases: frozenset[str] = frozenset()


def read_fields(schema: Schema, raw: Mapping[str, Any]) -> Fields | None:
    """Read the fields of a config.json; None if ``transformers`` has to read it."""
    if not raw.keys().isdisjoint((_ELSEWHERE - schema.fields.keys()) | schema.aliases):
        return None
    if "layer_types" in raw and "layer_types" not in schema.fields:
        return None
    found = Fields()
    for name, (kind, default) in schema.fields.items():
        value = raw.get(name, default)
        if not _KINDS[kind](value):
            return None
        setattr(found, name, value)
    dtype = raw.get("torch_dtype") if raw.get("dtype") is None else raw["dtype"]
    if not (dtype is None or (type(dtype) is str and dtype in _DTYPES)):
        return None
    found.dtype = None if dtype is None else DType(dtype)
    if not (_in_vocabulary(found) and schema.finish(found)):
        return None
    if schema.rope is not None:
        parameters = schema.rope(raw, found)
        if parameters is None:
            return None
        found.rope_parameters = parameters
    return found


def _in_vocabulary(found: Fields) -> bool:
    """Where this is False, ``transformers`` warns."""
    ids = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    known = [each for each in (found.bos_token_id, *ids) if each is not None]
    return all(0 <= each < found.vocab_size for each in known)


# -- rotary embedding ---------------------------------------------------------------------

_ANY = {"rope_theta", "rope_type", "type"}
_NEEDED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset(("factor",)),
    "dynamic": frozenset(("factor",)),
    "llama3": frozenset(("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": frozenset(("factor",)),
}
_OPTIONAL: Mapping[str, frozenset[str]] = {
    "llama3": frozenset(("original_max_position_embeddings",)),
    "yarn": frozenset(
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
    ),
}


def _given(raw: Mapping[str, Any], theta: float = _DEFAULT_THETA) -> dict[str, Any] | None:
    """Read either spelling: ``rope_parameters``, or ``rope_scaling`` and ``rope_theta``."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return None
    parameters = dict(given)
    parameters.setdefault("rope_theta", raw.get("rope_theta", theta))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def read_phi3_rope(raw: Mapping[str, Any], found: Fields) -> dict[str, Any] | None:
    """Phi-3's: longrope or none, of a part of each head; also by their older names."""
    parameters = _given(raw)
    if parameters is None or not _is_number(parameters["rope_theta"]):
        return None
    given = raw.get("partial_rotary_factor", 1.0)
    share = parameters.setdefault("partial_rotary_factor", given)
    names = parameters.keys() - _ANY - {"partial_rotary_factor"}
    if not (_is_number(share) and 0 < share <= 1 and _is_number(given)):
        return None
    if parameters["rope_type"] == "default":
        return None if names else parameters
    if parameters["rope_type"] not in ("longrope", "su", "yarn"):
        return None
    parameters["rope_type"] = "longrope"
    lists = {name: parameters.get(name) for name in ("short_factor", "long_factor")}
    count = int(found.head_dim * share) // 2
    for factors in lists.values():
        if type(factors) is not list or len(factors) != count or not all(map(_is_number, factors)):
            return None
    original = found.original_max_position_embeddings
    parameters["original_max_position_embeddings"] = original
    others = names - lists.keys()
    if not others <= {"original_max_position_embeddings", "factor", "attention_factor"}:
        return None
    if not all(_is_number(parameters[name]) for name in others):
        return None
    return parameters if 0 < original <= found.max_position_embeddings else None


def read_gemma3_rope(raw: Mapping[str, Any], found: Fields) -> dict[str, Any] | None:
    """Gemma 3's, by layer type; or of both types by their older names."""
    given, scaling = raw.get("rope_parameters"), raw.get("rope_scaling")
    if not isinstance(given, dict | None) or not isinstance(scaling, dict | None):
        return None
    by_type = given
    if by_type is None:
        default = {"rope_type": "default"}
        by_type = {"full_attention": default, "sliding_attention": default}
    if by_type.keys() != {"full_attention", "sliding_attention"}:
        return None
    if not all(isinstance(parameters, dict) for parameters in by_type.values()):
        return None
    thetas = {
        "full_attention": raw.get("rope_theta", 1_000_000.0),
        "sliding_attention": raw.get("rope_local_base_freq", _DEFAULT_THETA),
    }
    found_by_type = {}
    for layer_type, parameters in by_type.items():
        of_type = dict(parameters)
        if layer_type == "full_attention" and scaling is not None:
            of_type |= scaling
        of_type.setdefault("rope_theta", thetas[layer_type])
        of_type.setdefault("rope_type", of_type.get("type", "default"))
        checked = _checked(of_type, found.max_position_embeddings)
        if checked is None:
            return None
        found_by_type[layer_type] = checked
    return found_by_type


def read_rope(
    raw: Mapping[str, Any], found: Fields, theta: float = _DEFAULT_THETA
) -> dict[str, Any] | None:
    """``theta``: the base where config.json has none."""
    parameters = _given(raw, theta)
    return None if parameters is None else _checked(parameters, found.max_position_embeddings)


def _checked(parameters: dict[str, Any], max_len: int) -> dict[str, Any] | None:
    rope_type = parameters["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        return None
    allowed = _NEEDED[rope_type] | _OPTIONAL.get(rope_type, frozenset())
    names = parameters.keys() - _ANY
    numbers = [parameters[name] for name in names - {"truncate"}] + [parameters["rope_theta"]]
    if type(parameters.get("truncate", True)) is not bool:
        return None
    if not (_NEEDED[rope_type] <= names <= allowed and all(map(_is_number, numbers))):
        return None
    if "original_max_position_embeddings" in allowed:
        parameters.setdefault("original_max_position_embeddings", max_len)
    return parameters if _is_plausible(rope_type, parameters, max_len) else None


def read_gpt_oss_rope(raw: Mapping[str, Any], found: Fields) -> dict[str, Any] | None:
    """Like :func:`read_rope`, but YaRN where config.json has none."""
    theta = 150_000.0
    if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
        raw = {**raw, "rope_parameters": _GPT_OSS_ROPE}
    return read_rope(raw, found, theta)


def read_partial_rope(raw: Mapping[str, Any], found: Fields) -> dict[str, Any] | None:
    """Like :func:`read_rope`, for ``partial_rotary_factor`` of each head."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        return None
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.25))
    others = {name: value for name, value in given.items() if name != "partial_rotary_factor"}
    parameters = read_rope({**raw, "rope_scaling": None, "rope_parameters": others}, found)
    if parameters is None or not (_is_number(share) and 0 < share <= 1):
        return None
    return {**parameters, "partial_rotary_factor": share}


def _is_plausible(rope_type: str, parameters: Mapping[str, Any], max_len: int) -> bool:
    """Where this is False, ``transformers`` warns or refuses."""
    if parameters.get("factor", 1) < 1:
        return False
    original = parameters.get("original_max_position_embeddings", 1)
    if original < 1:
        return False
    if rope_type == "llama3":
        is_int = type(original) is int
        return (
            is_int
            and original < max_len
            and (parameters["low_freq_factor"] < parameters["high_freq_factor"])
        )
    if rope_type == "yarn":
        return max_len / original in (1, parameters["factor"]) and (
            parameters.get("beta_slow", 1) <= parameters.get("beta_fast", 32)
        )
    return True
