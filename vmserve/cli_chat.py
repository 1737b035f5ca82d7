"""``vmserve chat``: a conversation in the terminal, with a running server or an own engine."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Generator, Iterator
from typing import IO, Annotated, Any, Protocol

import typer

from vmserve.async_llm import AsyncLLM
from vmserve.cli_options import with_engine_options
from vmserve.errors import ConfigurationError, InvalidRequestError, VmserveError
from vmserve.sampling import SamplingParams
from vmserve.server.scope import closing
from vmserve.types import RequestOutput

__all__ = ["ChatBackend", "LocalBackend", "RemoteBackend", "chat_command", "converse"]

Message = dict[str, str]

_HELP = "/new forgets the conversation, /system TEXT sets instructions, /exit (or Ctrl-D) ends."


class ChatBackend(Protocol):
    """Whoever answers."""

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """The pieces of the answer to ``messages``. Closing it ends the answer early.

        Raises :class:`~vmserve.errors.VmserveError`.
        """
        ...

    def close(self) -> None: ...


class LocalBackend:
    """An engine in this process. It steps in a thread of its own, where an interrupt of the
    answer cannot tear a step apart."""

    def __init__(self, sampling: dict[str, Any], engine_options: dict[str, Any]) -> None:
        self.engine = AsyncLLM(**engine_options)
        defaults = {**self.engine.default_sampling, "max_tokens": None}
        self._params = SamplingParams(**{**defaults, **sampling})
        self._runner = asyncio.Runner()
        self._ids = itertools.count()

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        text, token_ids = self.engine.tokenizer.apply_chat_template(messages)
        outputs = self.engine.generate(
            token_ids,
            self._params,
            request_id=f"chat-{next(self._ids)}",
            prompt=text,
            stream=True,
        )
        try:
            while (output := self._runner.run(_next(outputs))) is not None:
                yield "".join(choice.text for choice in output.outputs)
        finally:
            self._runner.run(_close(outputs))

    def close(self) -> None:
        self._runner.run(self.engine.shutdown())
        self._runner.close()


async def _next(outputs: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(outputs, None)


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    async with closing(outputs):
        pass


class RemoteBackend:
    """A server with the OpenAI API. ``url`` may end with ``/v1``."""

    def __init__(
        self, url: str, api_key: str | None, model: str | None, sampling: dict[str, Any]
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"{url!r} is not a URL: write e.g. http://127.0.0.1:8000")
        base = url.rstrip("/").removesuffix("/v1")
        self._url = f"{base}/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = {"stream": True, **sampling, **({"model": model} if model else {})}

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        body = json.dumps({"messages": messages, **self._options}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request) as response:
                yield from _pieces(response)
        except urllib.error.HTTPError as error:
            raise VmserveError(_told(error)) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise VmserveError(f"no answer from {self._url}: {reason}") from error

    def close(self) -> None:
        pass


def _pieces(response: IO[bytes]) -> Iterator[str]:
    for line in response:
        event = line.strip().removeprefix(b"data: ")
        if not event or event == b"[DONE]":
            continue
        chunk = json.loads(event)
        if "error" in chunk:
            raise VmserveError(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"].get("content") or ""


def _told(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(error.read())["error"]["message"])
    return f"the server answered {error.code} {error.reason}"


def converse(
    backend: ChatBackend, lines: Iterator[str], system: str | None, out: IO[str], notes: IO[str]
) -> None:
    """Answer each line until they end or ``/exit``; answers go to ``out``, all else to ``notes``.

    A question whose answer fails is forgotten, so that the conversation can go on.
    """
    messages = _start(system)
    for line in lines:
        text = line.strip()
        command, _, argument = text.partition(" ")
        if command == "/exit":
            return
        if command == "/new":
            messages = _start(system)
        elif command == "/system":
            system = argument or None
            messages = _start(system)
        elif command.startswith("/"):
            print(_HELP, file=notes)
        elif text:
            messages += _exchange(backend, messages, text, out, notes)


def _start(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []


def _exchange(
    backend: ChatBackend, messages: list[Message], text: str, out: IO[str], notes: IO[str]
) -> list[Message]:
    """The question and its answer, as far as it came; nothing if it failed."""
    question = {"role": "user", "content": text}
    answer = ""
    try:
        with contextlib.closing(backend.reply([*messages, question])) as pieces:
            for piece in pieces:
                answer += piece
                print(piece, end="", file=out, flush=True)
    except KeyboardInterrupt:
        print(" [stopped]", file=notes)
    except VmserveError as error:
        print(f"error: {error}", file=notes)
        if isinstance(error, InvalidRequestError):
            print("/new starts over with an empty conversation.", file=notes)
        return []
    print(file=out, flush=True)
    return [question, {"role": "assistant", "content": answer}]


def _typed_lines(stdin: IO[str]) -> Iterator[str]:
    """What is typed, with history and editing where the terminal has them; else the lines."""
    if not stdin.isatty():
        yield from stdin
        return
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # makes input() edit; absent from some builds
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D ends)", file=sys.stderr)


@with_engine_options
def chat_command(
    url: Annotated[
        str | None,
        typer.Argument(help="A running server. Without one, an engine is started here."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key, if it needs one.")] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    **engine_options: Any,
) -> None:
    """Chat in the terminal."""
    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**sampling)  # a wrong value is told before a model is loaded
    backend: ChatBackend
    if url is not None:
        unused = sorted(set(engine_options) - {"model"})
        if unused:
            raise ConfigurationError(
                f"{', '.join(unused)}: engine options have no effect on a running server"
            )
        backend = RemoteBackend(url, api_key, engine_options.get("model"), sampling)
    else:
        backend = LocalBackend(sampling, engine_options)
    with contextlib.closing(backend):
        if sys.stdin.isatty():
            print(_HELP, file=sys.stderr)
        converse(backend, _typed_lines(sys.stdin), system, sys.stdout, sys.stderr)
