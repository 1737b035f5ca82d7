"""What a caller can ask of generation, checked when it is built.

Every bound is in one table (``LIMITS``) and every message names the field, the bound and
the kind of constraint (``less_than_equal`` and the like), so that the HTTP server can pass
it on as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

from vmserve.errors import InvalidRequestError
from vmserve.structured.spec import StructuredOutputsParams

__all__ = ["LIMITS", "BeamSearchParams", "Bounds", "GenerationParams", "SamplingParams"]

INT64_MAX = 2**63 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1024
#: Below this a temperature divides logits into overflow; it means greedy.
GREEDY_TEMPERATURE = 1e-5
#: Ids named in an error message; the rest are counted.
NAMED_IDS = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number: ``low`` <= x <= ``high``, or ``low`` < x with ``open_low``."""

    low: float
    high: float
    open_low: bool = False
    integer: bool = False


LIMITS: Mapping[str, Bounds] = {
    "n": Bounds(1, MAX_CHOICES, integer=True),
    "best_of": Bounds(1, MAX_CHOICES, integer=True),
    "temperature": Bounds(0.0, 2.0),
    "top_p": Bounds(0.0, 1.0, open_low=True),
    "top_k": Bounds(-1, INT64_MAX, integer=True),
    "min_p": Bounds(0.0, 1.0),
    "presence_penalty": Bounds(-2.0, 2.0),
    "frequency_penalty": Bounds(-2.0, 2.0),
    "repetition_penalty": Bounds(0.0, 2.0, open_low=True),
    "seed": Bounds(-(2**63), INT64_MAX, integer=True),
    "max_tokens": Bounds(0, INT64_MAX, integer=True),
    "min_tokens": Bounds(0, INT64_MAX, integer=True),
    "logprobs": Bounds(-1, INT64_MAX, integer=True),
    "prompt_logprobs": Bounds(-1, INT64_MAX, integer=True),
    "beam_width": Bounds(1, MAX_CHOICES, integer=True),
    "length_penalty": Bounds(-100.0, 100.0),
}

#: "auto": as the model's authors say, else "last".
Pooling = Literal["auto", "last", "mean"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)

