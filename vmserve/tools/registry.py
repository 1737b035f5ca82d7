"""Choose parsers by name or by the model's chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from vmserve.errors import ConfigurationError
from vmserve.tools.base import ToolParser
from vmserve.tools.hermes import HermesParser
from vmserve.tools.json_calls import LlamaParser, MistralParser
from vmserve.tools.pythonic import PythonicParser

__all__ = ["PARSERS", "check_parser", "parser_for_template"]

#: Makes a parser for each answer, with the names of the functions that can be called.
ParserFactory = Callable[[frozenset[str]], ToolParser]

PARSERS: Final[dict[str, ParserFactory]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "llama4_json": LlamaParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen": HermesParser,
}
#: Signs of a template that show its convention, in this order.
_SIGNS: Final = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)


def check_parser(name: str | None) -> None:
    """Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name."""
    if name is not None and name not in PARSERS:
        raise ConfigurationError(
            f"tool_call_parser: there is no {name!r}; there are {', '.join(sorted(PARSERS))}"
        )


def parser_for_template(template: str) -> str:
    """Return the parser's name; for a template without hints, the most common one."""
    return next((name for sign, name in _SIGNS if sign in template), "hermes")
