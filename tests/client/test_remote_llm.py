"""An engine behind TCP: who is let in, what is found out on the way, what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.harness import free_port
from tests.clients import FleetClient, RemoteClient
from tests.support.loops import everything, until
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
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.content import fingerprint
from vmserve.models.hub import resolve_model
from vmserve.text.tokenizer import Tokenizer, load_tokenizer
from vmserve.version import __version__

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


def greet(sock: socket.socket) -> SessionKeys:
    return greet_engine(sock, KEY)


def shaken(
    server: Callable[[socket.socket], Any] = greet, engine_key: bytes = KEY, is_free: bool = True
) -> tuple[Any, BaseException | None]:
    """What ``server`` returns or raises at its end, and what a handshake raises at the engine's."""
    ours, theirs = socket.socketpair()

    def engine() -> None:
        with theirs:
            greet_server(theirs, engine_key, lambda: is_free, lambda: None)

    with ThreadPoolExecutor(1) as threads:
        greeted = threads.submit(engine)
        with ours:
            try:
                end = server(ours)
            except HandshakeError as error:
                end = error
    return end, greeted.exception()


def test_both_sides_get_in_with_one_key_and_neither_with_two() -> None:
    keys, error = shaken()
    assert isinstance(keys, SessionKeys)
    assert error is None
    server, engine = shaken(engine_key=KEY[::-1])
    assert "the engine has another key" in str(server)
    assert "the server has another key" in str(engine)


def test_an_engine_that_is_taken_says_so_to_those_who_know_the_key() -> None:
    assert [type(each) for each in shaken(is_free=False)] == [TakenError, TakenError]


def test_a_recorded_handshake_opens_no_door() -> None:
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
        greet(recorder)
        return bytes(recorder.said)

    said, error = shaken(honest)
    assert error is None

    def repeat(sock: socket.socket) -> None:
        sock.sendall(said)
        while sock.recv(4096):
            pass

    assert "has another key" in str(shaken(repeat)[1])


@settings(max_examples=40, deadline=None)
@given(st.booleans(), st.integers(0, 74 + 33 - 1), st.integers(0, 7))
def test_a_bit_changed_in_a_handshake_lets_nobody_in(
    is_of_engine: bool, place: int, bit: int
) -> None:
    """Also a downgrade: versions are in the hellos, which proofs and keys are made of."""
    (ours, server_end), (engine_end, theirs) = socket.socketpair(), socket.socketpair()
    keys: list[SessionKeys] = []

    def come(sock: socket.socket, side: Callable[[socket.socket], SessionKeys]) -> None:
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
    with server_end, engine_end, ThreadPoolExecutor(4) as threads:
        answer = lambda sock: greet_server(sock, KEY, lambda: True, lambda: None)  # noqa: E731
        threads.submit(come, ours, greet)
        threads.submit(come, theirs, answer)
        threads.submit(relay, server_end, engine_end, None if is_of_engine else place)
        threads.submit(relay, engine_end, server_end, place if is_of_engine else None)
    # The engine answers a proof that is right before it can know that its answer will be changed.
    assert len(keys) == int(is_of_engine and place >= 74)


def echoes(sock: socket.socket) -> None:
    """An impostor that repeats what the server says."""
    sock.sendall(sock.recv(4096))
    proof = sock.recv(4096)
    sock.sendall(b"\0" + proof)


def is_weak(sock: socket.socket) -> None:
    """It has a key that agrees with all."""
    hello = bytearray(sock.recv(4096))
    hello[-32:] = bytes(32)
    sock.sendall(hello)
    sock.recv(4096)