_OPTIONAL = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)
_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "detokenize",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample the answer to one prompt.

    ``temperature`` 0 is greedy. ``top_k`` 0 and -1 are off. ``max_tokens`` None is as many
    as the context leaves, 0 scores the prompt alone (with ``prompt_logprobs``). ``logprobs``
    and ``prompt_logprobs`` give that many likeliest tokens per position besides the token
    itself; -1 is the whole vocabulary. ``stop`` is a string or several; lists are kept as
    tuples without duplicates. With ``best_of`` > ``n``, ``best_of`` sequences are drawn and
    the ``n`` of highest cumulative log-probability returned. ``structured_outputs``: what the
    answer has to match (a mapping does as well). ``pooling``: give the prompt's embedding, its
    last token's final hidden state ("last"), the mean of all ("mean") or what the model was trained
    for ("auto"), with ``max_tokens`` 0.

    Raises :class:`~vmserve.errors.InvalidRequestError` for a value out of its range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    pooling: Pooling | None = None

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every token of the prompt has to be computed, cached or not."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def num_sequences(self) -> int:
        """How many are drawn for one prompt."""
        return self.best_of or self.n

    def as_sampling(self) -> SamplingParams:
        return self

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            self._set(name, check_number(name, getattr(self, name)))
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                self._set(name, check_number(name, getattr(self, name)))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)
        self._normalise_lists()
        if self.structured_outputs is not None:
            wanted = StructuredOutputsParams.of(self.structured_outputs)
            self._set("structured_outputs", wanted)
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _normalise_lists(self) -> None:
        self._set("stop", check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        words = check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        self._set("bad_words", words)
        self._set("stop_token_ids", check_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.logprob_token_ids is not None:
            self._set("logprob_token_ids", check_ids("logprob_token_ids", self.logprob_token_ids))
        if self.allowed_token_ids is not None:
            allowed = check_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids is empty: name at least one token id, or leave it out",
                    "allowed_token_ids",
                )
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", check_logit_bias(self.logit_bias))

    def _check_together(self) -> None:
        if self.best_of is not None and self.n > self.best_of:
            raise InvalidRequestError(
                f"best_of must be at least n: best_of={self.best_of}, n={self.n} "
                "(greater_than_equal)",
                "best_of",
            )
        if self.pooling is not None:
            self._check_pooling()
        elif self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0 (greater_than_equal); "
                "0 scores a prompt, and needs prompt_logprobs",
                "max_tokens",
            )
        check_min_tokens(self.min_tokens, self.max_tokens)
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need the text of the answer: leave detokenize on, "
                "or use stop_token_ids",
                "stop",
            )
        if self.logprob_token_ids is not None and self.logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids needs logprobs: set logprobs=0 or more", "logprob_token_ids"
            )

    def _check_pooling(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidRequestError(
                f"pooling must be one of {', '.join(POOLINGS)}, got {str(self.pooling)[:40]!r}",
                "pooling",
            )
        answers = (self.max_tokens != 0, self.num_sequences != 1, self.structured_outputs)
        if any(answers) or self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "pooling gives an embedding and no answer: it goes with max_tokens=0 and n=1, and "
                "without prompt_logprobs and structured_outputs",
                "pooling",
            )

    @property
    def is_greedy(self) -> bool:
        """The likeliest token is taken, whatever the seed."""
        return self.temperature < GREEDY_TEMPERATURE

    def validate_for(self, vocab_size: int, max_logprobs: int) -> None:
        """Check token ids and log-probability counts against a model.

        ``vocab_size`` is the model's; ``max_logprobs`` the server's limit, where -1 and
        anything above the vocabulary mean the whole vocabulary.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        limit = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
        for name, kind in (("logprobs", "sample"), ("prompt_logprobs", "prompt")):
            asked = getattr(self, name)
            if asked is None:
                continue
            asked = vocab_size if asked == -1 else asked
            if asked > limit:
                raise InvalidRequestError(
                    f"Requested {kind} logprobs of {asked}, "
                    f"which is greater than max allowed: {limit}",
                    name,
                )
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            check_vocabulary(name, getattr(self, name) or (), vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Beam search of width ``beam_width``: that many answers, best first.

    Beams are ranked by log-probability / length ** ``length_penalty``. ``temperature`` has
    no influence. ``early_stopping`` True ends as soon as ``beam_width`` answers are complete;
    False when no better one is likely; "never" when none is possible even at full length.
    The first ``min_tokens`` tokens are never an end-of-sequence token. ``max_tokens`` None is as
    many as the context leaves. ``logprobs``: that many likeliest tokens for each position.
    ``structured_outputs``: what every answer has to match.
    """

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    temperature: float = 0.0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            wanted = StructuredOutputsParams.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", wanted)
        for name in ("beam_width", "min_tokens", "length_penalty", "temperature"):
            object.__setattr__(self, name, check_number(name, getattr(self, name)))
        for name in ("max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_number(name, getattr(self, name)))
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0 (greater_than_equal)", "max_tokens"
            )
        check_min_tokens(self.min_tokens, self.max_tokens)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                'early_stopping must be true, false or "never"', "early_stopping"
            )
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false", name)

    @property
    def n(self) -> int:
        """How many answers there are."""
        return self.beam_width

    @property
    def num_sequences(self) -> int:
        """How many run for one prompt."""
        return self.beam_width

    def as_sampling(self) -> SamplingParams:
        """What holds for the answers' text, ids and log-probabilities, however they are found."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            skip_special_tokens=self.skip_special_tokens,
            detokenize=self.detokenize,
            structured_outputs=self.structured_outputs,
            temperature=0.0,
        )


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    """Raise if an answer would have to be longer than it may be."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens} "
            "(less_than_equal)",
            "min_tokens",
        )


GenerationParams = SamplingParams | BeamSearchParams


