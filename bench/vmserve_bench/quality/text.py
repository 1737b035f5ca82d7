"""The text that variants are judged by, and the windows in which it is scored."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vmserve.errors import ConfigurationError
from vmserve_bench.workloads.texts import OWN_TEXT

if TYPE_CHECKING:
    from vmserve.text.tokenizer import Tokenizer

__all__ = ["Text", "Windows", "cut", "first_difference", "read_text"]


class Text(NamedTuple):
    name: str
    content: str

    def described(self) -> dict[str, Any]:
        encoded = self.content.encode()
        digest = sha256(encoded).hexdigest()
        return {"name": self.name, "num_bytes": len(encoded), "sha256": digest}


@dataclass(frozen=True, slots=True)
class Windows:
    """Prompts of equal length that overlap; of each the last ``num_scored`` tokens are scored.

    So each token is scored once, after ``len(prompt) - num_scored`` others at least. The first
    tokens of the text have fewer before them and are not scored, nor is an incomplete window at
    its end.
    """

    prompts: list[list[int]]
    num_scored: int
    #: Tokens that the tokenizer puts before a text (BOS); each prompt begins with them.
    leading: list[int]


def read_text(path: Path | None) -> Text:
    """Read a UTF-8 file; the text of the package without a path. Raises ConfigurationError."""
    if path is None:
        return Text("the text of the package", OWN_TEXT.read_text(encoding="utf-8"))
    try:
        return Text(path.name, path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"--text {path}: it is not UTF-8 text: byte {error.start} is "
            f"0x{error.object[error.start]:02x}"
        ) from None


def cut(tokenizer: Tokenizer, text: str, *, size: int, stride: int) -> Windows:
    """Cut ``text`` into windows of ``size`` tokens, each ``stride`` after the one before.

    Raises ConfigurationError for a text without one window.
    """
    if stride >= size:
        raise ConfigurationError(
            f"--stride: {stride} leaves no token of a window of {size} as context: lower it below "
            "--window"
        )
    ids = tokenizer.encode(text, add_special_tokens=False)
    nothing, letter = tokenizer.encode(""), tokenizer.encode("a")
    leading = nothing[: first_difference(nothing, letter)]  # the rest is what ends a text
    num_own = size - len(leading)
    starts = range(0, len(ids) - num_own + 1, stride)
    if stride > num_own or not starts:
        raise ConfigurationError(
            f"--window: the text has {len(ids):,} tokens, fewer than a window of {size}: give a "
            "longer --text or a smaller --window"
        )
    return Windows([leading + ids[at : at + num_own] for at in starts], stride, leading)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place at which two lists differ; None for equal ones."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
