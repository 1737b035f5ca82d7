"""The file of replies: whole lines only, one writer, and what an earlier run wrote stays."""

from __future__ import annotations

import contextlib
import os
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from vmserve.batch.lines import LINE_START, Index, digest_of
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.system.files import lock_for_writing

__all__ = ["Output"]

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    line: int | None = None


class _WrittenReply(msgspec.Struct):
    custom_id: str | None
    response: _Response | None
    error: _Error | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code < 400


_REPLY: Final = msgspec.json.Decoder(_WrittenReply)


class Output:
    """Appends lines to ``path``, which nobody else can write meanwhile; ``-`` is standard output.

    ``is_file``: it keeps what is written, so that another run can go on with it. Closing it waits
    until the disk has all.

    Raises :class:`~vmserve.errors.ConfigurationError` if another run writes it.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        is_standard = str(path) == "-"
        self._path = path if is_standard else path.resolve()
        self._beside = self._path.with_name(f".{self._path.name}.part")
        self._fd = os.dup(1) if is_standard else os.open(path, _FLAGS, 0o666)
        try:
            self.is_file = not is_standard and stat.S_ISREG(os.fstat(self._fd).st_mode)
            if self.is_file:
                # A run that retries replaces the file: what was opened before is another one.
                lock_for_writing(self._fd, self._path, self._path)
                self._beside.unlink(missing_ok=True)  # of a run that was killed
                if overwrite:
                    os.ftruncate(self._fd, 0)
            self._size = os.fstat(self._fd).st_size
        except BaseException:
            os.close(self._fd)
            raise

    def resume(self, index: Index, *, retry_failed: bool) -> int:
        """Note in ``index`` what is finished and cut a last line that a kill has torn.

        With ``retry_failed`` lines that failed are taken out first. Returns how many are left in.

        Raises :class:`~vmserve.errors.ConfigurationError` for a file that is not the output of this
        input.
        """
        if retry_failed and not all(reply.succeeded for _, reply in self._replies()):
            self._drop_failed()
        digests, numbers = bytearray(), array("Q")
        num_failed = size = 0
        for line, reply in self._replies():
            size += len(line)
            num_failed += not reply.succeeded
            if reply.error is not None and reply.error.line is not None:
                numbers.append(reply.error.line)
            elif reply.custom_id is not None:
                digests += digest_of(reply.custom_id)
        if num_unknown := index.finish(digests, numbers):
            raise ConfigurationError(
                f"{self._path}: {num_unknown} of its lines answer no line of the input: give the "
                "input that it belongs to, another output, or --overwrite"
            )
        os.ftruncate(self._fd, size)
        self._size = size
        return num_failed

    def _replies(self) -> Iterator[tuple[bytes, _WrittenReply]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.endswith(b"\n"):
                        yield line, _REPLY.decode(line)
                    elif not (line.startswith(LINE_START) or LINE_START.startswith(line)):
                        raise ValueError
                except ValueError:
                    raise ConfigurationError(
                        f"{self._path}: line {number} is no reply of a batch: give another output, "
                        "or --overwrite"
                    ) from None

    def _drop_failed(self) -> None:
        """Replace the file by one without them, so that a kill leaves one or the other."""
        fd = os.open(self._beside, _FLAGS | os.O_EXCL, 0o666)
        try:
            lock_for_writing(fd, self._beside, self._path)
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            with open(fd, "wb", closefd=False) as file:
                file.writelines(line for line, reply in self._replies() if reply.succeeded)
            os.fsync(fd)
            self._beside.replace(self._path)
        except BaseException:
            self._beside.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def append(self, line: bytes) -> None:
        """Write a whole line, or none of it.

        Raises :class:`~vmserve.errors.VmserveError` if the system has no room.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.is_file:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self._size)
            raise VmserveError(
                f"{self._path}: {error.strerror}: what it has is kept; the same command goes on"
            ) from error
        self._size += len(line)

    def sync(self) -> None:
        """Return when the disk has what was written."""
        if self.is_file:
            os.fsync(self._fd)

    def close(self) -> None:
        try:
            self.sync()
        finally:
            os.close(self._fd)
