"""``POST /v1/embeddings``: final hidden states of the served model, pooled."""

from __future__ import annotations

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.sampling import SamplingParams
from vmserve.server.access.scope import unless_disconnected
from vmserve.server.context import ServerContext
from vmserve.server.models.served import ServedModel
from vmserve.server.routes.body import read_model
from vmserve.server.routes.generation import Generation, Job, terms_of
from vmserve.server.routes.prompts import encode_prompt, split_prompts
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.params import check_prompt, most_tokens, truncate
from vmserve.server.words.protocol import EmbeddingRequest
from vmserve.types import RequestOutput, shaped_embedding

__all__ = ["EmbeddingService"]


class EmbeddingService:
    """Texts in, vectors of length 1 out."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """The route."""
        body = await read_model(request, EmbeddingRequest)
        return await unless_disconnected(request.receive, self._create(request, body))

    async def _create(self, request: Request, body: EmbeddingRequest) -> Response:
        context = self._context
        served = await context.model_of(request, body)
        jobs = await context.run_aside(request, lambda: self._jobs(served, body))
        generation = Generation(
            context,
            served,
            request.state.exit_stack,
            f"embd-{request.state.request_id}",
            jobs,
            terms_of(request, body, served),
        )
        results = await generation.run()
        size = sum(result.embedding.size for result in results if result.embedding is not None)
        reply = await context.run_aside(
            request, lambda: _reply(results, body, served.name), 16 * size
        )
        return Response(reply, media_type=JSON_TYPE)

    def _jobs(self, served: ServedModel, body: EmbeddingRequest) -> list[Job]:
        most = served.max_model_len
        params = SamplingParams(max_tokens=0, pooling=body.pooling or "auto", detokenize=False)
        jobs = []
        for prompt in split_prompts(body.input, "input"):
            text, given = encode_prompt(
                self._context.processes,
                served,
                prompt,
                "input",
                add_special_tokens=body.add_special_tokens is not False,
                max_tokens=most_tokens(body, most),
            )
            token_ids = truncate(given, body, most)
            check_prompt(len(token_ids), most, "input")
            jobs.append(Job(text, token_ids, params))
        return jobs


def _reply(results: list[RequestOutput], body: EmbeddingRequest, model: str) -> bytes:
    num_tokens = sum(len(result.prompt_token_ids) for result in results)
    return dump_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _written(result, body)}
                for index, result in enumerate(results)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _written(result: RequestOutput, body: EmbeddingRequest) -> Any:
    if result.embedding is None:
        raise InvalidRequestError("this model gives no embeddings", "model")
    embedding = shaped_embedding(result.embedding, body.dimensions, normalize=True)
    if body.encoding_format == "base64":
        return base64.b64encode(embedding.astype("<f4").tobytes()).decode()
    return embedding.tolist()
