"""From a request's fields to :class:`SamplingParams`, and the rules between fields."""

from __future__ import annotations

from typing import Any, Final

from vmserve.client.client import Client
from vmserve.errors import InvalidRequestError, PromptTooLongError
from vmserve.options import declared_options
from vmserve.sampling import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.sampling.tokens import token_list
from vmserve.server.errors import not_implemented
from vmserve.server.limits import MAX_CONTEXTS, MAX_REPEATED
from vmserve.server.words.protocol import EmbeddingRequest, GenerationRequest
from vmserve.server.words.structured import structured_outputs
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.text.prompts import encode_params

__all__ = [
    "StreamOptions",
    "check_length",
    "check_max_tokens",
    "check_prompt",
    "check_repeated",
    "far_too_long",
    "most_tokens",
    "refuse_unserved",
    "sampling_params",
    "stream_options",
    "truncate",
]

Truncated = GenerationRequest | EmbeddingRequest
#: Defaults of fields that neither the request nor generation_config.json sets.
_OPENAI_DEFAULTS: Final[dict[str, Any]] = {"temperature": 1.0, "top_p": 1.0}
#: Characters of a prediction that are encoded, for each token of the context.
_CHARS_PER_TOKEN: Final = 16
#: Fields which requests and parameters have alike, without those that have rules of their own.
_FIELDS: Final = (
    GenerationRequest.model_fields.keys() & declared_options(SamplingParams).keys()
) - {"max_tokens", "prediction", "prompt_logprobs", "structured_outputs"}
_BEAM_FIELDS: Final = (
    GenerationRequest.model_fields.keys() & declared_options(BeamSearchParams).keys()
) - {"max_tokens", "structured_outputs", "temperature"}


def sampling_params(
    request: GenerationRequest,
    engine: Client,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
    structured: StructuredOutputsParams | None = None,
    loose: StructuredOutputsParams | None = None,
) -> GenerationParams:
    """Raises :class:`InvalidRequestError` for values that cannot be sampled with, and for
    token ids or numbers of log-probabilities that the model or the server does not allow.

    ``structured``: what the answer has to match, where it is not the request that says so.
    ``loose``: the same, where nothing else does.
    """
    asked = structured_outputs(request)
    if structured is not None and asked is not None and request.response_format is None:
        raise InvalidRequestError(
            "tool_choice enforces a call, and another field says what the answer has to match: "
            "leave one out",
            "tool_choice",
        )
    structured = (
        structured or asked or loose
    )  # OpenAI's response_format is for answers that are no calls
    given = {name: getattr(request, name) for name in _FIELDS}
    options = {**_OPENAI_DEFAULTS, **engine.default_sampling}
    options |= {name: value for name, value in given.items() if value is not None}
    if request.use_beam_search:
        return _beam_params(request, engine, max_tokens, logprobs, structured)
    options["max_tokens"] = max_tokens
    if request.prediction is not None:
        options["prediction"] = _predicted_tokens(request.prediction, engine)
    if best_of is not None:
        options["best_of"] = best_of
    params = SamplingParams(
        **options,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured,
    )
    params.validate_for(engine.model_config.vocab_size, engine.resolved.max_logprobs)
    return encode_params(params, engine.tokenizer)


def _predicted_tokens(prediction: Any, engine: Client) -> list[int]:
    """Encode OpenAI's ``prediction``. What no answer has room for is left out.

    Raises :class:`InvalidRequestError`.
    """
    if not isinstance(prediction, dict) or prediction.get("type") != "content":
        raise InvalidRequestError(
            'prediction must be an object of type "content", with a text or parts of type "text" '
            "as its content",
            "prediction",
        )
    content = prediction.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        raise InvalidRequestError(
            'prediction.content must be a text, or a list of {"type": "text", "text": "..."}',
            "prediction",
        )
    most = engine.resolved.max_model_len
    text = "".join(part["text"] for part in parts)[: _CHARS_PER_TOKEN * most]
    return engine.tokenizer.encode(text, add_special_tokens=False)[:most]


def _beam_params(
    request: GenerationRequest,
    engine: Client,
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputsParams | None,
) -> BeamSearchParams:
    """``n`` is the width; what only shapes sampling has no influence."""
    width, most = request.n or 1, engine.resolved.max_num_seqs
    if width > most:
        raise InvalidRequestError(
            f"n must be at most {most} for a beam search here, got {width} (less_than_equal): "
            "beams run together; start the server with a larger --max-num-seqs",
            "n",
        )
    given = {name: getattr(request, name) for name in _BEAM_FIELDS}
    params = BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=structured,
        **{name: value for name, value in given.items() if value is not None},
    )
    params.as_sampling().validate_for(engine.model_config.vocab_size, engine.resolved.max_logprobs)
    return params


def check_repeated(params: GenerationParams, num_prompts: int) -> None:
    """Raises :class:`InvalidRequestError` for lists and texts that are too long for so many
    prompts."""
    sampling = params.as_sampling()
    lists = (
        sampling.allowed_token_ids,
        sampling.stop_token_ids,
        sampling.logprob_token_ids,
        sampling.logit_bias,
        sampling.prediction,
        *sampling.bad_words,
    )
    num_chars = sum(map(len, sampling.stop))
    if sampling.structured_outputs is not None:
        num_chars += len(sampling.structured_outputs.constraint.text)
    size = sum(len(each) for each in lists if each is not None) + num_chars // 16
    if size * num_prompts > MAX_REPEATED:
        raise InvalidRequestError(
            f"prompt: {num_prompts} prompts with parameters of {size} token ids (or 16 characters) "
            f"each are more than one request may have, {MAX_REPEATED} in all: send fewer prompts, "
            "or shorter lists and texts",
            "prompt",
        )


