"""What a variant's engine says of a window: log-probabilities of its tokens, from logits as served.

A window is a prompt whose log-probabilities are asked for, so it goes the whole way: scheduler, KV
cache in its own type, forward pass, sampler. Only the logits are looked at on their way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.models.native import NativeDecoder
from vmserve.models.plan import tensor_shapes
from vmserve.runner.model_runner import ModelRunner
from vmserve.sampling import SamplingParams
from vmserve_bench.quality.text import cut, first_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from vmserve.models import LoadedModel
    from vmserve.sampling.tokens import Logits, TopTokens
    from vmserve_bench.ab.variants import Variant
    from vmserve_bench.quality.text import Text, Windows

__all__ = ["Scores", "Subject", "without_paths"]

#: Options of the engine unless others are given: one window at a time, no prefix cache.
_DEFAULTS: Mapping[str, Any] = {
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "kv_regime": "virtual",
}
_PARAMS = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0.0, detokenize=False)


@dataclass(slots=True)
class Scores:
    """Of one window, a value for each scored token.

    ``nats``: its negative log-probability. ``divergence``: of the distribution from the
    reference's. ``rows`` of logits only if they were to be kept; ``norms``: their log-sum-exp.
    """

    nats: list[float] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: NDArray[np.float32], top: TopTokens, reference: Scores | None) -> None:
        target, (logprob, _) = next(iter(top.items()))
        norm = float(row[target]) - logprob
        if reference is not None:
            # KL: log p - log q = (their logit - ours) - (their norm - our norm), averaged with p.
            theirs, their_norm = reference.rows[len(self.nats)], reference.norms[len(self.nats)]
            odds = np.exp(theirs - np.float32(their_norm))
            mean = float(odds @ (theirs - row)) / float(odds.sum(dtype=np.float64))
            self.divergence.append(mean - (their_norm - norm))
        self.nats.append(-logprob)
        self.likeliest.append(next(reversed(top)))
        self.norms.append(norm)


class Subject:
    """A variant's engine."""

    def __init__(self, variant: Variant, common: Mapping[str, Any]) -> None:
        config = variant.config({**_DEFAULTS, **common})
        self.name, self._options = variant.name, variant.options
        self._model_name = _last_part(config.model or EMBEDDED_NAME)
        self.engine = LLMEngine(config)
        self._logprobs = self.engine.sampler.prompt_logprobs
        #: Seconds of steps, without the scoring of their logits.
        self.seconds = 0.0

    def windows(self, text: Text, *, size: int, stride: int) -> Windows:
        """Cut the text by this variant's tokenizer. Raises ConfigurationError."""
        context = self.engine.resolved.max_model_len
        if size > context:
            raise ConfigurationError(
                f"--window: {size} is above the context of {context} tokens of variant "
                f"{self.name}: lower it"
            )
        return cut(self.engine.tokenizer, text.content, size=size, stride=stride)

    def check_like(self, reference: Subject, text: Text) -> None:
        """Raise ConfigurationError if this variant's tokens mean something else."""
        ours, theirs = self.engine.model_config.vocab_size, reference.engine.model_config.vocab_size
        if ours != theirs:
            raise ConfigurationError(
                f"variant {self.name}: its vocabulary has {ours:,} tokens, that of "
                f"{reference.name} {theirs:,}: they cannot be compared token by token"
            )
        tokenizers = (self.engine.tokenizer, reference.engine.tokenizer)
        mine, others = (each.encode(text.content) for each in tokenizers)
        place = first_difference(mine, others)
        if place is not None:
            ahead = [
                each.decode(ids[place : place + 4], skip_special_tokens=False)
                for each, ids in zip(tokenizers, (mine, others), strict=True)
            ]
            raise ConfigurationError(
                f"variant {self.name}: its tokenizer is not that of {reference.name}: token "
                f"{place:,} of the text begins {ahead[0]!r}, not {ahead[1]!r}: give --tokenizer, "
                "for all variants"
            )

    def score(
        self, prompt: list[int], num_scored: int, reference: Scores | None, *, keep: bool
    ) -> Scores:
        """Score the last ``num_scored`` tokens of a window. ``keep``: as the reference of others.

        Raises VmserveError for logits that are NaN or infinite.
        """
        scores = Scores()
        left = len(prompt) - 1 - num_scored  # tokens that are context only
        watching = 0.0

        def watched(logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
            nonlocal left, watching
            tops = self._logprobs(logits, targets, k)
            began = perf_counter()
            skipped, left = min(left, len(tops)), max(0, left - len(tops))
            if skipped < len(tops):
                rows = _array(logits)[skipped:]
                for row, top in zip(rows, tops[skipped:], strict=True):
                    scores.add(row, top, reference)
                scores.rows += list(rows.copy()) if keep else []  # the next step overwrites them
            watching += perf_counter() - began
            return tops

        self.engine.sampler.prompt_logprobs = watched  # type: ignore[method-assign]
        began = perf_counter()
        self.engine.add_request("window", prompt, _PARAMS)
        while self.engine.has_unfinished:
            for failure in self.engine.step().failures:
                raise failure.error
        self.seconds += perf_counter() - began - watching
        if self.engine.sampler.num_repaired_rows or not math.isfinite(sum(scores.nats)):
            raise VmserveError(f"variant {self.name}: its logits are NaN or infinite")
        return scores

    def described(self) -> dict[str, Any]:
        """The variant and its weights, without paths."""
        runner = self.engine.runner
        assert isinstance(runner, ModelRunner), "build() made it"
        return {
            "name": self.name,
            "options": without_paths(self._options),
            "model": self._model_name,
            "kv_dtype": str(self.engine.memory.layout.dtype),
            **_weights(runner.model),
        }


def without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options for a results file, which names no directories of a machine."""
    return {
        name: _last_part(value) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _weights(model: LoadedModel) -> dict[str, Any]:
    """Bytes in memory, and bits of a weight in products: without an embedding kept as well."""
    network, config, num_bytes = model.network, model.config, model.parameter_bytes
    if not isinstance(network, NativeDecoder):
        bits = 8 * num_bytes / config.num_weights
        return {"weight_bytes": num_bytes, "bits_per_weight": bits}
    assert isinstance(config.network, DecoderConfig), "what the native decoder runs"
    shapes = tensor_shapes(config.network).values()
    num_weights = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    if not config.network.tied_embeddings:
        num_weights -= config.vocab_size * config.network.embedding_size
    bits = 8 * network.packed_bytes / num_weights
    return {"weight_bytes": num_bytes, "bits_per_weight": bits, "row_type": network.row_type}


def _array(logits: Logits) -> NDArray[np.float32]:
    if isinstance(logits, np.ndarray):
        return logits
    array: NDArray[np.float32] = logits.float().cpu().numpy()
    return array
