"""What a variant's engine says of a window: log-probabilities of its tokens, from logits as served.

A window is a prompt whose log-probabilities are asked for, so it goes the whole way: scheduler, KV
cache in its own type, forward pass, sampler. Only the logits are looked at on their way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vmserve.engine.build import build
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.models.native import NativeDecoder
from vmserve.models.tensor_names import tensor_shapes
from vmserve.runner.model_runner import ModelRunner
from vmserve.sampling import SamplingParams
from vmserve.sampling.tokens import PART_ELEMENTS
from vmserve_bench.quality.text import cut, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from vmserve.engine.build import Progress
    from vmserve.models import LoadedModel
    from vmserve.sampling.tokens import Logits, TokenSampler, TopTokens
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


class WatchedSampler:
    """A sampler that shows the logits of prompts, and their log-probabilities, to ``watch``."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler
        self.watch: Callable[[Logits, list[TopTokens]], None] = lambda *_: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def prompt_logprobs(self, logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
        tops = self._sampler.prompt_logprobs(logits, targets, k)
        self.watch(logits, tops)
        return tops


@dataclass(slots=True)
class Scores:
    """One window: for each scored token its negative log-probability and the likeliest token.

    ``divergence``: of the distribution at each of them from the reference's, in nats. ``logits``
    [scored, vocab] and ``norms`` (their log-sum-exp) only if they were to be kept.
    """

    nats: list[float] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    kept: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, rows: NDArray[np.float32], tops: Sequence[TopTokens], *, keep: bool) -> None:
        for row, top in zip(rows, tops, strict=True):
            target, (logprob, _) = next(iter(top.items()))
            self.nats.append(-logprob)
            self.likeliest.append(next(reversed(top)))
            self.norms.append(float(row[target]) - logprob)
        if keep:
            self.kept.append(rows.copy())  # the next step may overwrite them

    def compare(self, rows: NDArray[np.float32], reference: Scores) -> None:
        """Add KL(reference || this) of ``rows``, the last that were added."""
        [expected] = reference.kept
        end = len(self.norms)
        begin = end - len(rows)
        step = max(1, PART_ELEMENTS // rows.shape[1])
        for first in range(begin, end, step):
            last = min(first + step, end)
            norms = np.array(reference.norms[first:last], dtype=np.float64)
            shift = norms - np.array(self.norms[first:last])
            theirs = expected[first:last]
            # log p - log q = (their logit - ours) - (their norm - ours), averaged with p.
            odds = np.exp(theirs - norms.astype(np.float32)[:, None])
            difference = theirs - rows[first - begin : last - begin]
            means = np.einsum("rv,rv->r", odds, difference) / odds.sum(axis=1, dtype=np.float64)
            self.divergence += (means - shift).tolist()

    def join(self) -> None:
        """Make one array of the rows that were kept."""
        self.kept = [np.concatenate(self.kept)]


class Subject:
    """A variant's engine."""

    def __init__(
        self, variant: Variant, common: Mapping[str, Any], progress: Progress | None = None
    ) -> None:
        config = variant.config({**_DEFAULTS, **common})
        self.variant = variant
        self.model_name = _last_part(config.model or EMBEDDED_NAME)
        parts = build(config, progress)
        self._sampler = WatchedSampler(parts.sampler)
        sampler = cast("TokenSampler", self._sampler)
        self.engine = LLMEngine(config, parts=replace(parts, sampler=sampler))
        #: Seconds of steps, without the scoring of their logits.
        self.seconds = 0.0

    @property
    def name(self) -> str:
        return self.variant.name

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
        mine = self.engine.tokenizer.encode(text.content)
        others = reference.engine.tokenizer.encode(text.content)
        place = first_difference(mine, others)
        if place is not None:
            ahead = [
                subject.engine.tokenizer.decode(ids[place : place + 4], skip_special_tokens=False)
                for subject, ids in ((self, mine), (reference, others))
            ]
            raise ConfigurationError(
                f"variant {self.name}: its tokenizer is not that of {reference.name}: token "
                f"{place:,} of the text begins {ahead[0]!r}, not {ahead[1]!r}: give --tokenizer, "
                "for all variants"
            )

    def score(
        self, prompt: list[int], num_scored: int, reference: Scores | None, *, keep: bool = False
    ) -> Scores:
        """Score the last ``num_scored`` tokens of a window. ``keep``: as the reference of others.

        Raises VmserveError for logits that are NaN or infinite.
        """
        scores = Scores()
        left = len(prompt) - 1 - num_scored  # tokens that are context only
        watching = 0.0

        def watch(logits: Logits, tops: list[TopTokens]) -> None:
            nonlocal left, watching
            began = perf_counter()
            skipped, left = min(left, len(tops)), max(0, left - len(tops))
            if skipped < len(tops):
                rows = _array(logits)[skipped:]
                scores.add(rows, tops[skipped:], keep=keep)
                if reference is not None:
                    scores.compare(rows, reference)
            watching += perf_counter() - began

        self._sampler.watch = watch
        began = perf_counter()
        self.engine.add_request("window", prompt, _PARAMS)
        while self.engine.has_unfinished:
            for failure in self.engine.step().failures:
                raise failure.error
        self.seconds += perf_counter() - began - watching
        if self._sampler.num_repaired_rows or not math.isfinite(sum(scores.nats)):
            raise VmserveError(f"variant {self.name}: its logits are NaN or infinite")
        if keep:
            scores.join()
        return scores

    def described(self) -> dict[str, Any]:
        """The variant and its weights, without paths."""
        runner = self.engine.runner
        assert isinstance(runner, ModelRunner), "build() made it"
        return {
            "name": self.name,
            "options": without_paths(self.variant.options),
            "model": self.model_name,
            "kv_dtype": str(self.engine.memory.layout.dtype),
            **_weights(runner.model),
        }

    def close(self) -> None:
        self.engine.close()


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
    network, config = model.network, model.config
    num_bytes = model.parameter_bytes
    if not isinstance(network, NativeDecoder):
        bits = 8 * num_bytes / config.num_weights
        return {"weight_bytes": num_bytes, "bits_per_weight": bits}
    assert isinstance(config.network, DecoderConfig), "what the native decoder runs"
    shapes = tensor_shapes(config.network).values()
    num_weights = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    if not config.network.tied_embeddings:
        num_weights -= config.vocab_size * config.network.embedding_size
    return {
        "weight_bytes": num_bytes,
        "bits_per_weight": 8 * network.packed_bytes / num_weights,
        "row_type": network.row_type,
    }


def _array(logits: Logits) -> NDArray[np.float32]:
    if isinstance(logits, np.ndarray):
        return logits
    array: NDArray[np.float32] = logits.float().cpu().numpy()
    return array
