"""Requests with grammars: those that wait for compilation, and token masks of running ones."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import InvalidRequestError, VmserveError

if TYPE_CHECKING:
    from collections import abc

    from vmserve.scheduler.sequence import Request, Sequence
    from vmserve.structured.compiler import Grammar, GrammarCompiler
    from vmserve.structured.spec import StructuredOutputsParams
    from vmserve.text.tokenizer import Tokenizer

__all__ = ["StructuredRequests"]

#: Longest wait for a grammar when the engine has nothing else to do.
_WAIT_SECONDS = 0.01


class StructuredRequests:
    """Owned by the engine's thread; only :meth:`check` may be called from others.

    Starts no process and no thread before the first such request.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        #: Requests that came before there was a compiler. A thread is making it.
        self._early: dict[str, Request] = {}
        self._compiler: Future[GrammarCompiler] | None = None
        #: Errors by request id, of grammars that met a limit in the last step.
        self.broken: dict[str, VmserveError] = {}

    @property
    def num_compiling(self) -> int:
        return len(self._compiling) + len(self._early)

    @property
    def compiler(self) -> GrammarCompiler:
        """Waits until it is made."""
        return self._begin().result()

    def _begin(self) -> Future[GrammarCompiler]:
        """Have the compiler made: a thread imports it, which takes a while."""
        if self._compiler is None:
            with_thread = ThreadPoolExecutor(1, thread_name_prefix="vmserve-grammars")
            self._compiler = with_thread.submit(self._make)
            with_thread.shutdown(wait=False)  # it ends with its work
        return self._compiler

    def _make(self) -> GrammarCompiler:
        from vmserve.structured.compiler import GrammarCompiler  # noqa: PLC0415 - as above

        eos_ids = self._eos_ids or sorted(self._tokenizer.eos_ids)
        tokenizer = self._tokenizer
        return GrammarCompiler(
            tokenizer.to_json(), self._vocab_size, eos_ids, num_tokens=tokenizer.vocab_size
        )

    def check(self, params: StructuredOutputsParams) -> None:
        """Compile it now. Raises :class:`~vmserve.errors.InvalidRequestError`."""
        self.compiler.compile(params)

    def add(self, request: Request) -> None:
        """Start compiling the request's grammar; :meth:`take_compiled` returns it when it may
        run."""
        params = request.params.structured_outputs
        assert params is not None
        request.is_compiling = True
        if not self._begin().done():
            self._early[request.request_id] = request
            return
        future = self.compiler.submit(params, request.tenant)
        self._compiling[request.request_id] = (request, future)

    def drop(self, request: Request) -> None:
        """Drop a request that has ended; if it was waiting, nothing is compiled for its tenant."""
        self.broken.pop(request.request_id, None)
        self._early.pop(request.request_id, None)
        _, future = self._compiling.pop(request.request_id, (request, None))
        if future is None:
            return
        params = request.params.structured_outputs
        assert params is not None
        self.compiler.abandon(params, future, request.tenant)

    def take_compiled(self) -> tuple[list[Request], list[tuple[Request, VmserveError]]]:
        """Requests whose grammars are known by now: those that may run, and those refused."""
        if self._early and self._begin().done():
            early, self._early = self._early, {}
            for request in early.values():
                self.add(request)
        ready: list[Request] = []
        failed: list[tuple[Request, VmserveError]] = []
        for request, future in list(self._compiling.values()):
            if not future.done():
                continue
            error = future.exception()
            if error is not None:
                failed.append((request, _error_for(error, request)))
                continue
            del self._compiling[request.request_id]
            request.is_compiling = False
            grammar = future.result()
            for sequence in request.sequences:
                sequence.guide = grammar.start(request.params.stop_token_ids)
            ready.append(request)
        return ready, failed

    def wait(self) -> None:
        """A moment, or until a grammar is known; at once where none is waited for."""
        futures: list[Future[Any]] = [future for _, future in self._compiling.values()]
        if self._early:
            futures.append(self._begin())
        if futures:
            wait(futures, timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)

    def masks(
        self, sequences: abc.Sequence[Sequence], drafts: dict[Sequence, list[int]] | None = None
    ) -> list[NDArray[np.bool_] | None]:
        """Tokens that each sequence's grammar allows, or None for all.

        Empty if none has a grammar. A sequence of ``drafts`` is there once more after each drafted
        token. A draft is cut where nothing can follow it.
        """
        rows = [row for row, sequence in enumerate(sequences) if sequence.guide is not None]
        if not rows:
            return []
        masks: list[NDArray[np.bool_] | None] = [None] * len(sequences)
        guides = [guide for sequence in sequences if (guide := sequence.guide) is not None]
        # How many drafted tokens lie before each row.
        places = [0] * len(rows)
        for i, (before, row) in enumerate(pairwise(rows if drafts else ()), start=1):
            if drafts and sequences[before] is sequences[row]:
                places[i] = places[i - 1] + 1
                guides[i] = guides[i - 1].fork()
                guides[i].accept(drafts[sequences[row]][places[i - 1]])
        found = self.compiler.masks(guides)
        for row, place, guide, mask in zip(rows, places, guides, found, strict=True):
            if mask.any():
                masks[row] = mask
            elif drafts and place:
                drafts[sequences[row]] = drafts[sequences[row]][: place - 1]
            else:
                self.broken[sequences[row].request.request_id] = VmserveError(
                    "the grammar of structured_outputs cannot go on from this answer "
                    f"({guide.error or 'nothing can follow'}): make it simpler"
                )
        return masks

    def take_broken(self) -> list[tuple[str, VmserveError]]:
        broken, self.broken = list(self.broken.items()), {}
        return broken

    def close(self) -> None:
        """End the processes. All waiting requests must have been aborted."""
        if self._compiler is not None and self._compiler.exception() is None:
            self.compiler.close()


def _error_for(error: BaseException, request: Request) -> VmserveError:
    """A grammar's error for this request: with the name of the parameter that it used."""
    if not isinstance(error, VmserveError):
        error = InvalidRequestError(
            "structured_outputs: the grammar could not be compiled; send the request again",
            "structured_outputs",
        )
    asked = request.params.structured_outputs
    if not isinstance(error, InvalidRequestError) or asked is None:
        return error
    return InvalidRequestError(
        str(error).replace("structured_outputs", asked.param, 1), asked.param
    )
