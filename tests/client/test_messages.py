"""What goes over the socket: frames, messages, errors, parameters."""

from __future__ import annotations

import socket

import msgspec
import pytest

from vmserve.client.codec import decode_from_engine, decode_to_engine, encode
from vmserve.client.messages import Add, Ping, Reply
from vmserve.client.transports import framing
from vmserve.client.transports.framing import FrameReader, frame, receive_frame, send_frame
from vmserve.errors import (
    DeadlineError,
    FrameTooLargeError,
    InvalidRequestError,
    OutOfMemoryError,
    VmserveError,
)
from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.scheduler.base import NoRoomError
from vmserve.structured.spec import StructuredOutputsParams
from vmserve.types import RequestTerms


def sent(params: GenerationParams) -> GenerationParams:
    """The parameters as they arrive in another process."""
    add = decode_to_engine(encode(Add(1, "r", [5], params, RequestTerms(), False)))
    assert isinstance(add, Add)
    arrived: GenerationParams = add.params
    return arrived


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_frames_come_together_from_any_pieces(size: int) -> None:
    sent = [b"", b"a", b"bc" * 300]
    stream = b"".join(map(frame, sent))
    reader = FrameReader()
    got = []
    for begin in range(0, len(stream), size):
        got += list(reader.feed(stream[begin : begin + size]))
    assert got == sent


def test_frames_of_a_blocking_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(ours, b"one")
        ours.sendall(frame(b"cut off")[:-1])
        ours.close()
        assert receive_frame(theirs) == b"one"
        assert receive_frame(theirs) is None


def test_frames_have_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 8)
    with pytest.raises(FrameTooLargeError, match=r"9 bytes .* limit of 8"):
        frame(b"123456789")
    with pytest.raises(FrameTooLargeError):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\x09\x00\x00\x00")
        with pytest.raises(FrameTooLargeError):
            receive_frame(theirs)


def test_what_is_no_message_is_refused() -> None:
    assert decode_to_engine(encode(Ping(3))) == Ping(3)
    for data in (b"", b"\xc1", msgspec.msgpack.encode(["Ping", "x"]), encode(Ping(1))[:-1]):
        with pytest.raises(msgspec.DecodeError):
            decode_to_engine(data)
    with pytest.raises(msgspec.ValidationError):
        decode_from_engine(encode(Ping(1)))  # this side does not say that


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("text", "prompt"), InvalidRequestError),
        (DeadlineError("text"), DeadlineError),
        (NoRoomError("id", "text"), OutOfMemoryError),
        (FrameTooLargeError("text"), VmserveError),
        (ValueError("text"), ValueError),
    ],
)
def test_errors_arrive_as_what_they_are(error: Exception, kind: type[Exception]) -> None:
    answer = decode_from_engine(encode(Reply(1, None, error)))
    assert isinstance(answer, Reply)
    assert type(answer.error) is kind
    assert str(answer.error) == str(error)
    assert getattr(answer.error, "param", None) == getattr(error, "param", None)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(n=2, best_of=3, temperature=0.5, seed=-1, max_tokens=None, logprobs=3),
        SamplingParams(logit_bias={5: -1.5, 6: 2}, allowed_token_ids=[5, 6], min_tokens=2),
        SamplingParams(bad_words=["x"], stop_token_ids=[7]),
        SamplingParams(stop=["a", "b"], include_stop_str_in_output=True),
        SamplingParams(structured_outputs={"json": {"type": "object"}}),
        BeamSearchParams(beam_width=3, early_stopping="never", length_penalty=0.5),
    ],
)
def test_parameters_arrive_as_they_were(params: GenerationParams) -> None:
    assert sent(params) == params


def test_the_name_of_a_constraint_arrives() -> None:
    wanted = StructuredOutputsParams(regex="a", param="guided_regex")
    arrived = sent(SamplingParams(structured_outputs=wanted))
    assert arrived.structured_outputs is not None
    assert arrived.structured_outputs.param == "guided_regex"


def test_terms_arrive_as_they_were() -> None:
    """Each of several engines keeps them: who is next, until when, whose prefixes are found."""
    terms = RequestTerms(
        priority=-1, cache_salt="s", tenant="t", isolation="i", timeout=2.5, stream=True
    )
    add = Add(7, "r", [5, 6], SamplingParams(), terms, is_stream=True)
    assert decode_to_engine(encode(add)) == add
