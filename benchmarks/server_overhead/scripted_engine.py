"""An engine that computes nothing: a token per stream and step, at fixed intervals.

Started in the place of ``vmserve.client.engine_main`` by per_token.py. It loads the embedded model
to describe it, computes nothing, and waits ``VMSERVE_STEP_SECONDS`` between two steps.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time

from vmserve.client.codec import decode_to_engine, encode
from vmserve.client.messages import Abort, Add, Launch, Ping, Pong, Shutdown, StepUpdate
from vmserve.client.service import ready_message
from vmserve.client.transports.framing import receive_frame, send_frame
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import RequestMetrics


def main() -> None:
    sock = socket.socket(fileno=int(sys.argv[1]))
    launch = decode_to_engine(receive_frame(sock) or b"")
    assert isinstance(launch, Launch)
    engine = LLMEngine(EngineConfig.from_options(launch.options))
    send_frame(sock, encode(ready_message(engine)))
    engine.close()
    heard: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sock, heard), daemon=True).start()
    _speak(sock, heard, float(os.environ["VMSERVE_STEP_SECONDS"]))


def _read(sock: socket.socket, heard: queue.SimpleQueue[object]) -> None:
    while (data := receive_frame(sock)) is not None:
        message = decode_to_engine(data)
        if isinstance(message, Ping):
            send_frame(sock, encode(Pong(message.serial)))
        heard.put(message)
    os._exit(0)


def _speak(sock: socket.socket, heard: queue.SimpleQueue[object], step_seconds: float) -> None:
    left: dict[int, int] = {}
    while True:
        accepted: list[int] = []
        while not (left and heard.empty()):
            match heard.get():
                case Add() as add:
                    left[add.handle] = int(add.params.max_tokens or 16)
                    accepted.append(add.handle)
                case Abort() as abort:
                    left.pop(abort.handle, None)
                case Shutdown():
                    return
        if accepted:
            send_frame(sock, encode(StepUpdate(len(left), 0, accepted, [], [])))
        time.sleep(step_seconds)
        updates = [(handle, _update(num)) for handle, num in left.items()]
        left = {handle: num - 1 for handle, num in left.items() if num > 1}
        send_frame(sock, encode(StepUpdate(len(left), 0, [], updates, [])))


def _update(num_left: int) -> RequestUpdate:
    """A token that is a word, of which the last one ends the answer."""
    is_last = num_left == 1
    now = time.monotonic()
    metrics = RequestMetrics(now, now, now, now, now) if is_last else None
    choice = ChoiceUpdate(0, [300 + num_left % 50], -1.5, None, "length" if is_last else None, None)
    return RequestUpdate("", [choice], is_last, metrics)


if __name__ == "__main__":
    main()
