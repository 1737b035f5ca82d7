"""Serve the application on a socket, and drain it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI

from vmserve.errors import EngineDeadError
from vmserve.server.context import ServerContext
from vmserve.server.limits import MAX_HEADER_BYTES
from vmserve.server.models.registry import Models
from vmserve.server.net.accept import Acceptor
from vmserve.server.net.connection import GuardedProtocol
from vmserve.server.net.listen import ConnectionLimits, cannot_bind, url_of

__all__ = ["serve", "stop_on_signals"]

logger = logging.getLogger(__name__)

_SWITCH_SECONDS: Final = 0.0005
#: Thresholds of the garbage collector. It visits all that requests hold while streams wait, so it
#: runs seldom, and after large requests (:mod:`vmserve.server.net.idle`).
_GC_THRESHOLDS: Final = (20_000, 20, 10)
#: Seconds after the drain for last bytes to leave, and for idle connections to close.
FLUSH_SECONDS: Final = 3.0
#: Seconds that a connection may wait for its next request. It is longer than that of clients and
#: balancers (httpx: 5, most balancers: 60): the server must not close first, just as they write.
_KEEP_ALIVE_SECONDS: Final = 75


class _Server(uvicorn.Server):
    """A uvicorn server that accepts within limits and leaves signals to its caller."""

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve the one socket there is by our own :class:`Acceptor`."""
        [listener] = sockets or []
        config = self.config
        acceptor = Acceptor(listener, self._make_protocol, config.ssl, self._limits)
        acceptor.listen()
        await super().startup(sockets=[])
        self.servers.append(acceptor)  # type: ignore[arg-type]
        acceptor.start()

    def _make_protocol(self) -> GuardedProtocol:
        protocol: GuardedProtocol = self.config.http_protocol_class(  # type: ignore[call-arg,assignment]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def main_loop(self) -> None:
        # What the original does ten times a second: the Date header changes once in one.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(
    app: FastAPI,
    listener: socket.socket,
    stop: asyncio.Event,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve what :func:`~vmserve.server.app.create_app` made until ``stop`` is set, then drain: new
    requests are refused at once, admitted ones have ``config.shutdown_timeout`` seconds, and the
    engines are shut down.

    ``ready`` is called when requests are taken. ``listener`` is closed at the end.

    Raises :class:`~vmserve.errors.EngineDeadError` if the only model's engine dies for good: after
    ``config.engine_death_linger`` seconds of 503, or when ``stop`` is set.
    """
    context: ServerContext = app.state.context
    # Threads that prepare requests let go of the interpreter's lock so often: each of the loop's
    # many waits for it would else take ten times as long.
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*_GC_THRESHOLDS)
    with contextlib.closing(listener):
        has_died = await _serve(app, context, listener, stop, ready)
    if has_died:
        raise EngineDeadError("the engine has died: restart the server")


async def _serve(
    app: FastAPI,
    context: ServerContext,
    listener: socket.socket,
    stop: asyncio.Event,
    ready: Callable[[], None],
) -> bool:
    """Returns whether the engines were dead at the end."""
    config, models, lifecycle = context.config, context.models, context.lifecycle
    server = _Server(
        uvicorn.Config(
            app,
            http=type("Protocol", (GuardedProtocol,), {"write_timeout": config.write_timeout}),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
            timeout_graceful_shutdown=int(FLUSH_SECONDS),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        ),
        ConnectionLimits.of(config),
    )
    running = asyncio.create_task(server.serve([listener]))
    try:
        while not (server.started or running.done()):
            await asyncio.sleep(0.01)
        ready()
        await _until_over(models, config.engine_death_linger, stop, running)
        lifecycle.draining = True
        if lifecycle.num_active:
            logger.info("draining: %d requests are being served", lifecycle.num_active)
        await lifecycle.until_idle(config.shutdown_timeout)
        has_died = models.errored
        await models.shutdown()
        await lifecycle.until_idle(FLUSH_SECONDS)
        return has_died
    finally:
        server.leave()
        try:
            await running
        except OSError as error:  # another server took the port while this one was loading
            raise cannot_bind(url_of(listener), error) from error
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


async def _until_over(
    models: Models, linger: float, stop: asyncio.Event, running: asyncio.Task[None]
) -> None:
    """Wait for ``stop``, the end of ``running``, or ``linger`` seconds after the engine's end."""
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(models.until_dead())
    try:
        ended, _ = await asyncio.wait(
            {running, stopping, dying}, return_when=asyncio.FIRST_COMPLETED
        )
        if ended == {dying}:
            logger.error("the engine is dead: answering 503 for %g s, then ending", linger)
            await asyncio.wait(
                {running, stopping}, timeout=linger, return_when=asyncio.FIRST_COMPLETED
            )
    finally:
        stopping.cancel()
        dying.cancel()
        await asyncio.gather(stopping, dying, return_exceptions=True)


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Generator[None, None, None]:
    """Set ``stop`` on SIGTERM or SIGINT; end the process at once on a second one."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        logger.info("stopping (%s)", number.name)
        stop.set()

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
