"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.server.access.scope import unless_disconnected
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError
from vmserve.server.limits import MAX_CONTEXTS
from vmserve.server.models.served import ServedModel
from vmserve.server.net.aside_process import MOST_CHARS_IN_THREAD, Tokens
from vmserve.server.routes.body import read_model
from vmserve.server.routes.chat import render_chat
from vmserve.server.routes.prompts import check_vocabulary
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.messages import check_tools
from vmserve.server.words.protocol import DetokenizeRequest, TokenizeRequest

__all__ = ["TokenizationService"]


class TokenizationService:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def tokenize(self, request: Request) -> Response:
        """``{count, max_model_len, tokens, token_strs}`` of a prompt or a conversation."""
        body = await read_model(request, TokenizeRequest)
        served = await self._context.model_of(request, body)
        work = self._context.run_aside(request, lambda: self._reply(served, body))
        reply = await unless_disconnected(request.receive, work)
        return Response(reply, media_type=JSON_TYPE)

    def _reply(self, served: ServedModel, body: TokenizeRequest) -> bytes:
        tokens = self._tokens(served, body)
        return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
            tokens.num_ids,
            served.max_model_len,
            tokens.ids,
            tokens.strings or b"null",
        )

    def _tokens(self, served: ServedModel, body: TokenizeRequest) -> Tokens:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        text = body.prompt
        tokenizer, with_strings = served.engine.tokenizer, bool(body.return_token_strs)
        special = body.add_special_tokens is not False
        if text is not None and len(text) > MOST_CHARS_IN_THREAD:
            return self._context.processes.tokenize(tokenizer, text, special, with_strings)
        if text is None:
            # Tools are only shown to the template here: nothing would call them.
            tools = check_tools(body.tools, "none")
            most = MAX_CONTEXTS * served.max_model_len
            ids = render_chat(body, served, tools, most).token_ids
        else:
            ids = tokenizer.encode(text, special)
        strings = dump_json(list(map(tokenizer.token_str, ids))) if with_strings else None
        return Tokens(len(ids), dump_json(ids), strings)

    async def detokenize(self, request: Request) -> Response:
        """``{prompt}``: the text of the ids, special tokens kept."""
        body = await read_model(request, DetokenizeRequest)
        context = self._context
        served = await context.model_of(request, body)

        def decode() -> bytes:
            check_vocabulary("tokens", body.tokens, served.engine.model_config.vocab_size)
            return dump_json({"prompt": served.engine.tokenizer.decode(body.tokens, False)})

        work = context.run_aside(request, decode)
        reply = await unless_disconnected(request.receive, work)
        return Response(reply, media_type=JSON_TYPE)

    async def info(self, request: Request) -> Response:
        """The tokenizer's own configuration, where the server was asked to show it."""
        info = self._context.models.find(request.query_params.get("model")).config.tokenizer_info
        if info is None:
            raise ApiError(404, "Start the server with --enable-tokenizer-info-endpoint for this.")
        return Response(dump_json(info), media_type=JSON_TYPE)
