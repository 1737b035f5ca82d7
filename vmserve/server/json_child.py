"""The process of :mod:`vmserve.server.json_process`: bodies in, their values as MessagePack out."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
from typing import Final

import msgspec

from vmserve.errors import InvalidRequestError
from vmserve.ipc.framing import receive_frame, send_frame
from vmserve.server.wire import parse_json

__all__ = ["main"]

_NICE: Final = 10
#: Bytes that 4 MiB of JSON never take, with the interpreter.
_MAX_MEMORY: Final = 2 << 30


def _answer(body: bytes) -> bytes:
    try:
        value = parse_json(body)
    except InvalidRequestError as error:
        return msgspec.msgpack.encode((str(error), None))
    try:
        return msgspec.msgpack.encode((None, value))
    except OverflowError:
        return msgspec.msgpack.encode(("The request body holds an integer beyond 64 bits", None))


def main() -> None:
    """Answer frames on the socket whose number is the argument, until it ends."""
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
    with socket.socket(fileno=int(sys.argv[1])) as sock, contextlib.suppress(OSError):
        while (body := receive_frame(sock)) is not None:
            send_frame(sock, _answer(body))


if __name__ == "__main__":
    main()
