"""An engine behind TCP: who is let in, what is found out on the way, what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.clients import FleetClient, RemoteClient, address_of
from vmserve import ConfigurationError, EngineDeadError, SamplingParams
from vmserve.cli.engine import _bind
from vmserve.client.async_llm import AsyncLLM
from vmserve.client.client import Client
from vmserve.client.engines.remote import connect_engines
from vmserve.client.host import EngineHost, _Strangers
from vmserve.client.transports.sealed import handshake
from vmserve.client.transports.sealed.handshake import (
    HandshakeError,
    SessionKeys,
    TakenError,
    greet_engine,
    greet_server,
)
from vmserve.client.transports.sealed.identity import (
    SentFile,
    digest_of,
    tokenizer_files,
    write_files,
)
from vmserve.client.transports.sealed.link import SealedChannel, parse_address
from vmserve.client.transports.sealed.stream import BrokenSealError, Opener, Sealer
from vmserve.client.transports.supervised import Supervision
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.content import fingerprint
from vmserve.models.hub import resolve_model
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

KEY = b"a key of exactly thirty-two byte"
OPTIONS = {"dtype": "float32", "kv_cache_memory": "64MiB", "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """An address at which ``answer`` is called with each connection, one after another."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError, HandshakeError):
                    answer(sock)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join()


# -- the handshake ----------------------------------------------------------------------------


def shaken(
    server_key: bytes, engine_key: bytes, is_free: bool = True
) -> tuple[Exception | None, Exception | None]:
    """What a handshake raises on the server's side, and on the engine's."""
    ours, theirs = socket.socketpair()
    found: list[Exception | None] = [None]

    def engine() -> None:
        with theirs:
            try:
                greet_server(theirs, engine_key, lambda: is_free, lambda: None)
            except HandshakeError as error:
                found[0] = error

    thread = threading.Thread(target=engine)
    thread.start()
    refusal = None
    with ours:
        try:
            greet_engine(ours, server_key)
        except HandshakeError as error:
            refusal = error
    thread.join()
    return refusal, found[0]


def test_both_sides_get_in_with_one_key_and_neither_with_two() -> None:
    assert shaken(KEY, KEY) == (None, None)
    server, engine = shaken(KEY, KEY[::-1])
    assert "the engine has another key" in str(server)
    assert "the server has another key" in str(engine)


def test_an_engine_that_is_taken_says_so_to_those_who_know_the_key() -> None:
    server, engine = shaken(KEY, KEY, is_free=False)
    assert [type(server), type(engine)] == [TakenError, TakenError]


