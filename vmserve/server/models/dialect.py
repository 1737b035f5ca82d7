"""How a model's chats show tools, calls and reasoning."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vmserve.errors import ChatTemplateError, InvalidRequestError
from vmserve.server.config import ServerConfig
from vmserve.text.tokenizer import Tokenizer
from vmserve.tools import described
from vmserve.tools.reasoning import template_thinks
from vmserve.tools.registry import parser_for_template

__all__ = ["ChatDialect", "check_template"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """``parser``: how calls are written. ``describes_tools``: the system message describes tools,
    since the template does not. ``thinks``: answers begin with reasoning."""

    parser: str
    describes_tools: bool
    thinks: bool

    @classmethod
    def of(cls, model_template: str, config: ServerConfig) -> ChatDialect:
        """Read the template that ``config`` names, else the model's own."""
        template = config.chat_template or model_template
        parser = config.tool_call_parser or parser_for_template(template)
        describes_tools = not described.knows_tools(template)
        if describes_tools and template:
            parser = described.PARSER
            logger.info(
                "the chat template shows no tools: the system message tells of them, and calls are "
                "found as by --tool-call-parser %s",
                described.PARSER,
            )
        reasoning = config.reasoning_parser
        thinks = template_thinks(template) if reasoning == "auto" else reasoning == "think"
        return cls(parser, describes_tools, thinks)


def check_template(tokenizer: Tokenizer, chat_template: str | None) -> None:
    """Render a short chat, so that a broken template is reported at start.

    Raises :class:`~vmserve.errors.ChatTemplateError` for the ``chat_template`` given. The model's
    own template is logged as a warning, since completions work without one.
    """
    if not (chat_template or tokenizer.chat_template_text):
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=chat_template
        )
    except ChatTemplateError as error:
        if chat_template is not None:
            raise
        logger.warning("chats will be refused with 400: %s", error)
    except InvalidRequestError as error:  # the template may refuse this very message
        logger.warning("a chat of one user's message will be refused: %s", error)
