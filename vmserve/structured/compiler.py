"""Compile grammars: vet them in another process, compile them here, cache them."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property

from llguidance import LLExecutor, LLMatcher, LLTokenizer

from vmserve.errors import InvalidRequestError
from vmserve.structured.grammar import PARSER_LIMITS
from vmserve.structured.guide import Guide, Mask, fill_masks
from vmserve.structured.spec import Constraint, StructuredOutputsParams
from vmserve.structured.turns import TenantTurns
from vmserve.structured.vetting import VETTING_SECONDS, VettingError, VettingProcess
from vmserve.structured.worker import Setup, make_tokenizer

__all__ = ["Grammar", "GrammarCompiler"]

#: Most grammars that are kept, and the bytes that they take together.
MAX_GRAMMARS = 128
MAX_GRAMMAR_BYTES = 256 << 20
#: Seconds for which a refusal that load may have caused is repeated without another try.
_REFUSAL_SECONDS = 60.0
#: Seconds without a compilation before the processes end: each holds some 20 MiB.
IDLE_SECONDS = 30.0
#: Compilations at a time; each has a process, which is started when all before it are taken. Only
#: its limits interrupt a running one, so one tenant's never have all the places.
_NUM_WORKERS = 3
_MOST_OF_ONE_TENANT = _NUM_WORKERS - 1


@dataclass(frozen=True, eq=False, slots=True)
class Grammar:
    """A compiled grammar. ``cost_bytes``: about the memory of its parser, and of each guide."""

    matcher: LLMatcher
    end_ids: frozenset[int]
    cost_bytes: int

    def start(self, stop_ids: Iterable[int] = ()) -> Guide:
        """Make the guide of an empty answer. ``stop_ids`` end it besides EOS."""
        return Guide(self.matcher.deep_copy(), self.end_ids.union(stop_ids))


@dataclass(eq=False, slots=True)
class _Entry:
    future: Future[Grammar] = field(default_factory=Future)
    #: Requests of each tenant which asked for it before it was compiled, and have not left.
    waiting: Counter[str] = field(default_factory=Counter)
    is_running: bool = False
    #: Time after which a refusal is not repeated any more.
    until: float | None = None


class GrammarCompiler:
    """Compiles off the caller's thread, one time for equal constraints.

    ``tokenizer``: a ``tokenizers`` tokenizer as JSON, which knows ``num_tokens``.
    ``vocab_size``: columns of the logits; ``eos_ids``: what ends an answer. Nothing is started
    before the first constraint comes.
    Thread-safe, but for :meth:`masks` and :meth:`close`.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        num_tokens: int = 0,
        seconds: float = VETTING_SECONDS,
    ) -> None:
        # Some tokenizers know more tokens than their model has, and most fewer.
        self._setup = Setup(tokenizer, max(vocab_size, num_tokens), sorted(eos_ids))
        self._vocab_size = vocab_size
        self._entries: OrderedDict[Constraint, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._processes = [VettingProcess(self._setup, seconds) for _ in range(_NUM_WORKERS)]
        self._free = list(self._processes)
        self._turns = TenantTurns(_MOST_OF_ONE_TENANT)
        self._is_closed = False
        self._last_use = 0.0
        #: Timer that looks whether the processes are still used; None while there are none.
        self._look: threading.Timer | None = None
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="vmserve-grammar")
        self._tokenizer_lock = threading.Lock()

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> Future[Grammar]:
        """The grammar, or :class:`~vmserve.errors.InvalidRequestError`, when it is known.

        Tenants take turns. A caller that does not wait any more says so: :meth:`abandon`.
        """
        constraint = params.constraint
        with self._lock:
            entry = self._entries.get(constraint)
            if entry is None or (entry.until is not None and entry.until < time.monotonic()):
                entry = self._entries[constraint] = _Entry()
            if not entry.future.done():
                entry.waiting[tenant] += 1
            if not (entry.is_running or entry.future.done()):
                self._turns.add(tenant, constraint)
                self._compile_next()
            self._entries.move_to_end(constraint)
            self._evict()
            return entry.future

    def abandon(
        self, params: StructuredOutputsParams, future: Future[Grammar], tenant: str = ""
    ) -> None:
        """The owner of ``future`` does not wait for it any more. What nothing waits for is not
        compiled, unless it has begun."""
        constraint = params.constraint
        with self._lock:
            entry = self._entries.get(constraint)
            if entry is None or entry.future is not future or future.done():
                return
            entry.waiting -= Counter([tenant])
            if entry.is_running or tenant in entry.waiting:
                return
            self._turns.remove(tenant, constraint)
            if not entry.waiting:
                del self._entries[constraint]

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Compile and wait. Raises :class:`~vmserve.errors.InvalidRequestError`."""
        return self.submit(params).result()

    def masks(self, guides: list[Guide]) -> Mask:
        """Compute the allowed tokens of each guide: ``[guides, vocab_size]``."""
        tokenizer = self._tokenizer
        masks = fill_masks(guides, tokenizer.vocab_size, tokenizer.eos_token, self._executor)
        return masks[:, : self._vocab_size]

    @property
    def num_waiting(self) -> int:
        """Constraints whose compilation has not begun."""
        with self._lock:
            return len(self._turns)

    @property
    def pids(self) -> list[int]:
        """Process ids of the vetting processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        """End threads and processes; refuse constraints that were not compiled yet."""
        with self._lock:
            self._is_closed = True
            if self._look is not None:
                self._look.cancel()
        for process in self._processes:
            process.interrupt()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()
        for constraint, entry in self._entries.items():
            if not entry.future.done():
                entry.future.set_exception(_refusal(constraint, "the engine is being closed"))

    # -- in a thread of its own ---------------------------------------------------------

    def _compile_next(self) -> None:
        """Compile the next constraint; the caller holds the lock."""
        if self._turns and not self._is_closed:
            self._threads.submit(self._take_turn)

    def _take_turn(self) -> None:
        with self._lock:
            taken = self._turns.take()
            if taken is None:  # abandoned meanwhile, or those that wait have all they may have
                return
            tenant, constraint = taken
            entry = self._entries[constraint]
            entry.is_running = True
        try:
            self._work(constraint, entry)
        finally:
            with self._lock:
                self._turns.done(tenant)
                self._compile_next()

    def _work(self, constraint: Constraint, entry: _Entry) -> None:
        try:
            entry.future.set_result(self._compile(constraint))
        except VettingError as error:
            if not error.final:
                entry.until = time.monotonic() + _REFUSAL_SECONDS
            entry.future.set_exception(_refusal(constraint, str(error)))
        except BaseException as error:
            entry.until = time.monotonic()
            entry.future.set_exception(error)
            raise

    def _compile(self, constraint: Constraint) -> Grammar:
        with self._lock:
            process = self._free.pop()
        try:
            verdict = process.vet(constraint)
        finally:
            with self._lock:
                self._free.append(process)
                self._last_use = time.monotonic()
                if self._look is None:
                    self._look_in(IDLE_SECONDS)
        # llguidance lets other threads run meanwhile.
        matcher = LLMatcher(self._tokenizer, verdict.grammar, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise VettingError(matcher.get_error()[:200], final=True)
        matcher.compute_bitmask()  # what it learns by that is copied with it
        end_ids = self._setup.eos_ids or self._tokenizer.eos_tokens
        return Grammar(matcher, frozenset(end_ids), verdict.cost_bytes)

    def _look_in(self, seconds: float) -> None:
        """Look so many seconds later whether the processes rest; the caller holds the lock."""
        if not self._is_closed:
            self._look = threading.Timer(seconds, self._rest_if_idle)
            self._look.daemon = True
            self._look.start()

    def _rest_if_idle(self) -> None:
        with self._lock:
            self._look = None
            left = self._last_use + IDLE_SECONDS - time.monotonic()
            if left > 0 or len(self._free) < _NUM_WORKERS:
                self._look_in(max(left, 1.0))
            elif not self._is_closed:
                # As a compilation: each thread has one process at most, so there is always one.
                self._threads.submit(self._rest)

    def _rest(self) -> None:
        for _ in range(_NUM_WORKERS):
            with self._lock:
                process = self._free.pop(0)
            try:
                process.rest()
            finally:
                with self._lock:
                    self._free.append(process)

    def _evict(self) -> None:
        """Drop the least recently used grammars; requests that use them keep them."""
        total = 0
        for place, (constraint, entry) in enumerate(reversed(list(self._entries.items()))):
            total += len(constraint.text)
            if entry.future.done() and entry.future.exception() is None:
                total += entry.future.result().cost_bytes
            is_over = place >= MAX_GRAMMARS or total > MAX_GRAMMAR_BYTES
            if place and is_over and entry.future.done():
                del self._entries[constraint]

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            return self._made_tokenizer

    @cached_property
    def _made_tokenizer(self) -> LLTokenizer:
        return make_tokenizer(self._setup)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()


def _refusal(constraint: Constraint, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs: this {constraint.kind} cannot be served: {reason}",
        "structured_outputs",
    )