def test_an_impostor_that_repeats_what_the_server_says_is_found() -> None:
    def echo(sock: socket.socket) -> None:
        sock.sendall(sock.recv(4096))
        proof = sock.recv(4096)
        sock.sendall(b"\0" + proof)

    with listening(echo) as address, pytest.raises(HandshakeError, match="does not know the key"):
        SealedChannel(address, KEY).wait_ready(lambda *_: None)


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.integers(0, 74 + 33 - 1), st.integers(0, 7))
def test_a_bit_changed_in_a_handshake_lets_nobody_in(
    is_of_engine: bool, place: int, bit: int
) -> None:
    """Also a downgrade: versions are in the hellos, which proofs and keys are made of."""
    (ours, server_end), (engine_end, theirs) = socket.socketpair(), socket.socketpair()
    keys: list[SessionKeys] = []

    def greet(sock: socket.socket, side: Callable[[socket.socket], SessionKeys]) -> None:
        with sock, contextlib.suppress(HandshakeError):
            keys.append(side(sock))

    def relay(source: socket.socket, target: socket.socket, place: int | None) -> None:
        num_passed = 0
        with contextlib.suppress(OSError):  # whoever is refused closes his end
            while data := bytearray(source.recv(4096)):
                if place is not None and 0 <= (index := place - num_passed) < len(data):
                    data[index] ^= 1 << bit
                num_passed += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    if not is_of_engine:
        place = min(place, 74 + 32 - 1)
    threads = [
        threading.Thread(target=greet, args=(ours, lambda sock: greet_engine(sock, KEY))),
        threading.Thread(
            target=greet,
            args=(theirs, lambda sock: greet_server(sock, KEY, lambda: True, lambda: None)),
        ),
        threading.Thread(
            target=relay, args=(server_end, engine_end, None if is_of_engine else place)
        ),
        threading.Thread(
            target=relay, args=(engine_end, server_end, place if is_of_engine else None)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in (server_end, engine_end):
        end.close()
    # The engine answers a proof that is right before it can know that its answer will be changed.
    assert len(keys) == int(is_of_engine and place >= 74)


def test_a_recorded_handshake_opens_no_door() -> None:
    def session(server: Callable[[socket.socket], bytes]) -> tuple[bytes, Exception | None]:
        ours, theirs = socket.socketpair()
        found: list[Exception] = []

        def engine() -> None:
            with theirs:
                try:
                    greet_server(theirs, KEY, lambda: True, lambda: None)
                except HandshakeError as error:
                    found.append(error)

        thread = threading.Thread(target=engine)
        thread.start()
        with ours:
            said = server(ours)
        thread.join()
        return said, found[0] if found else None

    class Recorder:
        """A socket that keeps what is sent."""

        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock
            self.said = b""

        def sendall(self, data: bytes) -> None:
            self.said += data
            self._sock.sendall(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

    def honest(sock: socket.socket) -> bytes:
        recorder: Any = Recorder(sock)
        greet_engine(recorder, KEY)
        return bytes(recorder.said)

    said, error = session(honest)
    assert error is None

    def repeat(sock: socket.socket) -> bytes:
        sock.sendall(said)
        while sock.recv(4096):
            pass
        return b""

    _, error = session(repeat)
    assert "has another key" in str(error)


def test_a_key_that_agrees_with_all_is_refused() -> None:
    def weak(sock: socket.socket) -> None:
        hello = bytearray(sock.recv(4096))
        hello[-32:] = bytes(32)
        sock.sendall(hello)
        sock.recv(4096)

    with listening(weak) as address, pytest.raises(HandshakeError, match="a key that is none"):
        SealedChannel(address, KEY).wait_ready(lambda *_: None)


def test_versions_that_differ_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(struct.pack(">8sH32s32s", b"vmserve\0", 77, b"0.0.7", b"n" * 32))
        sock.recv(4096)

    with listening(older) as address, pytest.raises(HandshakeError) as caught:
        SealedChannel(address, KEY).wait_ready(lambda *_: None)
    assert "0.0.7 (protocol 77)" in str(caught.value)
    assert f"{handshake.__version__} (protocol {handshake.PROTOCOL})" in str(caught.value)


def test_foreign_listeners_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)

    def web(sock: socket.socket) -> None:
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    def silent(sock: socket.socket) -> None:
        while sock.recv(4096):
            pass

    for answer, words in (
        (web, "does not speak"),
        (silent, "did not answer within"),
        (lambda sock: None, "closed the connection"),
    ):
        with listening(answer) as address, pytest.raises(HandshakeError, match=words):
            SealedChannel(address, KEY).wait_ready(lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EngineDeadError, match="refused"):
        SealedChannel(address, KEY).wait_ready(lambda *_: None)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=90).map(b"vmserve\0".__add__))