def check_number(name: str, value: object) -> int | float:
    """``value`` as a plain int or float within ``LIMITS[name]``; a bool is no number."""
    bounds = LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, Integral if bounds.integer else Real):
        kind = "an integer" if bounds.integer else "a number"
        raise InvalidRequestError(f"{name} must be {kind}, not {type(value).__name__}", name)
    number = _as_int(value) if bounds.integer else _finite(name, value)
    if number > bounds.high:
        raise InvalidRequestError(
            f"{name} must be at most {bounds.high}, got {number} (less_than_equal)", name
        )
    if bounds.open_low and number <= bounds.low:
        raise InvalidRequestError(
            f"{name} must be greater than {bounds.low}, got {number} (greater_than)", name
        )
    if number < bounds.low:
        raise InvalidRequestError(
            f"{name} must be at least {bounds.low}, got {number} (greater_than_equal)", name
        )
    return number


def _as_int(value: Any) -> int:
    return int(value)


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequestError(f"{name} must be a finite number, got {number}", name)
    return number


def check_strings(name: str, value: object, max_count: int, max_chars: int) -> tuple[str, ...]:
    """One string or several as a tuple without duplicates; None is none of them."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"{name} must be a string or a list of strings", name)
    if len(items) > max_count:
        raise InvalidRequestError(
            f"{name} must have at most {max_count} strings, got {len(items)} (less_than_equal)",
            name,
        )
    if "" in items:
        raise InvalidRequestError(f"{name} must not contain an empty string", name)
    longest = max(map(len, items), default=0)
    if longest > max_chars:
        raise InvalidRequestError(
            f"{name} must have strings of at most {max_chars} characters, got {longest} "
            "(less_than_equal)",
            name,
        )
    return tuple(dict.fromkeys(items))


def check_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids as a tuple of ints without duplicates, in the order given."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise InvalidRequestError(f"{name} must be a list of token ids", name)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise InvalidRequestError(
                f"{name} must contain integers only, not {type(item).__name__}", name
            )
        if item < 0:
            raise InvalidRequestError(
                f"{name}: token id {int(item)} is out of vocabulary: ids start at 0 "
                "(greater_than_equal)",
                name,
            )
    return tuple(dict.fromkeys(int(item) for item in value))


def check_logit_bias(value: object) -> dict[int, float]:
    """Token id -> bias. Keys may be strings of digits, as JSON has them."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError("logit_bias must map token ids to numbers", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias must have at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(value)} "
            "(less_than_equal)",
            "logit_bias",
        )
    ids = {key: _bias_id(key) for key in value}
    wrong = [str(key) for key, token_id in ids.items() if token_id is None]
    if wrong:
        raise InvalidRequestError(
            f"logit_bias has keys that are no integers: {_named(wrong)}", "logit_bias"
        )
    return {
        token_id: _bias(key, value[key]) for key, token_id in ids.items() if token_id is not None
    }


def _bias_id(key: object) -> int | None:
    if isinstance(key, bool):
        return None
    if isinstance(key, Integral):
        return int(key)
    if isinstance(key, str) and key.isascii() and key.lstrip("-").isdigit() and len(key) <= 20:
        return int(key) if key.count("-") <= 1 else None
    return None


def _bias(key: object, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, Real):
        raise InvalidRequestError(
            f"logit_bias of key {key} must be a number, not {type(bias).__name__}", "logit_bias"
        )
    number = _finite("logit_bias", bias)
    if abs(number) > MAX_LOGIT_BIAS:
        bound, kind = ("at most 100", "less_than_equal")
        if number < 0:
            bound, kind = ("at least -100", "greater_than_equal")
        raise InvalidRequestError(
            f"logit_bias of key {key} must be {bound}, got {number} ({kind})", "logit_bias"
        )
    return number


def check_vocabulary(name: str, ids: Sequence[int] | Mapping[int, float], vocab_size: int) -> None:
    """Raise for ids that the model does not have, naming them and the vocabulary's size."""
    unknown = [str(token_id) for token_id in ids if not 0 <= token_id < vocab_size]
    if unknown:
        raise InvalidRequestError(
            f"{name} has token ids that are out of vocabulary: {_named(unknown)}; the vocabulary "
            f"size is {vocab_size}, so ids are 0 to {vocab_size - 1}",
            name,
        )


def _named(items: Sequence[str]) -> str:
    shown = ", ".join(item[:40] for item in items[:NAMED_IDS])
    rest = len(items) - NAMED_IDS
    return f"{shown} and {rest} more" if rest > 0 else shown
