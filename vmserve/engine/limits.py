"""What an engine and its model allow in a request."""

from __future__ import annotations

from dataclasses import dataclass

from vmserve.errors import InvalidRequestError
from vmserve.sampling.params import BeamSearchParams, GenerationParams

__all__ = ["RequestLimits"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checks requests without the engine: a client in another process has the same numbers.

    ``has_embeddings``: whether the model's hidden states can be had.
    """

    architecture: str
    has_embeddings: bool
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int

    def check(self, prompt_token_ids: list[int], params: GenerationParams) -> None:
        """Raises :class:`~vmserve.errors.InvalidRequestError`."""
        if not prompt_token_ids:
            raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
        lowest, highest = min(prompt_token_ids), max(prompt_token_ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InvalidRequestError(
                f"Token id {wrong} is out of vocabulary: "
                f"the model has ids 0 to {self.vocab_size - 1}",
                "prompt",
            )
        room = 0 if params.max_tokens == 0 else 1
        if len(prompt_token_ids) + room > self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens; the prompt "
                f"of {len(prompt_token_ids)} tokens is longer than the model's context length "
                f"less {room} for the answer: shorten it",
                "prompt",
            )
        sampling = params.as_sampling()
        if sampling.pooling is not None and not self.has_embeddings:
            raise InvalidRequestError(
                f"{self.architecture} gives no embeddings here: "
                "only the families of the decoder do",
                "pooling",
            )
        sampling.validate_for(self.vocab_size, self.max_logprobs)
        if isinstance(params, BeamSearchParams) and params.beam_width > self.max_num_seqs:
            raise InvalidRequestError(
                f"beam_width must be at most {self.max_num_seqs} here, got {params.beam_width} "
                "(less_than_equal): beams run together; raise --max-num-seqs",
                "beam_width",
            )
