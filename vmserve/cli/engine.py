"""``vmserve engine``: load a model and serve it to a server on another machine."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from vmserve.cli.options import with_engine_options
from vmserve.errors import ConfigurationError
from vmserve.system.hosts import warn_of_loopback
from vmserve.system.logs import LOG_FORMATS, configure_logging

__all__ = ["engine_command"]

logger = logging.getLogger("vmserve.engine")


@with_engine_options
def engine_command(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ] = None,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where a server may connect (its --engine)."),
    ] = "127.0.0.1:8100",
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with a key that the server has too (its --engine-key-file); make one with "
            "`openssl rand -hex 32`. What is sent is encrypted.",
        ),
    ] = None,
    log_format: Annotated[str, typer.Option(help="Format of the log: text or json.")] = "text",
    **options: Any,
) -> None:
    """Load a model and serve it to one server (vmserve serve --engine) at a time."""
    from vmserve.client.transports.sealed.handshake import read_key  # noqa: PLC0415 - `--help` needs it not
    from vmserve.client.transports.sealed.link import parse_address  # noqa: PLC0415 - as above

    if log_format not in LOG_FORMATS:
        raise ConfigurationError(f"log_format: {log_format!r} is not one of text, json")
    model = options.setdefault("model", model_argument)
    if model_argument not in (None, model):
        raise ConfigurationError("model: give one model")
    host, port = parse_address(listen, "listen")
    if key_file is None:
        raise ConfigurationError(
            "key_file: --key-file FILE is missing; make one with `openssl rand -hex 32`"
        )
    key = read_key(key_file, "key_file")
    configure_logging(logging.INFO, log_format, "engine")
    with _bind(host, port) as listener:
        _serve(options, listener, key)


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; nobody can connect until then."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"listen: cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error
    warn_of_loopback(host, str(address[0]), "give --listen an address, or 0.0.0.0:PORT")
    return listener


def _serve(options: dict[str, Any], listener: socket.socket, key: bytes) -> None:
    from vmserve.client.host import EngineHost  # noqa: PLC0415 - `--help` needs it not
    from vmserve.config import EngineConfig  # noqa: PLC0415 - as above
    from vmserve.engine.engine import LLMEngine  # noqa: PLC0415 - as above

    began = time.monotonic()
    engine = LLMEngine(EngineConfig.from_options(options))
    try:
        host = EngineHost(engine, listener, key)

        def leave(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            logger.info("stopping (%s)", signal.Signals(number).name)
            host.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)
        # Loaded objects stay until the end: the garbage collector need not visit them.
        gc.collect()
        gc.freeze()
        listener.listen(socket.SOMAXCONN)
        where, port = listener.getsockname()[:2]
        logger.info("loaded in %.1f s; listening on %s:%d", time.monotonic() - began, where, port)
        host.run()
    finally:
        engine.close()
    logger.info("stopped")
