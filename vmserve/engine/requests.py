"""Make the request that the scheduler knows of what a user asks for."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from vmserve.config import ResolvedConfig
from vmserve.decoding import BeamGroup, BeamSearch
from vmserve.engine.limits import RequestLimits
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.sampling import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.sampling.params import with_checked
from vmserve.sampling.tokens import token_list
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.types import RequestMetrics, RequestTerms

__all__ = ["RequestIntake", "memory_tenant", "request_limits"]


class RequestIntake:
    """Knows the model and the options, and no queue."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        model: ModelConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolved = resolved
        self._model = model
        self._clock = clock
        self._num_arrived = 0

    def build(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        asked: GenerationParams,
        terms: RequestTerms,
    ) -> Request:
        """Make a checked request and its sequences, the next in order of arrival."""
        beams = asked if isinstance(asked, BeamSearchParams) else None
        params = asked.as_sampling()
        if params.pooling == "auto":
            params = with_checked(params, pooling=self._model.pooling)
        left = self._resolved.max_model_len - len(prompt_token_ids)
        max_tokens = left if params.max_tokens is None else min(params.max_tokens, left)
        arrival = self._num_arrived
        self._num_arrived += 1
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_list(prompt_token_ids),
            params=params,
            max_tokens=max_tokens,
            seed=self._seed_for(params, arrival),
            arrival=arrival,
            metrics=RequestMetrics(arrival_time=self._clock()),
            priority=terms.priority,
            rank=terms.priority if self._resolved.scheduling_policy == "priority" else 0,
            tenant=terms.tenant,
            memory_tenant=memory_tenant(terms.isolation),
            cache_salt=terms.cache_salt.encode(),
            stream=terms.stream,
            stop_ids=stop_ids | frozenset(self._model.eos_token_ids),
            num_branches=params.num_sequences,
        )
        num_sequences = 1 if beams else request.num_branches
        request.sequences = [
            Sequence(request, index, token_list(prompt_token_ids), len(prompt_token_ids))
            for index in range(num_sequences)
        ]
        if beams is not None:
            search = BeamSearch(
                beams.beam_width,
                max_tokens,
                length_penalty=beams.length_penalty,
                early_stopping=beams.early_stopping,
                min_tokens=beams.min_tokens,
                # A grammar itself decides where an answer may end.
                eos_token_ids=()
                if beams.ignore_eos and beams.structured_outputs is None
                else self._model.eos_token_ids,
            )
            request.beams = BeamGroup(request, search, params.logprobs)
        return request

    def _seed_for(self, params: SamplingParams, arrival: int) -> int:
        if params.seed is not None:
            return params.seed % 2**63
        # Requests without a seed differ from each other, and repeat from run to run.
        return (self._resolved.seed * 0x9E3779B97F4A7C15 + arrival * 0xD1B54A32D192ED03 + 1) % 2**63


def request_limits(resolved: ResolvedConfig, model: ModelConfig) -> RequestLimits:
    return RequestLimits(
        architecture=model.architecture,
        has_embeddings=isinstance(model.network, DecoderConfig),
        vocab_size=model.vocab_size,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        max_logprobs=resolved.max_logprobs,
    )


def memory_tenant(isolation: str) -> int:
    """The memory core's tenant number: tenants never see what others left in pages."""
    if not isolation:
        return 0
    return int.from_bytes(hashlib.sha256(isolation.encode()).digest()[:8], "little", signed=True)
