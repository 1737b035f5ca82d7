"""A client of an engine that listens on another machine (``vmserve engine --listen``)."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from vmserve.client.messages import FromEngine, Ping, Pong, Ready
from vmserve.client.process_llm import ProcessLLM, Supervision
from vmserve.client.transports.sealed.identity import write_files
from vmserve.client.transports.sealed.link import Place, SealedLink
from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError, VmserveError
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["LINK_SERIAL", "RemoteLLM", "until_connected"]

logger = logging.getLogger(__name__)

#: Serial of a Pong from the engine's machine, sent during a step too: the network works.
LINK_SERIAL = -1
#: Pings without such an answer after which the network counts as cut.
_MOST_SILENT_PINGS = 8
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class RemoteLLM(ProcessLLM):
    """Does as :class:`ProcessLLM`, over TCP to the engine at ``place``.

    The engine was started, and is ended, by others. A connection that is lost is made again, with
    pauses, until :meth:`shutdown`; requests fail meanwhile with
    :class:`~vmserve.errors.EngineDeadError`. ``tokenizer``: a directory; None: the engine sends it.
    ``tokenizers``: those that were loaded already, by directory or by the digest that engines send,
    to which this one's is added. Connecting blocks for some seconds at most.

    Raises :class:`~vmserve.errors.EngineDeadError` if nothing is there, and
    :class:`~vmserve.client.transports.sealed.handshake.HandshakeError` for what is no engine,
    has another key or version, or serves another server.
    """

    def __init__(
        self,
        place: Place,
        key: bytes,
        *,
        supervision: Supervision | None = None,
        tokenizer: Path | None = None,
        tokenizers: dict[str, Tokenizer] | None = None,
    ) -> None:
        self._place = place
        self._key = key
        self._supervision = supervision or Supervision()
        self._options = {}
        self._process = link = self._spawn()
        try:
            ready = link.wait_ready(lambda phase, done, total: None)
            known = {} if tokenizers is None else tokenizers
            name = ready.tokenizer if tokenizer is None else str(tokenizer)
            if name not in known:
                read = _fetched(link, ready) if tokenizer is None else load_tokenizer(tokenizer)
                read.prepare_chat()
                known[name] = read
        except BaseException:
            link.close()
            raise
        self._adopt(EngineConfig(), ready, known[name])
        self._digest = ready.tokenizer
        self.name = ready.name
        #: Digest by which two engines' weights are compared.
        self.weights = ready.weights
        self._num_cut = 0

    @property
    def address(self) -> str:
        """Where the engine listens, or did last."""
        return self._link.address

    def _spawn(self) -> SealedLink:
        self._link = SealedLink(self._place, self._key)
        return self._link

    async def _connect(self) -> None:
        self._num_cut = 0
        await super()._connect()

    def _send_ping(self) -> None:
        self._num_cut += 1
        if self._num_cut > _MOST_SILENT_PINGS:
            self._end_silent(self._num_cut * self._supervision.ping_seconds)
        else:
            self._send_quietly(Ping(0))

    def _end_silent(self, seconds: float) -> None:
        logger.error(
            "nothing was heard of the engine at %s for %g s; ending the connection",
            self.address,
            seconds,
        )
        self._process.kill()

    def _receive(self, message: FromEngine) -> None:
        self._num_cut = 0
        if not (isinstance(message, Pong) and message.serial == LINK_SERIAL):
            super()._receive(message)

    async def _after_death(self) -> None:
        logger.error("lost the engine at %s; connecting again", self.address)
        self._retry_seconds = _LONGEST_PAUSE_SECONDS
        await until_connected(self._restart)
        self._num_restarts += 1
        logger.info("connected to the engine at %s again", self.address)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "content of the weights": self.weights}

    async def _check_same(self, ready: Ready) -> None:
        same = (ready.model, ready.limits, ready.tokenizer, ready.weights)
        if same != (self.model_config, self._limits, self._digest, self.weights):
            raise ConfigurationError(
                f"the engine at {self.address} has another model than before: restart the server"
            )


def _fetched(link: SealedLink, ready: Ready) -> Tokenizer:
    """Load the tokenizer that the engine sends, from files that are there as long as it is."""
    directory = Path(tempfile.mkdtemp(prefix="vmserve-tokenizer-"))
    try:
        read = load_tokenizer(write_files(link.fetch_tokenizer(ready.tokenizer), directory))
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    weakref.finalize(read, shutil.rmtree, directory, ignore_errors=True)
    return read


async def until_connected(connect: Callable[[], Awaitable[None]]) -> None:
    """Call ``connect``, after pauses that grow, until it raises no error of ours."""
    pause, logged = _FIRST_PAUSE_SECONDS, ""
    while True:
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        try:
            await connect()
        except VmserveError as error:
            if str(error) != logged:
                logged = str(error)
                logger.warning("not connected yet: %s", error)
        else:
            return