def check_max_tokens(max_tokens: int | None, max_model_len: int, name: str = "max_tokens") -> None:
    """Raises :class:`InvalidRequestError` for more than the context could ever hold.

    Prompt and ``max_tokens`` (given as ``name``) together may exceed it: generation then
    ends early.
    """
    if max_tokens is not None and max_tokens > max_model_len:
        raise InvalidRequestError(
            f"max_tokens or max_completion_tokens is too large: {max_tokens}. This model's maximum "
            f"context length is {max_model_len} tokens: ask for less",
            name,
        )


def check_prompt(num_prompt: int, max_model_len: int, name: str = "prompt") -> None:
    """Raises :class:`PromptTooLongError` for a prompt that leaves no room for one token."""
    if num_prompt >= max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{num_prompt}: it is longer than the model's context length less one token for the "
            "answer. Shorten it, or set truncate_prompt_tokens",
            name,
        )


def check_length(prompt: Any, request: Truncated, max_model_len: int) -> None:
    """Refuse token ids that are far too many before anything else is done with them.

    Raises :class:`InvalidRequestError`.
    """
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], int):
        return
    if request.truncate_prompt_tokens is None:
        check_prompt(len(prompt), max_model_len)
    elif len(prompt) > MAX_CONTEXTS * max_model_len:
        what = "a prompt of token ids"
        raise far_too_long(what, max_model_len, str(len(prompt)), "prompt")


def far_too_long(what: str, max_model_len: int, num: str, param: str) -> PromptTooLongError:
    """The error for a text too long to be read to its end and truncated; it has ``num`` tokens."""
    return PromptTooLongError(
        f"{what} that is to be truncated may have {MAX_CONTEXTS} times the context, "
        f"{max_model_len} tokens, and this one has {num}: leave out what would be cut off",
        param,
    )


def truncate(token_ids: list[int], request: Truncated, max_model_len: int) -> list[int]:
    """Truncate a prompt: keep the last tokens, or the first ones with side "right"."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_list(token_ids)
    if keep == -1:
        keep = max_model_len - 1
    if not 1 <= keep <= max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {max_model_len}, the model's context "
            f"length; got {keep}",
            "truncate_prompt_tokens",
        )
    kept = token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]
    return token_list(kept)


def most_tokens(request: Truncated, max_model_len: int) -> int | None:
    """Return how many tokens a prompt may have before it is truncated; None: any number."""
    return max_model_len if request.truncate_prompt_tokens is None else None


class StreamOptions:
    """``include``: a last chunk with the usage; ``continuous``: usage in every chunk."""

    __slots__ = ("continuous", "include")

    def __init__(self, include: bool, continuous: bool) -> None:
        self.include = include
        self.continuous = include and continuous


def stream_options(request: GenerationRequest, force_usage: bool) -> StreamOptions:
    """Raises :class:`InvalidRequestError` for options without a stream, or of wrong types."""
    options = request.stream_options or {}
    if options and not request.stream:
        raise InvalidRequestError(
            "stream_options is only for requests with stream", "stream_options"
        )
    for name in ("include_usage", "continuous_usage_stats"):
        if not isinstance(options.get(name), bool | None):
            raise InvalidRequestError(
                f"stream_options.{name} must be true or false", "stream_options"
            )
    return StreamOptions(
        include=force_usage or bool(options.get("include_usage")),
        continuous=force_usage or bool(options.get("continuous_usage_stats")),
    )


def refuse_unserved(request: GenerationRequest) -> None:
    """Raises :class:`InvalidRequestError` for what the contract has and this version has not."""
    if request.use_beam_search:
        _check_beams(request)
    if request.prompt_embeds:
        raise not_implemented("prompt_embeds", "prompt_embeds", "send the prompt as text or ids")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed: leave out prompt_logprobs or stream",
            "prompt_logprobs",
        )


def _check_beams(request: GenerationRequest) -> None:
    """Raises :class:`InvalidRequestError` for what a beam search cannot give."""
    refusals = [
        (bool(request.stream), "stream", "the best answers are known only at the end"),
        (
            bool(request.echo) and bool(getattr(request, "logprobs", None) is not None),
            "echo",
            "the prompt's log-probabilities are not computed",
        ),
        (request.logprob_token_ids is not None, "logprob_token_ids", "use logprobs"),
        (request.prompt_logprobs is not None, "prompt_logprobs", "leave it out"),
        (request.prediction is not None, "prediction", "beams are not drafted"),
        (bool(request.stop), "stop", "answers end with the model's end token"),
        (bool(request.stop_token_ids), "stop_token_ids", "answers end with the model's end token"),
    ]
    for refused, name, reason in refusals:
        if refused:
            what = "echo with logprobs" if name == "echo" else name
            raise InvalidRequestError(f"use_beam_search does not go with {what}: {reason}", name)
