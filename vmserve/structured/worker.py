"""The process that compiles what requests bring, before the engine does: ``python -m`` this.

Frames on standard input and output: four bytes of length, then msgpack. The first one brings
the tokenizer; each further one a constraint, which is answered before the next is read. It ends
with its input, so it cannot outlive its parent by more than one compilation, which
``RLIMIT_CPU`` bounds.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
from llguidance import LLTokenizer

from vmserve.structured.grammar import BadGrammarError, vetted
from vmserve.structured.spec import Constraint

__all__ = ["Setup", "Verdict", "read_frame", "write_frame"]

MAX_FRAME_BYTES = 256 << 20
#: Address space that a compilation may take in addition to the tokenizer's.
EXTRA_BYTES = 256 << 20
#: Processor seconds of one compilation. The parent's clock is stricter, unless the parent died.
CPU_SECONDS = 4
#: Bytes of the stack, fewer than a thread has in the engine's process: overflows happen here.
STACK_BYTES = 2 << 20


class Setup(msgspec.Struct):
    """``tokenizer``: a ``tokenizers`` tokenizer as JSON. ``eos_ids``: empty, its own."""

    tokenizer: str
    vocab_size: int
    eos_ids: list[int]


class Verdict(msgspec.Struct, omit_defaults=True):
    """Either ``grammar``, and what compiling it added to the process, or ``error``."""

    grammar: str = ""
    cost_bytes: int = 0
    error: str | None = None


def write_frame(out: BinaryIO, data: bytes) -> None:
    out.write(len(data).to_bytes(4, "little") + data)
    out.flush()


def read_frame(source: BinaryIO) -> bytes | None:
    """Read a frame; None at the end of the input."""
    head = source.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        return None
    data = source.read(size)
    return data if len(data) == size else None


def make_tokenizer(setup: Setup) -> LLTokenizer:
    """Make llguidance's tokenizer. Raises ``ValueError`` for one that it does not know."""
    return LLTokenizer(setup.tokenizer, n_vocab=setup.vocab_size, eos_token=setup.eos_ids or None)


def _serve(source: BinaryIO, out: BinaryIO) -> None:
    first = read_frame(source)
    if first is None:
        return
    try:
        tokenizer = make_tokenizer(msgspec.msgpack.decode(first, type=Setup))
    except ValueError as error:
        write_frame(out, msgspec.msgpack.encode(Verdict(error=str(error)[:300])))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory(0) + EXTRA_BYTES, hard))
    write_frame(out, msgspec.msgpack.encode(Verdict()))
    while (frame := read_frame(source)) is not None:
        constraint = Constraint(*msgspec.msgpack.decode(frame, type=tuple[str, str]))
        _bound_time()
        before = _memory(1)
        try:
            grammar = vetted(constraint, tokenizer)
            verdict = Verdict(grammar, max(0, _memory(1) - before))
        except BadGrammarError as error:
            verdict = Verdict(error=str(error))
        except MemoryError:
            verdict = Verdict(error="it takes too much memory")
        write_frame(out, msgspec.msgpack.encode(verdict))


def _memory(column: int) -> int:
    """Return the process's memory in bytes: address space (0) or resident (1)."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def _bound_time() -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(usage.ru_utime + usage.ru_stime) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS, hard))


def main() -> None:
    # What libraries print must not mix with the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, out))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
