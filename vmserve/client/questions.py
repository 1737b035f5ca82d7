"""What a client asks of its engine, and how several engines answer as one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from vmserve.client.callers import Callers, Future
from vmserve.client.figures import merged_snapshot
from vmserve.client.messages import Ask, Reply, ToEngine
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.numbers.sizes import parse_size
from vmserve.telemetry.snapshot import EngineSnapshot

__all__ = ["QUESTIONS", "Asked", "Question", "check_question"]

Arguments: TypeAlias = Mapping[str, Any]


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class _PinPrefix(msgspec.Struct, forbid_unknown_fields=True):
    pin: int
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    cache_salt: str
    isolation: str


class _SetMemory(msgspec.Struct, forbid_unknown_fields=True):
    size: int | str


class _Bounds(msgspec.Struct, forbid_unknown_fields=True):
    pinned: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]] = []


def _same(arguments: Arguments, num_engines: int) -> Arguments:
    return arguments


def _as_it_is(value: Any) -> Any:
    return value


def _first(values: Sequence[Any]) -> Any:
    return values[0]


def _equal_parts(arguments: Arguments, num_engines: int) -> Arguments:
    return {"size": parse_size(arguments["size"], "kv_cache_memory") // num_engines}


def _sums(values: Sequence[Sequence[int]]) -> list[int]:
    return [sum(each) for each in zip(*values, strict=True)]


def _snapshot(value: Any) -> EngineSnapshot:
    return value if isinstance(value, EngineSnapshot) else msgspec.convert(value, EngineSnapshot)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question. The engine's answer is plain data: :class:`vmserve.client.service.EngineService`.

    ``arguments``: those that it has. ``read`` makes an object of an answer that came in a message.
    ``split`` returns the arguments for each of several engines, of which all are asked, and
    ``merge`` makes one answer of theirs. ``needs_all``: an engine that is down is an error, instead
    of having no answer. ``may_miss``: an engine that is suspected is not waited for.
    """

    arguments: type[msgspec.Struct] = _Nothing
    read: Callable[[Any], Any] = _as_it_is
    split: Callable[[Arguments, int], Arguments] = _same
    merge: Callable[[Sequence[Any]], Any] = _first
    needs_all: bool = False
    may_miss: bool = False


QUESTIONS: Mapping[str, Question] = {
    "kv_bounds": Question(arguments=_Bounds, merge=_sums),
    "pin_prefix": Question(arguments=_PinPrefix, merge=min),
    "reset_prefix_cache": Question(),
    "set_kv_cache_memory": Question(
        arguments=_SetMemory, split=_equal_parts, merge=sum, needs_all=True
    ),
    "snapshot": Question(read=_snapshot, merge=merged_snapshot, may_miss=True),
    # Transports note each answer: Facts.latest has the figures of all.
    "stats": Question(may_miss=True),
}


def check_question(message: Ask) -> None:
    """Check what comes from another machine: a bad question must not end the engine.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    question = QUESTIONS.get(message.question)
    if question is None:
        raise ConfigurationError(
            f"{message.question[:64]!r} is no question; known: {', '.join(sorted(QUESTIONS))}"
        )
    try:
        msgspec.convert(message.arguments, question.arguments)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{message.question}: {error}") from error


class Asked:
    """Questions without an answer yet, by serial: those of the callers at one place.

    ``serials`` counts those of all places.
    """

    def __init__(self, callers: Callers, serials: itertools.count[int]) -> None:
        self._callers = callers
        self._serials = serials
        self._waiting: dict[int, tuple[str, Future]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def ask(
        self, send: Callable[[ToEngine], None], question: str, arguments: Arguments
    ) -> Any:
        """Ask one of :data:`QUESTIONS`. Raises what its answer raises."""
        serial, answer = next(self._serials), self._callers.future()
        self._waiting[serial] = question, answer
        try:
            send(Ask(serial, question, dict(arguments)))
            value = await answer
            return QUESTIONS[question].read(value)
        finally:
            del self._waiting[serial]

    async def until_failure(self, unless: Callable[[], bool]) -> None:
        """Wait for :meth:`fail`, which another thread may call, ``unless`` that holds now."""
        serial, failure = next(self._serials), self._callers.future()
        self._waiting[serial] = "", failure  # no message answers it
        try:
            if not unless():  # asked once :meth:`fail` would be heard
                with contextlib.suppress(EngineDeadError):
                    await failure
        finally:
            del self._waiting[serial]

    def take(self, reply: Reply) -> None:
        _, answer = self._waiting.get(reply.serial, (None, None))
        if answer is None or answer.done():
            return  # whoever asked has gone
        if reply.error is not None:
            answer.set_exception(reply.error)
        else:
            answer.set_result(reply.value)

    def fail(self, error: BaseException, questions: Collection[str] | None = None) -> None:
        """Fail those named; None: all."""
        for question, answer in self._waiting.values():
            if not answer.done() and (questions is None or question in questions):
                answer.set_exception(error)