def test_a_stranger_gets_nothing_and_is_not_kept(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    claimed: list[bool] = []
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(HandshakeError):
            greet_server(theirs, KEY, lambda: bool(claimed.append(True)), lambda: None)
    assert not claimed


def test_addresses_and_keys_are_checked(tmp_path: Path) -> None:
    assert parse_address("[::1]:80", "engine") == ("::1", 80)
    for wrong in ("host", "host:", ":80", "host:65536", "::1:80", "host:x"):
        with pytest.raises(ConfigurationError, match="HOST:PORT"):
            parse_address(wrong, "engine")
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(ConfigurationError, match="16 to 4096") as caught:
        handshake.read_key(tmp_path / "short", "key_file")
    assert "secret" not in str(caught.value)


# -- frames -----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_ends_the_stream(data: st.DataObject) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    payloads = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
    stream = bytearray(b"".join(map(sealer.seal, payloads)))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    received: list[bytes] = []
    with pytest.raises(BrokenSealError):
        received.extend(opener.feed(bytes(stream)))
    assert received == payloads[: len(received)]
    assert len(received) < len(payloads)


def test_frames_cannot_be_repeated_left_out_or_sent_back() -> None:
    sealer = Sealer(KEY)
    first, second = sealer.seal(b"1"), sealer.seal(b"2")
    opener = Opener(KEY)
    pieces = [bytes([each]) for each in first]
    assert [p for piece in pieces for p in opener.feed(piece)] == [b"1"]
    for wrong in (first + first, second):
        with pytest.raises(BrokenSealError):
            list(Opener(KEY).feed(wrong))
    with pytest.raises(BrokenSealError):
        list(Opener(KEY[::-1]).feed(first))


def test_frames_are_secret_and_a_cut_stream_gives_whole_ones_only() -> None:
    sealer, secret = Sealer(KEY), b"what nobody reads" * 10
    stream = sealer.seal(secret) + sealer.seal(secret)
    assert all(stream.count(secret[i : i + 5]) == 0 for i in range(17))
    size = len(stream) // 2
    assert stream[:size] != stream[size:]
    for end in range(len(stream)):
        assert list(Opener(KEY).feed(stream[:end])) == [secret] * (end // size)


# -- the model's identity ---------------------------------------------------------------------


def test_a_tokenizer_travels_and_names_stay_in_their_directory(tmp_path: Path) -> None:
    source = Path(resolve_model(None))
    files = tokenizer_files(source)
    there = load_tokenizer(write_files(files, tmp_path))
    here = load_tokenizer(source)
    assert (there.to_json(), there.chat_template_text, there.eos_ids) == (
        here.to_json(),
        here.chat_template_text,
        here.eos_ids,
    )
    assert digest_of(files) != digest_of([files[0]._replace(content=b"{}"), *files[1:]])
    for name in ("../a.json", "/tmp/a.json", "a.so", ".json", "model.safetensors"):
        with pytest.raises(ConfigurationError):
            write_files([SentFile(name, 2, b"{}")], tmp_path)


def test_weights_that_differ_have_other_fingerprints(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"a" * 5000, b"a" * 5001, b"a" * 4999 + b"b", b"b" + b"a" * 4999):
        file.write_bytes(content)
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 4


# -- an engine --------------------------------------------------------------------------------


@contextlib.contextmanager
def hosted(
    port: int = 0, listener: socket.socket | None = None, **options: Any
) -> Iterator[tuple[str, EngineHost]]:
    engine = LLMEngine(EngineConfig.from_options({"model": None, **OPTIONS, **options}))
    listener = listener or socket.create_server(("127.0.0.1", port))
    host = EngineHost(engine, listener, KEY)
    address = "{}:{}".format(*listener.getsockname())
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        yield address, host
    finally:
        host.stop()
        thread.join()
        engine.close()


async def text_of(client: Client) -> tuple[list[int], str]:
    [final] = [output async for output in client.generate("Once upon a time", GREEDY)]
    return list(final.outputs[0].token_ids), final.outputs[0].text


async def exhaust(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.timeout(300)
def test_same_tokens_one_server_at_a_time_and_the_next_finds_the_engine_free() -> None:
    async def local() -> tuple[list[int], str]:
        async with AsyncLLM(**OPTIONS) as llm:
            return await text_of(llm)

    expected = asyncio.run(local())
    with hosted() as (address, _):
        first = RemoteClient(address, KEY)
        with pytest.raises(HandshakeError, match="another server"):
            RemoteClient(address, KEY)

        async def serve(client: RemoteClient) -> tuple[list[int], str]:
            stream = client.generate([5] * 40, ENDLESS, stream=True)
            async for output in stream:
                if output.outputs:
                    break  # what still runs when the server leaves is aborted
            reply = await text_of(client)
            await client.pin_prefix([7] * 64)
            await client.shutdown()
            return reply

        assert asyncio.run(serve(first)) == expected
        second = take(address)
        read, before = second.transport.ready, first.transport.ready
        assert (read.name, read.weights) == (before.name, before.weights)

        async def look(client: RemoteClient) -> None:
            stats = await client.fetch_stats()
            assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
            await client.shutdown()

        asyncio.run(look(second))


@pytest.mark.parametrize(
    ("question", "arguments", "why"),
    [
        ("__class__", {}, "is no question"),
        ("stats", {"verbose": True}, "verbose"),
        ("pin_prefix", {"pin": 1}, "token_ids"),
        (
            "pin_prefix",
            {"pin": 1, "token_ids": ["a"], "cache_salt": "", "isolation": ""},
            "token_ids",
        ),
        (
            "pin_prefix",
            {"pin": 1, "token_ids": [-1], "cache_salt": "", "isolation": ""},
            "token_ids",
        ),
        ("set_kv_cache_memory", {"size": None}, "size"),
    ],
)
def test_a_bad_question_gets_an_error_and_the_engine_goes_on(
    question: str, arguments: dict[str, object], why: str
) -> None:
    async def ask(address: str) -> tuple[list[int], str]:
        client = await asyncio.to_thread(RemoteClient, address, KEY)
        try:
            await client.start()
            with pytest.raises(ConfigurationError, match=why):
                await client.ask(question, **arguments)
            return await text_of(client)
        finally:
            await client.shutdown()

    with hosted() as (address, _):
        assert len(asyncio.run(ask(address))[0]) == 12


def test_silent_strangers_keep_nobody_out() -> None:
    async def serve(address: str) -> None:
        client = await asyncio.to_thread(RemoteClient, address, KEY)
        try:
            await text_of(client)
        finally:
            await client.shutdown()

    with hosted() as (address, _), contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(parse_address(address, "engine")))
        asyncio.run(serve(address))


def test_many_strangers_of_one_address_end_none_of_another() -> None:
    door = _Strangers()
    with contextlib.ExitStack() as stack:

        def come(host: str) -> socket.socket:
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            door.enter(ours, host)
            theirs.setblocking(False)
            return theirs

        def is_ended(theirs: socket.socket) -> bool:
            try:
                return theirs.recv(1) == b""
            except BlockingIOError:
                return False

        first = come("10.0.0.1")
        others = [come("10.0.0.2") for _ in range(40)]
        assert not is_ended(first)
        assert [is_ended(each) for each in others] == [True] * 25 + [False] * 15


def test_those_who_have_said_something_are_not_ended_for_silent_ones() -> None:
    door = _Strangers()
    with contextlib.ExitStack() as stack:

        def come(said: bytes = b"") -> tuple[socket.socket, socket.socket]:
            ours, theirs = (stack.enter_context(each) for each in socket.socketpair())
            theirs.sendall(said)
            theirs.setblocking(False)
            door.enter(ours, "10.0.0.1")
            return ours, theirs

        waiting, heard = come(b"vmserve"), come(b"vmserve")
        heard[0].recv(100)
        door.heard(heard[0])
        silent = [come() for _ in range(40)]
        for _, theirs in (waiting, heard, *silent[-14:]):
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
        assert all(theirs.recv(1) == b"" for _, theirs in silent[:-14])
        door.leave(heard[0])
        assert not door._heard


def test_a_handshake_that_is_cut_short_is_tried_again() -> None:
    met: list[socket.socket] = []

    def busy(sock: socket.socket) -> None:
        met.append(sock)
        if len(met) == 3:
            greet_server(sock, KEY, lambda: True, lambda: None)

    with listening(busy) as address:
        with pytest.raises(EngineDeadError, match="the engine closed the connection"):  # let in
            SealedChannel(address, KEY).wait_ready(lambda *_: None)
        assert len(met) == 3
        del met[:]
        met.extend([socket.socket()] * 3)
        with pytest.raises(HandshakeError, match="too many others connect to it"):
            SealedChannel(address, KEY).wait_ready(lambda *_: None)
        met[0].close()


@pytest.mark.timeout(300)
def test_a_second_server_waits_for_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with hosted() as (address, _), ThreadPoolExecutor(1) as threads:
        first = RemoteClient(address, KEY)
        with pytest.raises(TakenError, match="serves another server"):
            connect_engines([address], KEY)
        second = threads.submit(connect_engines, [address], KEY, wait_seconds=250.0)

        async def leave() -> None:
            await until(lambda: "waiting up to 250 s" in caplog.text)
            await first.shutdown()

        asyncio.run(leave())
        transport, _ = second.result()
        asyncio.run(transport.close())
    assert caplog.text.count("waiting up to") == 1


def test_a_fleet_does_without_an_engine_that_serves_another_server() -> None:
    async def join(fleet: FleetClient) -> None:
        await fleet.start()
        await first.shutdown()
        await until(lambda: len(fleet.members) == 2)
        await fleet.shutdown()

    with hosted() as (taken, _), hosted() as (free, _):
        first = RemoteClient(taken, KEY)
        asyncio.run(join(FleetClient.connected([taken, free], KEY)))


def test_an_engine_at_a_name_that_is_loopback_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a machine's own name is, with 127.0.1.1 in its /etc/hosts."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    for host, is_told in (("node7", True), ("localhost", False), ("127.0.0.1", False)):
        caplog.clear()
        _bind(host, 0).close()
        assert ("other machines cannot reach" in caplog.text) == is_told


def take(address: str) -> RemoteClient:
    """Connect, once the engine has finished with the server before."""
    while True:
        with contextlib.suppress(TakenError):
            return RemoteClient(address, KEY)


@pytest.mark.timeout(300)
def test_a_lost_connection_fails_requests_and_is_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def run(client: RemoteClient) -> None:
        expected = await text_of(client)
        stream = client.generate([5] * 40, ENDLESS, stream=True)
        while not (await anext(stream)).outputs:
            pass
        client.transport.channel.kill()
        with pytest.raises(EngineDeadError):
            await exhaust(stream)
        assert client.errored
        await until(lambda: not client.errored)
        assert await text_of(client) == expected
        assert (await client.fetch_stats())["engine_restarts_total"] == 1
        await client.shutdown()

    with hosted() as (address, _):
        asyncio.run(run(RemoteClient(address, KEY)))
    assert "connected to the engine" in caplog.text


PINNED = [7] * 64


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.timeout(300)
def test_engines_serve_one_model_together_and_one_that_comes_later_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer is fetched and loaded once for all, also for the one that comes later."""
    sources: list[Path] = []

    def load(source: Path) -> Tokenizer:
        sources.append(source)
        return load_tokenizer(source)

    monkeypatch.setattr("vmserve.client.transports.sealed.source.load_tokenizer", load)

    async def run(fleet: FleetClient, port: int) -> None:
        expected = await text_of(fleet)
        await fleet.pin_prefix(PINNED)
        with hosted(port):
            await until(lambda: len(fleet.members) == 2)
            first, second = fleet.members
            fleet.transport.drain(first.name)
            assert await text_of(fleet) == expected
            [hit] = [each async for each in fleet.generate([*PINNED, 5], GREEDY)]
            assert hit.metrics.num_cached_tokens == len(PINNED)

            # Its connection ends under a request without a token, which the other gets.
            reply = asyncio.create_task(text_of(fleet))
            while not second.requests:  # looked for in each turn: the answer is soon there
                await asyncio.sleep(0)
            fleet.transport.resume(first.name)
            lost: Any = second.transport
            lost.channel.kill()
            assert await reply == expected
            assert fleet.stats()["router_failovers_total"] == 1
            await until(lambda: second.state == "ready")
            assert len(sources) == 1
            assert sources[0].exists()
            await fleet.shutdown()

    with hosted() as (address, _):
        port = free_port()
        fleet = FleetClient.connected([address, f"127.0.0.1:{port}"], KEY)
        asyncio.run(run(fleet, port))


@pytest.mark.timeout(300)
def test_a_host_that_stops_answering_keeps_no_request(tmp_path: Path) -> None:
    """Its process is stopped; what it has not begun is answered by the other. It comes back."""
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    command = [sys.executable, "-m", "vmserve", "engine", "--key-file", str(key)]
    command += ["--dtype", "float32", "--kv-cache-memory", "64MiB"]
    processes = [subprocess.Popen([*command, "--listen", each]) for each in addresses]

    async def run(fleet: FleetClient) -> None:
        await fleet.start()
        await until(lambda: len(fleet.members) == 2)
        expected = await asyncio.gather(*(text_of(fleet) for _ in range(8)))
        stopped = next(each for each in fleet.members if address_of(each) == addresses[0])
        processes[0].send_signal(signal.SIGSTOP)
        assert await asyncio.gather(*(text_of(fleet) for _ in range(8))) == expected
        assert stopped.state in ("suspect", "down")
        processes[0].send_signal(signal.SIGCONT)
        await until(lambda: stopped.state == "ready")
        [other] = [each.name for each in fleet.members if each is not stopped]
        fleet.transport.drain(other)
        assert await text_of(fleet) == expected[0]
        await fleet.shutdown()

    try:
        while True:
            try:
                watched = Supervision(ping_seconds=0.5)
                fleet = FleetClient.connected(addresses, KEY, "round-robin", supervision=watched)
                break
            except EngineDeadError:  # neither listens yet
                time.sleep(0.1)
        asyncio.run(run(fleet))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_engines_with_other_weights_are_refused_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as (first, _):
        monkeypatch.setattr("vmserve.engine.build.fingerprint", lambda path, gguf=None: "others")
        with hosted() as (second, _):
            with pytest.raises(ConfigurationError, match="content of the weights"):
                connect_engines([first, second], KEY)
            for address in (first, second):
                asyncio.run(take(address).shutdown())


def test_without_any_engine_there_is_one_line() -> None:
    with pytest.raises(EngineDeadError, match="no engine at 127"):
        connect_engines([f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"], KEY)
