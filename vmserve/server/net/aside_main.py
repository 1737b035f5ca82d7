"""The process of :mod:`vmserve.server.net.aside_process`: one task a frame in, its result out."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from vmserve.client.transports.framing import receive_frame, send_frame
from vmserve.errors import InvalidRequestError
from vmserve.server.wire import parse_json

__all__ = ["main"]

_NICE: Final = 10
#: Memory that tasks never reach, including the interpreter's, in bytes.
_MAX_MEMORY: Final = 4 << 30


class _Tasks:
    def __init__(self) -> None:
        self._tokenizer: Any = None

    def parse(self, body: bytes) -> Any:
        return parse_json(body)

    def load_json(self, written: bytes) -> Any:
        return json.loads(written)

    def load(self, tokenizer: bytes) -> None:
        """Load the tokenizer of later tasks from JSON of the ``tokenizers`` library."""
        import tokenizers  # noqa: PLC0415 - bodies are parsed without it

        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.decode())

    def tokenize(self, text: str, add_special_tokens: bool, with_strings: bool) -> Any:
        """Return the number of tokens, their ids and, if wanted, their strings as JSON."""
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        strings = json.dumps(encoded.tokens).encode() if with_strings else None
        return len(encoded.ids), json.dumps(encoded.ids).encode(), strings


def _answer(tasks: _Tasks, frame: bytes) -> bytes:
    name, arguments = msgspec.msgpack.decode(frame)
    task: Callable[..., Any] = getattr(tasks, name)
    try:
        return msgspec.msgpack.encode((None, task(*arguments)))
    except InvalidRequestError as error:
        return msgspec.msgpack.encode((str(error), None))
    except OverflowError:
        return msgspec.msgpack.encode(("The request body holds an integer beyond 64 bits", None))


def main() -> None:
    """Answer frames on the socket whose number is the argument, until it ends."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    tasks = _Tasks()
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(OSError):
        while (frame := receive_frame(sock)) is not None:
            send_frame(sock, _answer(tasks, frame))


if __name__ == "__main__":
    main()