def is_older(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.sendall(struct.pack(">8sH32s32s", b"vmserve\0", 77, b"0.0.7", b"n" * 32))
    sock.recv(4096)


def is_web(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def is_silent(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (echoes, ["does not know the key"]),
        (is_weak, ["a key that is none"]),
        (is_older, ["0.0.7 (protocol 77)", f"{__version__} (protocol {handshake.PROTOCOL})"]),
        (is_web, ["does not speak"]),
        (is_silent, ["did not answer within"]),
        (lambda sock: None, ["closed the connection"]),
    ],
)
def test_foreign_listeners_end_in_one_line(
    answer: Callable[[socket.socket], None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is is_silent:
        monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.3)
    with listening(answer) as address, pytest.raises(HandshakeError) as caught:
        SealedChannel(address, KEY).wait_ready(lambda *_: None)
    assert all(each in str(caught.value) for each in words)


def test_where_nobody_listens_the_connection_is_refused() -> None:
    with pytest.raises(EngineDeadError, match="refused"):
        SealedChannel(f"127.0.0.1:{free_port()}", KEY).wait_ready(lambda *_: None)


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
    [final] = await everything(client.generate("Once upon a time", GREEDY))
    return list(final.outputs[0].token_ids), final.outputs[0].text


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[RemoteClient]:
    client = await asyncio.to_thread(RemoteClient, address, KEY)
    try:
        yield client
    finally:
        await client.shutdown()


@pytest.mark.timeout(300)
async def test_same_tokens_one_server_at_a_time_and_the_next_finds_the_engine_free() -> None:
    async with AsyncLLM(**OPTIONS) as llm:
        expected = await text_of(llm)
    with hosted() as (address, _):
        async with connected(address) as first:
            with pytest.raises(HandshakeError, match="another server"):
                await asyncio.to_thread(RemoteClient, address, KEY)
            async for output in first.generate([5] * 40, ENDLESS, stream=True):
                if output.outputs:
                    break  # what still runs when the server leaves is aborted
            assert await text_of(first) == expected
            await first.pin_prefix([7] * 64)
        second = await asyncio.to_thread(take, address)
        read, before = second.transport.ready, first.transport.ready
        assert (read.name, read.weights) == (before.name, before.weights)
        stats = await second.fetch_stats()
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
        await second.shutdown()


async def test_a_bad_question_gets_an_error_and_the_engine_goes_on() -> None:
    pin = {"pin": 1, "token_ids": [], "cache_salt": "", "isolation": ""}
    with hosted() as (address, _):
        async with connected(address) as client:
            await client.start()
            for question, arguments, why in (
                ("__class__", {}, "is no question"),
                ("stats", {"verbose": True}, "verbose"),
                ("pin_prefix", {"pin": 1}, "token_ids"),
                ("pin_prefix", {**pin, "token_ids": ["a"]}, "token_ids"),
                ("pin_prefix", {**pin, "token_ids": [-1]}, "token_ids"),
                ("set_kv_cache_memory", {"size": None}, "size"),
            ):
                with pytest.raises(ConfigurationError, match=why):
                    await client.ask(question, **arguments)  # type: ignore[arg-type]
            assert len((await text_of(client))[0]) == 12


async def test_silent_strangers_keep_nobody_out() -> None:
    with hosted() as (address, _), contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(parse_address(address, "engine")))
        async with connected(address) as client:
            await text_of(client)


class Door(contextlib.ExitStack):
    """Of an engine's host, with strangers who come."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers = _Strangers()

    def come(self, host: str, said: bytes = b"") -> tuple[socket.socket, socket.socket]:
        ours, theirs = (self.enter_context(each) for each in socket.socketpair())
        theirs.sendall(said)
        theirs.setblocking(False)
        self.strangers.enter(ours, host)
        return ours, theirs


def is_ended(theirs: socket.socket) -> bool:
    try:
        return theirs.recv(1) == b""
    except BlockingIOError:
        return False


def test_many_strangers_of_one_address_end_none_of_another() -> None:
    with Door() as door:
        _, first = door.come("10.0.0.1")
        others = [door.come("10.0.0.2")[1] for _ in range(40)]
        assert not is_ended(first)
        assert [is_ended(each) for each in others] == [True] * 25 + [False] * 15


def test_those_who_have_said_something_are_not_ended_for_silent_ones() -> None:
    with Door() as door:
        (_, waiting), (ours, heard) = (door.come("10.0.0.1", b"vmserve") for _ in range(2))
        ours.recv(100)
        door.strangers.heard(ours)
        silent = [door.come("10.0.0.1")[1] for _ in range(40)]
        assert not is_ended(waiting)
        assert not is_ended(heard)
        assert [is_ended(each) for each in silent] == [True] * 26 + [False] * 14
        door.strangers.leave(ours)
        assert not door.strangers._heard


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
async def test_a_second_server_waits_for_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with hosted() as (address, _):
        async with connected(address):
            with pytest.raises(TakenError, match="serves another server"):
                await asyncio.to_thread(connect_engines, [address], KEY)
            waits = asyncio.to_thread(connect_engines, [address], KEY, wait_seconds=250.0)
            second = asyncio.create_task(waits)
            await until(lambda: "waiting up to 250 s" in caplog.text)
        transport, _ = await second
        await transport.close()
    assert caplog.text.count("waiting up to") == 1


async def test_a_fleet_does_without_an_engine_that_serves_another_server() -> None:
    with hosted() as (taken, _), hosted() as (free, _):
        async with connected(taken):
            fleet = await asyncio.to_thread(FleetClient.connected, [taken, free], KEY)
            await fleet.start()
        await until(lambda: len(fleet.members) == 2)
        await fleet.shutdown()


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
async def test_a_lost_connection_fails_requests_and_is_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with hosted() as (address, _):
        async with connected(address) as client:
            expected = await text_of(client)
            stream = client.generate([5] * 40, ENDLESS, stream=True)
            while not (await anext(stream)).outputs:
                pass
            client.transport.channel.kill()
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert client.errored
            await until(lambda: not client.errored)
            assert await text_of(client) == expected
            assert (await client.fetch_stats())["engine_restarts_total"] == 1
    assert "connected to the engine" in caplog.text


@pytest.mark.timeout(300)
async def test_engines_serve_one_model_together_and_one_that_comes_later_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokenizer is fetched and loaded once for all, also for the one that comes later."""
    sources: list[Path] = []

    def load(source: Path) -> Tokenizer:
        sources.append(source)
        return load_tokenizer(source)

    monkeypatch.setattr("vmserve.client.transports.sealed.source.load_tokenizer", load)
    pinned, port = [7] * 64, free_port()
    with hosted() as (address, _):
        addresses = [address, f"127.0.0.1:{port}"]
        fleet = await asyncio.to_thread(FleetClient.connected, addresses, KEY)
        expected = await text_of(fleet)
        await fleet.pin_prefix(pinned)
        with hosted(port):
            await until(lambda: len(fleet.members) == 2)
            first, second = fleet.members
            fleet.transport.drain(first.name)
            assert await text_of(fleet) == expected
            [hit] = await everything(fleet.generate([*pinned, 5], GREEDY))
            assert hit.metrics.num_cached_tokens == len(pinned)

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
