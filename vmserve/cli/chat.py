"""``vmserve chat``: chat in the terminal with a running server or an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Generator, Iterator
from typing import IO, Annotated, Any, Protocol

import typer

from vmserve.cli.options import server_url, with_engine_options
from vmserve.client.async_llm import AsyncLLM
from vmserve.errors import ConfigurationError, InvalidRequestError, VmserveError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.sampling import SamplingParams
from vmserve.server.access.scope import closing
from vmserve.text.prompts import Prompt
from vmserve.types import RequestOutput

__all__ = ["ChatBackend", "LocalBackend", "RemoteBackend", "chat_command", "converse"]

Message = dict[str, str]

_HELP = """\
/new            forgets the conversation
/system TEXT    sets instructions, and starts over
/history        shows the conversation
/undo           forgets the last question and its answer
/retry          asks the last question again
/model [NAME]   shows the models of a server, or changes to one
/exit, Ctrl-D   ends; Ctrl-C stops an answer"""


class ChatBackend(Protocol):
    """The side that answers."""

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        """Yield the pieces of the answer to ``messages``. Closing the generator ends the answer.

        Raises :class:`~vmserve.errors.VmserveError`.
        """
        ...

    def models(self) -> list[str]:
        """Names of the models that can be chosen, the current one first."""
        ...

    def choose(self, model: str) -> None:
        """Let ``model`` answer from now on. Raises :class:`~vmserve.errors.VmserveError`."""
        ...

    def close(self) -> None: ...


class LocalBackend:
    """An engine in this process.

    It steps in a thread of its own, so that Ctrl-C cannot interrupt a step.
    """

    def __init__(self, sampling: dict[str, Any], engine_options: dict[str, Any]) -> None:
        self.engine = AsyncLLM(**engine_options)
        defaults = {**self.engine.default_sampling, "max_tokens": None}
        self._params = SamplingParams(**{**defaults, **sampling})
        self._runner = asyncio.Runner()

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        text, token_ids = self.engine.tokenizer.apply_chat_template(messages)
        outputs = self.engine.generate(Prompt(text, token_ids), self._params, stream=True)
        try:
            while (output := self._runner.run(_next(outputs))) is not None:
                yield "".join(choice.text for choice in output.outputs)
        finally:
            self._runner.run(_close(outputs))

    def models(self) -> list[str]:
        return [self.engine.config.model or EMBEDDED_NAME]

    def choose(self, model: str) -> None:
        raise VmserveError("this engine has one model: start again with --model")

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
        self._base = f"{server_url(url)}/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._model = model
        self._options = {"stream": True, **sampling}

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        if self._model is None:  # most servers insist on a name
            self._model = next(iter(self.models()), None)
        named = {"model": self._model} if self._model else {}
        body = json.dumps({"messages": messages, **named, **self._options}).encode()
        with self._open("chat/completions", body) as response:
            yield from _pieces(response)

    def models(self) -> list[str]:
        with self._open("models") as response:
            try:
                names = [str(card["id"]) for card in json.loads(response.read())["data"]]
            except (ValueError, KeyError, TypeError) as error:
                raise VmserveError(f"{self._base}/models is no list of models") from error
        return sorted(names, key=lambda name: name != self._model)

    def choose(self, model: str) -> None:
        if model not in (known := self.models()):
            raise VmserveError(f"no such model: there are {', '.join(known)}")
        self._model = model

    @contextlib.contextmanager
    def _open(self, path: str, body: bytes | None = None) -> Iterator[IO[bytes]]:
        url = f"{self._base}/{path}"
        request = urllib.request.Request(url, body, self._headers)
        try:
            with urllib.request.urlopen(request) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise VmserveError(_reason(error)) from error
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise VmserveError(f"no answer from {url}: {reason}") from error

    def close(self) -> None:
        pass


def _pieces(response: IO[bytes]) -> Iterator[str]:
    """Yield the text in the data of events; comments and other fields are skipped."""
    for line in response:
        field, _, event = line.strip().partition(b":")
        if field != b"data" or event.strip() == b"[DONE]":
            continue
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise VmserveError(_message(chunk))
            texts = [choice["delta"].get("content") or "" for choice in chunk["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VmserveError("the server's stream is not one of chat completions") from error
        yield from texts


def _message(body: Any) -> str:
    """Message of an error in OpenAI's shape, or the error as text."""
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def _reason(error: urllib.error.HTTPError) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return _message(json.loads(error.read()))
    return f"the server answered {error.code} {error.reason}"


