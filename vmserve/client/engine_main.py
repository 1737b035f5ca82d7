"""``python -m vmserve.client.engine_main FD``: serve an engine at the other end of a socket.

Started by :mod:`vmserve.client.transports.process`, never by hand.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
from functools import partial

# Until all is loaded: see vmserve.system.imports.
gc.disable()

import msgspec

from vmserve.client.codec import decode_to_engine, encode
from vmserve.client.messages import (
    FromEngine,
    Launch,
    Progress,
    Refused,
    Shutdown,
)
from vmserve.client.service import EngineService, ready_message
from vmserve.client.transports.framing import receive_frame, send_frame
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import EngineDeadError, FrameTooLargeError, VmserveError
from vmserve.system.heap import MemoryReturn
from vmserve.system.logs import configure_logging
from vmserve.system.processes import die_with
from vmserve.system.threads import keep_to

logger = logging.getLogger("vmserve.engine")

#: Thresholds of the garbage collector. It visits each token of each prompt while all wait, so it
#: runs seldom, and when the engine is idle.
_GC_THRESHOLDS = (50_000, 20, 10)
#: Exit status of an engine whose client has gone.
_EXIT_ORPHANED = 3


def main() -> int:
    # Both signals reach whole groups of processes. The server decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    data = receive_frame(sock)
    launch = None if data is None else decode_to_engine(data)
    if not isinstance(launch, Launch):
        return _EXIT_ORPHANED
    if not die_with(launch.parent_pid):
        return _EXIT_ORPHANED
    if launch.cpus:
        keep_to(launch.cpus)
    configure_logging(launch.log_level, launch.log_format, "engine")
    try:
        engine = _load(launch, sock)
    except VmserveError as error:
        _send(sock, Refused(error))
        return 1
    except Exception:  # as below
        logger.exception("the engine did not start")
        return 1
    # Loaded objects stay until the end: the garbage collector need not visit them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.enable()
    _send(sock, ready_message(engine))
    try:
        _serve(engine, sock)
    except EngineDeadError as error:
        logger.error("the engine stopped: %s", error)
        return 1
    except Exception:  # the process's boundary: the server sees that it ends
        logger.exception("the engine stopped")
        return 1
    finally:
        engine.close()
    return 0


def _load(launch: Launch, sock: socket.socket) -> LLMEngine:
    seen: dict[str, int] = {}

    def report(phase: str, done: int, total: int) -> None:
        """Send each percent once: the other side only shows it."""
        percent = 100 * done // max(total, 1)
        if seen.get(phase) != percent:
            seen[phase] = percent
            _send(sock, Progress(phase, done, total))

    return LLMEngine(EngineConfig.from_options(launch.options), progress=report)


def _serve(engine: LLMEngine, sock: socket.socket) -> None:
    """Step in this thread and read in another until the client sends :class:`Shutdown`."""
    memory = MemoryReturn()

    def settled() -> None:
        if engine.has_unfinished:
            memory.trim()
        else:
            memory.give_back()

    service = EngineService(engine, partial(_send, sock), settled)
    reader = threading.Thread(
        target=_read, args=(sock, service), name="vmserve-messages", daemon=True
    )
    reader.start()
    service.run()


def _read(sock: socket.socket, service: EngineService) -> None:
    try:
        while (data := receive_frame(sock)) is not None:
            message = decode_to_engine(data)
            service.post(message)
            if isinstance(message, Shutdown):
                return
    except EngineDeadError:
        return  # the other thread says so
    except (OSError, FrameTooLargeError, msgspec.DecodeError) as error:
        logger.error("the connection to the server broke: %s", error)
    # Nobody reads what the engine sends. Its memory goes with the process.
    os._exit(_EXIT_ORPHANED)


def _send(sock: socket.socket, message: FromEngine) -> None:
    send_frame(sock, encode(message))


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # All is closed: taking the interpreter and its libraries apart would only take time.
    os._exit(status)
