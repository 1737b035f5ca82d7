"""Prefixes that the operator has pinned: files with a text, or (.json) messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vmserve.client.client import Client
from vmserve.errors import ConfigurationError
from vmserve.options import read_text
from vmserve.server.auth import KeyRing
from vmserve.text.tokenizer import Tokenizer

__all__ = ["Prefixes", "read_prefixes"]

logger = logging.getLogger(__name__)


def read_prefixes(paths: Iterable[Path]) -> dict[Path, str]:
    """Read the files. Raises :class:`~vmserve.errors.ConfigurationError`."""
    return {path: read_text(path, "pin_prefix") for path in paths}


class Prefixes:
    """The prefixes of one model: ``texts`` by file, pinned once for each isolated caller of
    ``keys``."""

    def __init__(self, texts: Mapping[Path, str], keys: KeyRing) -> None:
        self._texts = texts
        self._callers = {caller.isolation: caller for caller in keys.callers}.values()

    def tokens(self, tokenizer: Tokenizer, chat_template: str | None) -> dict[Path, list[int]]:
        """Their tokens; messages are rendered by the chat template.

        Raises :class:`~vmserve.errors.ConfigurationError` for what are no messages.
        """
        return {
            path: _encode(path, text, tokenizer, chat_template)
            for path, text in self._texts.items()
        }

    def lengths(self, tokens: Mapping[Path, Sequence[int]]) -> list[int]:
        """Tokens of each prefix that will be pinned."""
        return [len(each) for each in tokens.values() for _ in self._callers]

    async def pin(self, engine: Client, tokens: Mapping[Path, list[int]]) -> None:
        """Compute and pin them. Raises what pinning raises."""
        for path, token_ids in tokens.items():
            for caller in self._callers:
                pin = await engine.pin_prefix(
                    token_ids, cache_salt=caller.cache_salt(""), isolation=caller.isolation
                )
                whom = f" for {caller.isolation}" if caller.isolation else ""
                logger.info(
                    "pinned %d of the %d tokens of %s%s", pin.num_tokens, len(token_ids), path, whom
                )


def _encode(path: Path, text: str, tokenizer: Tokenizer, chat_template: str | None) -> list[int]:
    if path.suffix != ".json":
        return tokenizer.encode(text)
    try:
        messages: Any = json.loads(text)
        _, token_ids = tokenizer.apply_chat_template(
            messages, chat_template=chat_template, add_generation_prompt=False
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"pin_prefix: {path} is not a list of messages: {error}"
        ) from error
    return token_ids
