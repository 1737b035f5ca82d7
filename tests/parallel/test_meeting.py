"""How rank 0 finds the others among whoever connects."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

import msgspec
import pytest

from vmserve.parallel import meeting
from vmserve.parallel.launched import Placement
from vmserve.parallel.link import TcpLink


class Store(dict[str, Any]):
    def get(self, name: str, default: object = None) -> Any:  # type: ignore[override]
        return self[name].encode()

    set = dict.__setitem__


def framed(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def test_a_message_that_comes_in_pieces() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    link, data = TcpLink(ours), framed([1, "two"])
    ours.settimeout(60)
    with contextlib.closing(link), theirs:
        theirs.sendall(data[:6])
        rest = threading.Timer(0.1, theirs.sendall, [data[6:]])
        rest.start()
        assert link.receive() == ([1, "two"], [])
        rest.join()


def test_strangers_keep_no_rank_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    monkeypatch.setattr(meeting, "_launcher_store", lambda placement: store)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.0.1")
    caplog.set_level(logging.WARNING)
    host = meeting.Host(Placement(0, 2, 0, "node7", 29500))
    assert "node7 is 127.0.0.1 here, which other machines cannot reach: set MASTER" in caplog.text
    where = "127.0.0.1", int(store["rank-0"].split()[0])
    with contextlib.closing(host), contextlib.ExitStack() as stack:
        odd = [framed({"refused": value}) for value in (1, ["ValueError", "x", None])]
        for said in (*[b""] * 70, b"GET / HTTP/1.1\r\n\r\n", b"\1\0\0\0\x2a", *odd):
            stack.enter_context(socket.create_connection(where)).sendall(said)
        socket.create_connection(where).close()

        def come() -> None:
            visitor = meeting.Visitor(Placement(1, 2, 0, "127.0.0.1", 29500))
            stack.callback(visitor.connect("memory").close)
            stack.callback(visitor.connect("orders").close)

        rank = threading.Thread(target=come)
        rank.start()
        for what in ("orders", "memory"):
            stack.callback(host.accept(what, 1).close)
        rank.join()
