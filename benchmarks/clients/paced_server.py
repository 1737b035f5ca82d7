"""A server whose every token leaves at an instant that is known beforehand.

    python benchmarks/clients/paced_server.py --record FILE [--port 0]

It speaks as much of the OpenAI API as load clients need. Request k (in order of arrival) gets
its first token after ``ttft(k)`` seconds and a further one every ``gap(k)``: nothing is computed,
so that what clients say of it can be compared with what happened. FILE gets a line of JSON for
each answer: when the request had arrived, and when each token was handed to the socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import IO, Any

MODEL = "paced"


def ttft(number: int) -> float:
    """Seconds: 40 to 120 ms, by turns."""
    return 0.040 + 0.010 * (number % 9)


def gap(number: int) -> float:
    """Seconds: 8 to 20 ms, by turns."""
    return 0.008 + 0.003 * (number % 5)


class PacedServer:
    """``record``: where answers are noted."""

    def __init__(self, record: IO[str]) -> None:
        self._record = record
        self._num_requests = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, of any number of requests."""
        try:
            while head := await _read_head(reader):
                lines = head.decode("latin-1").split("\r\n")
                method, path, _ = lines[0].split(" ", 2)
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    _reply(writer, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                else:
                    await self._answer(writer, json.loads(body), is_chat="chat" in path)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> None:
        arrived, number = time.perf_counter(), self._num_requests
        self._num_requests += 1
        num_tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        prompt = body.get("prompt") or body.get("messages")
        usage = {
            "prompt_tokens": len(prompt) if isinstance(prompt, list) else len(prompt.split()),
            "completion_tokens": num_tokens,
        }
        usage["total_tokens"] = sum(usage.values())
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        times = []
        for place in range(num_tokens):
            due = arrived + ttft(number) + place * gap(number)
            await _sleep_until(due)
            is_last = place == num_tokens - 1
            _write_event(writer, _chunk(number, " word", "length" if is_last else None, is_chat))
            times.append(time.perf_counter() - arrived)
        if (body.get("stream_options") or {}).get("include_usage"):
            _write_event(writer, {**_head(number, is_chat), "choices": [], "usage": usage})
        _write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        told = {"number": number, "arrived_s": arrived, "token_times_s": times}
        print(json.dumps(told), file=self._record, flush=True)


async def _sleep_until(due: float) -> None:
    """To some microseconds, which timers of an event loop are not good for: the last
    milliseconds are waited for in turns with the other answers."""
    if (left := due - time.perf_counter()) > 0.002:
        await asyncio.sleep(left - 0.0015)
    while time.perf_counter() < due:
        await asyncio.sleep(0)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _reply(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(content) + content)


def _head(number: int, is_chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": f"cmpl-{number}", "object": kind, "created": 0, "model": MODEL}


def _chunk(number: int, text: str, reason: str | None, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
    return {**_head(number, is_chat), "choices": [choice]}


def _write_event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    _write(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(port: int, record: IO[str]) -> None:
    server = await asyncio.start_server(PacedServer(record).handle, "127.0.0.1", port)
    number = server.sockets[0].getsockname()[1]
    print(f"ready: http://127.0.0.1:{number}", flush=True)
    async with server:
        await server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    with args.record.open("w") as record:
        asyncio.run(serve(args.port, record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
