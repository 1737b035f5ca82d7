"""OpenAI's batch format: a request per line in, a reply per line out."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from vmserve.errors import ConfigurationError
from vmserve.server.limits import MAX_BODY_BYTES
from vmserve.server.wire import dump_json

__all__ = [
    "LINE_START",
    "MAX_LINE_BYTES",
    "Index",
    "Refusal",
    "Request",
    "digest_of",
    "parse_line",
    "read_lines",
    "refusal_line",
    "reply_line",
]

#: The longest body that the server takes, and what is around it.
MAX_LINE_BYTES: Final = 2 * MAX_BODY_BYTES
#: Start of every line of an output.
LINE_START: Final = b'{"id":"batch_req_'
_URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_BOM: Final = b"\xef\xbb\xbf"
_DIGEST_BYTES: Final = 16
_NO_DIGEST: Final = bytes(_DIGEST_BYTES)


class Request(NamedTuple):
    """``body``: the bytes of the line, which the server parses."""

    custom_id: str
    url: str
    body: bytes


class Refusal(NamedTuple):
    """Why the server never sees a line."""

    code: str
    message: str
    custom_id: str | None = None


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = None


_LINE: Final = msgspec.json.Decoder(_Line)
_BODY: Final = msgspec.json.Decoder(_Body)


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their end. One longer than :data:`MAX_LINE_BYTES` is cut after that."""
    first = True
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield (line.removeprefix(_BOM) if first else line).strip()
        first = False


def parse_line(line: bytes) -> Request | Refusal:
    if len(line) > MAX_LINE_BYTES:
        return Refusal("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    try:
        given = _LINE.decode(line)
    except (ValueError, RecursionError) as error:
        return Refusal("invalid_json_line", f"The line is not a JSON object: {error}.")
    custom_id = given.custom_id
    if not isinstance(custom_id, str) or not custom_id:
        return Refusal("invalid_custom_id", "custom_id must be a text that is not empty.")
    if given.method != "POST":
        return Refusal("invalid_method", 'method must be "POST".', custom_id)
    if given.url not in _URLS:
        return Refusal("invalid_url", f"url must be one of {', '.join(_URLS)}.", custom_id)
    body = bytes(given.body)
    if not body:
        return Refusal("missing_required_parameter", "body is missing.", custom_id)
    try:
        streams = bool(_BODY.decode(body).stream)
    except ValueError:  # no object: the server says what is wrong
        streams = False
    if streams:
        return Refusal(
            "invalid_stream", "Replies of a batch are whole: leave out stream.", custom_id
        )
    return Request(custom_id, given.url, body)


def reply_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """Make the line of a reply. ``body``: compact JSON."""
    return b'%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":null}\n' % (
        _head(custom_id),
        status,
        dump_json(request_id),
        body,
    )


def refusal_line(number: int, refusal: Refusal) -> bytes:
    """Make the line of an input line, by its ``number``, that the server does not see."""
    error = {"code": refusal.code, "message": refusal.message, "param": None, "line": number}
    return b'%b,"response":null,"error":%b}\n' % (_head(refusal.custom_id), dump_json(error))


def _head(custom_id: str | None) -> bytes:
    return b'%b%b","custom_id":%b' % (LINE_START, uuid.uuid4().hex.encode(), dump_json(custom_id))


def digest_of(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()


class Index:
    """Which lines of an input there are, in 18 bytes a line.

    ``is_left[i]``: line ``i + 1`` waits for its reply; blank lines never do. ``is_refused[i]``: the
    server does not see it. Raises :class:`~vmserve.errors.ConfigurationError` for two lines with
    one custom_id, whose replies nobody could tell apart.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        digests, left, refused = bytearray(), bytearray(), bytearray()
        for line in lines:
            parsed = parse_line(line)
            left.append(bool(line))
            refused.append(bool(line) and isinstance(parsed, Refusal))
            digests += _NO_DIGEST if parsed.custom_id is None else digest_of(parsed.custom_id)
        self.is_left = np.frombuffer(left, np.bool_)
        self.is_refused = np.frombuffer(refused, np.bool_)
        self._digests = _as_digests(digests)
        named = np.flatnonzero(self._digests != b"")
        _, firsts, which = np.unique(self._digests[named], return_index=True, return_inverse=True)
        again = np.delete(np.arange(len(named)), firsts)
        if len(again):
            first, second = named[firsts[which[again[0]]]] + 1, named[again[0]] + 1
            raise ConfigurationError(
                f"line {second} of the input has the custom_id of line {first}, and {len(again):,} "
                "in all have one of a line before: give each line its own"
            )
        self.num_lines = self.num_left

    @property
    def num_left(self) -> int:
        return int(np.count_nonzero(self.is_left))

    def finish(self, digests: bytearray, numbers: Iterable[int]) -> int:
        """Note finished requests by ``digests`` and refused lines by ``numbers``.

        Returns how many of them are not of this input.
        """
        given = np.unique(_as_digests(digests))
        num_unknown = len(given)
        if num_unknown:
            nearest = given.take(np.searchsorted(given, self._digests), mode="clip")
            finished = self.is_left & ~self.is_refused & (nearest == self._digests)
            num_unknown -= int(np.count_nonzero(finished))
            self.is_left &= ~finished
        for number in numbers:
            if 0 < number <= len(self.is_left) and self.is_refused[number - 1]:
                self.is_left[number - 1] = False
            else:
                num_unknown += 1
        return num_unknown


def _as_digests(digests: bytearray) -> npt.NDArray[np.bytes_]:
    return np.frombuffer(digests, f"S{_DIGEST_BYTES}")