def converse(
    backend: ChatBackend, lines: Iterator[str], system: str | None, out: IO[str], notes: IO[str]
) -> int:
    """Answer lines until they end or one is ``/exit``.

    Answers go to ``out``, everything else to ``notes``. A question whose answer fails is dropped
    from the conversation. Returns the number of failures.
    """
    conversation = _Conversation(backend, system, out, notes)
    for line in lines:
        text = line.strip()
        if text == "/exit":
            break
        try:
            conversation.take(text)
        except VmserveError as error:
            conversation.num_failed += 1
            print(f"error: {error}", file=notes)
    return conversation.num_failed


class _Conversation:
    """The messages so far. An exchange is a question and its answer."""

    def __init__(
        self, backend: ChatBackend, system: str | None, out: IO[str], notes: IO[str]
    ) -> None:
        self._backend = backend
        self._out, self._notes = out, notes
        self._system = system
        self._exchanges: list[list[Message]] = []
        self.num_failed = 0

    def take(self, text: str) -> None:
        """Handle a typed line. Raises :class:`~vmserve.errors.VmserveError`."""
        command, _, argument = text.partition(" ")
        match command:
            case "":
                pass
            case "/new":
                self._exchanges.clear()
            case "/system":
                self._system = argument or None
                self._exchanges.clear()
            case "/history":
                for message in self._messages():
                    print(f"{message['role']}: {message['content']}", file=self._notes)
            case "/undo":
                self._last()
            case "/retry":
                self._ask(self._last()[0]["content"])
            case "/model" if argument:
                self._backend.choose(argument)
            case "/model":
                print(", ".join(self._backend.models()), file=self._notes)
            case _ if command.startswith("/"):
                print(_HELP, file=self._notes)
            case _:
                self._ask(text)

    def _messages(self) -> list[Message]:
        first = [{"role": "system", "content": self._system}] if self._system else []
        return [*first, *(message for each in self._exchanges for message in each)]

    def _last(self) -> list[Message]:
        """Remove and return the last exchange."""
        if not self._exchanges:
            raise VmserveError("nothing has been asked yet")
        return self._exchanges.pop()

    def _ask(self, text: str) -> None:
        exchange = _exchange(self._backend, self._messages(), text, self._out, self._notes)
        if exchange:
            self._exchanges.append(exchange)
        else:
            self.num_failed += 1


def _exchange(
    backend: ChatBackend, messages: list[Message], text: str, out: IO[str], notes: IO[str]
) -> list[Message]:
    """Return the question and its answer, as far as it got; nothing if it failed."""
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
    """Yield lines of ``stdin``; on a terminal with history and editing, if there is readline."""
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
        typer.Argument(
            metavar="URL",
            help="A running server, any that has OpenAI's API. Without one, an engine is started.",
        ),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="The same, as clients of OpenAI name it.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="The server's key, if it needs one.", envvar="VMSERVE_API_KEY"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    **engine_options: Any,
) -> None:
    """Chat in the terminal."""
    given = {"max_tokens": max_tokens, "temperature": temperature}
    sampling: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**sampling)  # reports wrong values before a model is loaded
    if url is not None and base_url is not None:
        raise ConfigurationError(f"two servers are given, {url} and --base-url {base_url}")
    url = url or base_url
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
        num_failed = converse(backend, _typed_lines(sys.stdin), system, sys.stdout, sys.stderr)
    if num_failed and not sys.stdin.isatty():  # in a terminal they were shown
        raise typer.Exit(1)
