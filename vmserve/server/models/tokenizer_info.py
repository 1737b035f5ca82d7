"""What ``/tokenizer_info`` reports."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.server.config import ServerConfig
from vmserve.server.models.dialect import check_template

if TYPE_CHECKING:
    from vmserve.text.tokenizer import Tokenizer

__all__ = ["tokenizer_info", "with_tokenizer"]


def with_tokenizer(config: ServerConfig, tokenizer: Tokenizer, *, shows_info: bool) -> ServerConfig:
    """The options for a model with this tokenizer, with which the chat template is checked."""
    check_template(tokenizer, config.chat_template)
    return replace(config, tokenizer_info=tokenizer_info(tokenizer.hf)) if shows_info else config


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """What ``transformers`` read from tokenizer_config.json for ``tokenizer``: tokens as
    strings, and nothing that names a place on this machine."""
    info = {
        name: _plain(value)
        for name, value in tokenizer.init_kwargs.items()
        if not _names_a_place(name, value)
    }
    info["tokenizer_class"] = type(tokenizer).__name__
    info["chat_template"] = tokenizer.chat_template
    return info


def _names_a_place(name: str, value: Any) -> bool:
    if name == "name_or_path" or name.endswith(("_file", "_path", "_dir")):
        return True
    return isinstance(value, str) and Path(value).is_absolute()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value if not isinstance(value, float) or math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
