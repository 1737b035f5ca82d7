"""Engines that listen on another machine (``vmserve engine --listen``)."""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from vmserve.client.messages import Ready
from vmserve.client.transports.base import Facts
from vmserve.client.transports.restarts import Reconnecting
from vmserve.client.transports.sealed.identity import write_files
from vmserve.client.transports.sealed.link import Place, SealedChannel
from vmserve.client.transports.supervised import Channel
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.models.loader import Progress
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["SealedSource"]

logger = logging.getLogger(__name__)


class SealedSource:
    """The engine at ``place``, which was started, and is ended, by others.

    A connection that is lost is made again, with pauses, without an end; requests fail meanwhile
    with :class:`~vmserve.errors.EngineDeadError`. ``tokenizer``: a directory; None: the engine
    sends it. Connecting blocks for some seconds at most.

    :meth:`load` raises :class:`~vmserve.errors.EngineDeadError` if nothing is there, and
    :class:`~vmserve.client.transports.sealed.handshake.HandshakeError` for what is no engine,
    has another key or version, or serves another server.
    """

    most_cut = 8

    def __init__(self, place: Place, key: bytes, tokenizer: Path | None = None) -> None:
        self._place = place
        self._key = key
        self._tokenizer = tokenizer
        self._attempts = Reconnecting()

    def kv_cache_memory(self) -> int | str | None:
        return None

    def open(self, facts: Facts | None = None) -> SealedChannel:
        self._channel = SealedChannel(self._place, self._key)
        return self._channel

    @property
    def address(self) -> str:
        """Where the engine listens, or did last."""
        return self._channel.address

    def load(
        self,
        channel: Channel,
        progress: Progress,
        meanwhile: Callable[[], None],
        known: dict[str, Tokenizer],
    ) -> tuple[Ready, Tokenizer]:
        ready = channel.wait_ready(progress)
        name = ready.tokenizer if self._tokenizer is None else str(self._tokenizer)
        if name not in known:
            read = self._fetched(ready) if self._tokenizer is None else load_tokenizer(name)
            read.prepare_chat()
            known[name] = read
        return ready, known[name]

    def _fetched(self, ready: Ready) -> Tokenizer:
        """Load the tokenizer that the engine sends, from files that are there as long as it is."""
        directory = Path(tempfile.mkdtemp(prefix="vmserve-tokenizer-"))
        try:
            files = self._channel.fetch_tokenizer(ready.tokenizer)
            read = load_tokenizer(write_files(files, directory))
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        weakref.finalize(read, shutil.rmtree, directory, ignore_errors=True)
        return read

    def check_same(self, facts: Facts, first: Ready, ready: Ready) -> None:
        for name in ("model", "limits", "tokenizer", "weights"):
            if getattr(ready, name) != getattr(first, name):
                raise ConfigurationError(
                    f"the engine at {self.address} has another model than before: restart the "
                    "server"
                )

    def end_silent(self, channel: Channel, seconds: float, hang_timeout: float) -> None:
        logger.error(
            "nothing was heard of the engine at %s for %g s; ending the connection",
            self.address,
            seconds,
        )
        channel.kill()

    def has_ended(self, channel: Channel) -> None:
        logger.error("lost the engine at %s; connecting again", self.address)
        self._attempts = Reconnecting()

    def pause(self) -> float | None:
        return self._attempts.pause()

    def failed(self, error: VmserveError) -> None:
        self._attempts.failed(error)

    def is_back(self) -> None:
        logger.info("connected to the engine at %s again", self.address)

    async def leave(self) -> None:
        """It is others who end the engine."""
