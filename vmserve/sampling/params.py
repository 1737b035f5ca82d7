"""Parameters of generation, checked when they are made.

Each field is declared once, with its range, default and help. The command line, the ranges of HTTP
requests (``LIMITS``) and docs/options.md are derived from that. Every message names the field, the
bound and the kind of constraint (such as ``less_than_equal``), so that the HTTP server can pass it
on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, TypeVar, cast, get_args

from vmserve.errors import InvalidRequestError
from vmserve.options import Bounds, Declared, Option, declared_options
from vmserve.structured.spec import StructuredOutputsParams

__all__ = [
    "LIMITS",
    "SAMPLING_OPTIONS",
    "BeamSearchParams",
    "GenerationParams",
    "SamplingParams",
    "with_checked",
]

INT64_MAX = 2**63 - 1
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 1024
#: Characters of all words together. A character is up to four ids, in each of three places of a
#: text.
MAX_BAD_WORDS_CHARS = 65_536
MAX_BAD_WORDS_IDS = 12 * MAX_BAD_WORDS_CHARS
#: Temperature below which sampling is greedy: logits divided by less overflow.
GREEDY_TEMPERATURE = 1e-5
#: Most ids named in an error message; the rest are counted.
NAMED_IDS = 64


#: "auto": the choice of the model's authors, else "last".
Pooling = Literal["auto", "last", "mean"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)


def _option(
    help: str,
    low: float | None = None,
    high: float = INT64_MAX,
    *,
    open_low: bool = False,
    default: str = "",
    flags: tuple[str, ...] = (),
    negatable: bool = False,
) -> Option:
    """Declare a field. The command line shows no default, because models have their own."""
    bounds = None if low is None else Bounds(low, high, open_low)
    return Option(help, "Sampling", bounds, default=default, flags=flags, negatable=negatable)


_Temperature = Annotated[float, _option("0 is greedy.", 0.0, 2.0)]
_IgnoreEos = Annotated[bool, _option("Continue past the end token.", negatable=True)]
_MaxTokens = Annotated[int | None, _option("Most tokens to generate.", 0, default="16")]
_MinTokens = Annotated[int, _option("Draw no end token before this many tokens.", 0)]
_Logprobs = Annotated[int | None, _option("Log-probabilities of the k likeliest tokens.", -1)]
_SkipSpecialTokens = Annotated[bool, _option("Leave special tokens out of the text.")]
_Detokenize = Annotated[bool, _option("Turn tokens into text.")]
_StructuredOutputs = Annotated[
    StructuredOutputsParams | None, _option("What the answer must match.")
]


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

    n: Annotated[int, _option("Outputs per prompt.", 1, MAX_CHOICES, flags=("-n", "--n"))] = 1
    best_of: Annotated[
        int | None,
        _option("Outputs that are drawn; the n likeliest are returned.", 1, MAX_CHOICES),
    ] = None
    temperature: _Temperature = 1.0
    top_p: Annotated[
        float,
        _option("Keep the likeliest tokens of this total probability.", 0.0, 1.0, open_low=True),
    ] = 1.0
    top_k: Annotated[int, _option("Keep the k likeliest tokens; 0 or -1: all.", -1)] = 0
    min_p: Annotated[
        float, _option("Drop tokens below this share of the likeliest one's probability.", 0.0, 1.0)
    ] = 0.0
    presence_penalty: Annotated[
        float, _option("Subtracted from the logits of tokens in the answer; -2 to 2.", -2.0, 2.0)
    ] = 0.0
    frequency_penalty: Annotated[
        float, _option("Subtracted once for each time that the token occurred; -2 to 2.", -2.0, 2.0)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        _option(
            "Divides the logits of tokens in the prompt or the answer; above 0, at most 2.",
            0.0,
            2.0,
            open_low=True,
        ),
    ] = 1.0
    seed: Annotated[int | None, _option("Makes the draws repeatable.", -(2**63))] = None
    stop: Annotated[Sequence[str], _option("A stop string; repeatable.")] = ()
    stop_token_ids: Annotated[Sequence[int], _option("Tokens that end the answer.")] = ()
    include_stop_str_in_output: Annotated[bool, _option("Keep the stop string in the text.")] = (
        False
    )
    ignore_eos: _IgnoreEos = False
    max_tokens: _MaxTokens = 16
    min_tokens: _MinTokens = 0
    logprobs: _Logprobs = None
    prompt_logprobs: Annotated[
        int | None, _option("The same for each token of the prompt.", -1)
    ] = None
    logprob_token_ids: Annotated[
        Sequence[int] | None, _option("Tokens whose log-probabilities are returned as well.")
    ] = None
    logit_bias: Annotated[
        Mapping[int, float] | None, _option("Added to the logits of tokens, by id; -100 to 100.")
    ] = None
    allowed_token_ids: Annotated[
        Sequence[int] | None, _option("The only tokens that may be drawn.")
    ] = None
    bad_words: Annotated[
        Sequence[str] | Sequence[Sequence[int]],
        _option("Words that the answer must not have, as texts or as token ids."),
    ] = ()
    skip_special_tokens: _SkipSpecialTokens = True
    detokenize: _Detokenize = True
    structured_outputs: _StructuredOutputs = None
    pooling: Annotated[
        Pooling | None, _option("Give an embedding of the prompt instead of an answer.")
    ] = None
    prediction: Annotated[
        str | Sequence[int],
        _option("What the answer may say, as text or token ids: a source of drafts."),
    ] = ()
    speculative: Annotated[
        bool, _option("Let an engine with --speculative draft tokens of this answer.")
    ] = True

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every token of the prompt has to be computed, even if cached."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    @property
    def num_sequences(self) -> int:
        """Sequences drawn for one prompt."""
        return self.best_of or self.n

    def as_sampling(self) -> SamplingParams:
        return self

    def __post_init__(self) -> None:
        _check_numbers_and_flags(self, SamplingParams)
        self._normalise_lists()
        if self.structured_outputs is not None:
            wanted = StructuredOutputsParams.of(self.structured_outputs)
            self._set("structured_outputs", wanted)
        self._check_together()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _normalise_lists(self) -> None:
        self._set("stop", check_strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_CHARS))
        self._set("bad_words", check_bad_words(self.bad_words))
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
        if not isinstance(self.prediction, str):
            prediction = check_ids("prediction", self.prediction or (), distinct=False)
            self._set("prediction", prediction)
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
        """Whether the likeliest token is taken, whatever the seed."""
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
        if self.bad_words and not isinstance(self.bad_words[0], str):
            words = cast("Sequence[Sequence[int]]", self.bad_words)
            # The largest first: there may be thousands of words.
            check_vocabulary("bad_words", [max(map(max, words))], vocab_size)
        if not isinstance(self.prediction, str):
            check_vocabulary("prediction", self.prediction, vocab_size)


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

    beam_width: Annotated[int, _option("Beam search of this width.", 1, MAX_CHOICES)]
    max_tokens: _MaxTokens = 16
    min_tokens: _MinTokens = 0
    length_penalty: Annotated[
        float, _option("Score of a beam: log-probability / length ** penalty.", -100.0, 100.0)
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"], _option("When a search ends: see BeamSearchParams.")
    ] = False
    ignore_eos: _IgnoreEos = False
    temperature: _Temperature = 0.0
    logprobs: _Logprobs = None
    skip_special_tokens: _SkipSpecialTokens = True
    detokenize: _Detokenize = True
    structured_outputs: _StructuredOutputs = None

    def __post_init__(self) -> None:
        if self.structured_outputs is not None:
            wanted = StructuredOutputsParams.of(self.structured_outputs)
            object.__setattr__(self, "structured_outputs", wanted)
        _check_numbers_and_flags(self, BeamSearchParams)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError(
                "max_tokens must be at least 1, got 0 (greater_than_equal)", "max_tokens"
            )
        check_min_tokens(self.min_tokens, self.max_tokens)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidRequestError(
                'early_stopping must be true, false or "never"', "early_stopping"
            )

    @property
    def n(self) -> int:
        """Number of answers."""
        return self.beam_width

    @property
    def num_sequences(self) -> int:
        """Beams for one prompt."""
        return self.beam_width

    def as_sampling(self) -> SamplingParams:
        """The parameters for the answers' text, ids and log-probabilities."""
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


#: The fields of both classes by name; :class:`SamplingParams` wins.
SAMPLING_OPTIONS: Final[Mapping[str, Declared]] = {
    **declared_options(SamplingParams),
    **{
        name: declared
        for name, declared in declared_options(BeamSearchParams).items()
        if name not in declared_options(SamplingParams)
    },
}
#: Ranges of numbers.
LIMITS: Final[Mapping[str, Bounds]] = {
    name: dataclasses.replace(declared.option.bounds, integer=declared.type is int)
    for name, declared in SAMPLING_OPTIONS.items()
    if declared.option.bounds is not None
}
#: Numbers of each class, with whether they may be None, and its flags.
_CHECKED: Final = {
    owner: (
        [(name, field.optional) for name, field in fields.items() if name in LIMITS],
        [name for name, field in fields.items() if field.type is bool],
    )
    for owner, fields in (
        (owner, declared_options(owner)) for owner in (SamplingParams, BeamSearchParams)
    )
}


def _check_numbers_and_flags(
    params: GenerationParams, owner: type[SamplingParams] | type[BeamSearchParams]
) -> None:
    numbers, flags = _CHECKED[owner]
    for name, optional in numbers:
        if (value := getattr(params, name)) is not None or not optional:
            object.__setattr__(params, name, check_number(name, value))
    for name in flags:
        if not isinstance(getattr(params, name), bool):
            raise InvalidRequestError(f"{name} must be true or false", name)


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    """Raise if an answer would have to be longer than it may be."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most max_tokens={max_tokens}, got {min_tokens} "
            "(less_than_equal)",
            "min_tokens",
        )


GenerationParams = SamplingParams | BeamSearchParams
_Params = TypeVar("_Params", bound=GenerationParams)


def with_checked(params: _Params, **fields: Any) -> _Params:
    """Copy with other values of fields, which are not checked, nor are the others once more."""
    changed = copy(params)
    for name, value in fields.items():
        object.__setattr__(changed, name, value)
    return changed


def check_number(name: str, value: object) -> int | float:
    """Return ``value`` as an int or float within ``LIMITS[name]``; refuses a bool."""
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


def check_bad_words(value: object) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    """Words as texts without duplicates, or as token ids."""
    given = value if isinstance(value, Sequence) else ()
    if not given or isinstance(given[0], str):
        words = check_strings("bad_words", value, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        _check_sum("bad_words", sum(map(len, words)), MAX_BAD_WORDS_CHARS, "characters")
        return words
    encoded = tuple(check_ids("bad_words", word, distinct=False) for word in given)
    if not all(encoded):
        raise InvalidRequestError("bad_words must not contain an empty word", "bad_words")
    _check_sum("bad_words", sum(map(len, encoded)), MAX_BAD_WORDS_IDS, "token ids")
    return encoded


def _check_sum(name: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise InvalidRequestError(
            f"{name} must have at most {most} {unit} in all, got {size} (less_than_equal)", name
        )


def check_ids(name: str, value: object, *, distinct: bool = True) -> tuple[int, ...]:
    """Token ids as a tuple of ints in the order given, by default without duplicates."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise InvalidRequestError(f"{name} must be a list of token ids", name)
    if not set(map(type, value)) <= {int} or min(value, default=0) < 0:
        _refuse_wrong_ids(name, value)
    ids = map(int, value)
    return tuple(dict.fromkeys(ids) if distinct else ids)


def _refuse_wrong_ids(name: str, value: Iterable[object]) -> None:
    """Raise for the first of them that is no id, if there is one: not all integers are ints."""
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
    if min(ids, default=0) >= 0 and max(ids, default=0) < vocab_size:
        return
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
