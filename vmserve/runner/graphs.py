"""Decoding steps as graphs: captured once for a batch width, replayed with new inputs.

On a GPU they are captured as the engine starts, the widest first, because graphs share their
memory. What is missing then is captured when needed.

A batch of one regime whose backend can plan ahead is captured as a whole: for a width and, if
kernels use it to choose a split, for a longest length. Any other batch (both regimes at once,
kernels that cannot be captured) is captured in pieces, with attention called between them as usual.
Batches are padded to the next width. Rows of the padding compute unused values and change no page
(:class:`AttentionPlan` promises it; in pieces, attention gets only the batch's rows).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from vmserve.attention.base import AttentionPlan, PlansAhead, RaggedBatch
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.models.decoder_config import DecoderConfig
from vmserve.runner.ids import known
from vmserve.runner.runtime import CaptureError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall, LayerAttention
    from vmserve.attention.rotary import Rotary
    from vmserve.memory.manager import MemoryManager
    from vmserve.models import LoadedModel
    from vmserve.models.decoder import Decoder
    from vmserve.runner.kernels import RegimeKernels
    from vmserve.runner.runtime import Graph, TorchRuntime

__all__ = ["DecodeGraphs", "widths"]

logger = logging.getLogger(__name__)
#: Shortest captured length, and the factor from one length to the next.
FIRST_LENGTH = 512
LENGTH_FACTOR = 4
#: Steps without an attempt after one that found no memory; twice as many after the next.
PAUSE_STEPS = 64


def widths(most: int) -> list[int]:
    """The widths that batches are padded to: powers of two and the halves between them.

    Up to ``most``, so that above 8 at most a third of the rows is padding.
    """
    found = {most, *(each for each in (1, 2, 4, 8) if each < most)}
    width = 16
    while width < most:
        found.add(width)
        if width * 3 // 2 < most:
            found.add(width * 3 // 2)
        width *= 2
    return sorted(found)


@dataclass(frozen=True)
class _Piece:
    """The part of a step before a layer's attention, whose arguments it leaves in these tensors."""

    graph: Graph
    spec: LayerAttention
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary | None
    #: Input of the next piece: attention's result.
    attended: torch.Tensor

    def attend(self, attention: AttentionCall, num_rows: int) -> None:
        rotary = None if self.rotary is None else self.rotary.rows(0, num_rows)
        n = slice(num_rows)
        self.attended[n].copy_(attention(self.spec, self.q[n], self.k[n], self.v[n], rotary))


@dataclass(frozen=True)
class _Captured:
    """A captured step: its pieces (none if attention is captured too), and the rest."""

    pieces: tuple[_Piece, ...]
    last: Graph
    #: ``[width, vocab]`` float32; valid until the next replay.
    logits: torch.Tensor


class _Cut:
    """Replaces attention during capture: ends a piece and begins the next."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self.pieces: list[_Piece] = []

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        graph = self._runtime.end_capture()
        # Zeros: rows of the padding are never attended, but must be numbers.
        attended = _no_attention(spec, q, k, v)
        self.pieces.append(_Piece(graph, spec, q, k, v, rotary, attended))
        self._runtime.begin_capture()
        return attended


@contextlib.contextmanager
def _one_token(memory: MemoryManager, regime: Regime) -> Iterator[RaggedBatch]:
    """A batch of one sequence, whose page receives the writes of steps that are only captured."""
    seq = memory.open(regime=regime)
    assert seq is not None, "the engine is idle"
    try:
        plan = memory.plan([Growth(seq, 1)])
        assert isinstance(plan, MemoryPlan), "the pool is empty"
        epoch = memory.apply(plan)
        place = seq if regime is Regime.PAGED else int(memory.slots([seq])[0])
        try:
            yield RaggedBatch.build([place], [0], [1])
        finally:
            memory.launched(epoch)
    finally:
        memory.release(seq)


def _no_attention(
    spec: LayerAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None = None,
) -> torch.Tensor:
    """Replaces attention in a run that only makes libraries set themselves up."""
    return q.new_zeros(*q.shape[:-1], spec.value_dim or q.shape[-1])


class DecodeGraphs:
    """Captured steps by width and length, made when first needed."""

    def __init__(
        self,
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        runtime: TorchRuntime,
        *,
        max_rows: int,
        max_len: int,
        q_heads: int,
    ) -> None:
        self._network = cast("Decoder", model.network)  # checked by of()
        self._kernels = kernels
        self._runtime = runtime
        self._max_len = max_len
        self._q_heads = q_heads
        self._dtype = model.dtype
        self._windows = tuple(dict.fromkeys(model.config.windows))
        self._widths = widths(max_rows)
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=runtime.device)
        self._positions = torch.zeros_like(self._token_ids)
        self._whole: dict[tuple[Regime, int, int], tuple[AttentionPlan, _Captured]] = {}
        self._pieces: dict[int, _Captured] = {}
        self._disabled = ""
        #: Steps until the next attempt, and length of the pause before.
        self._pause = self._last_pause = 0
        self._logits: torch.Tensor | None = None
        runtime.new_graphs()
        #: Device memory taken by graphs so far, in bytes.
        self.captured_bytes = 0

    @staticmethod
    def of(
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        runtime: TorchRuntime,
        max_rows: int,
        max_len: int,
    ) -> DecodeGraphs | None:
        """Make it; None for a model with foreign code, which may do what cannot be captured, and
        for one with states, of which a replay with rows of padding would change a page."""
        network = model.config.network
        if not isinstance(network, DecoderConfig):
            logger.info("steps of this model are not captured: its code is not vmserve's")
            return None
        if network.delta is not None:
            logger.info("steps of this model are not captured: its layers keep states")
            return None
        return DecodeGraphs(
            model, kernels, runtime, max_rows=max_rows, max_len=max_len, q_heads=network.q_heads
        )

    @property
    def num_captured(self) -> int:
        return len(self._whole) + len(self._pieces)

    def takes(self, num_rows: int) -> bool:
        return not self._disabled and num_rows <= self._widths[-1]

    def capture_ahead(self, memory: MemoryManager, regimes: Sequence[Regime]) -> None:
        """Capture steps of every width, the widest first, before there are any requests.

        ``regimes``: those that requests are kept in. For both, also captures steps that have both.
        Ends early, with a warning, if there is no memory for all.
        """
        with contextlib.suppress(CaptureError), self._runtime.inference():
            for regime in regimes:
                if self.captures_attention(regime):
                    with _one_token(memory, regime) as batch:
                        for width in reversed(self._widths):
                            for length in reversed(self._lengths(regime)):
                                self._capture_whole(regime, width, length, batch)
            if len(regimes) > 1 or not self.captures_attention(regimes[0]):
                for width in reversed(self._widths):
                    self._capture_pieces(width)
        self._runtime.synchronize()

    def captures_attention(self, regime: Regime) -> bool:
        return isinstance(self._kernels[regime].backend, PlansAhead)

    def whole(
        self,
        token_ids: NDArray[np.int64],
        regime: Regime,
        batch: RaggedBatch,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]`` of a batch of one regime with one new token for each sequence.

        ``drawn``: the tokens that only the device knows (:func:`vmserve.runner.ids.known`).

        Raises :class:`~vmserve.runner.runtime.CaptureError`.
        """
        num_rows = len(token_ids)
        width = self._width(num_rows)
        length = self._length(regime, int(batch.num_past.max()) + 1)
        self._fill(token_ids, batch.num_past, drawn)
        if (regime, width, length) in self._whole:
            plan, captured = self._whole[regime, width, length]
            plan.update(batch)
        else:
            captured = self._capture_whole(regime, width, length, batch)
        captured.last.replay()
        return captured.logits[:num_rows]

    def in_pieces(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits ``[rows, vocab]``; ``attention`` is bound to the batch.

        Raises :class:`~vmserve.runner.runtime.CaptureError`.
        """
        num_rows = len(token_ids)
        width = self._width(num_rows)
        self._fill(token_ids, positions, drawn)
        captured = self._pieces.get(width) or self._capture_pieces(width)
        for piece in captured.pieces:
            piece.graph.replay()
            piece.attend(attention, num_rows)
        captured.last.replay()
        return captured.logits[:num_rows]

    def _width(self, num_rows: int) -> int:
        return next(width for width in self._widths if width >= num_rows)

    def _length(self, regime: Regime, needed: int) -> int:
        """The length to capture for: some kernels freeze their split for the longest sequence."""
        return next(length for length in self._lengths(regime) if length >= needed)

    def _lengths(self, regime: Regime) -> list[int]:
        backend = self._kernels[regime].backend
        lengths = [self._max_len]
        if isinstance(backend, PlansAhead) and backend.plans_by_length:
            length = FIRST_LENGTH
            while length < self._max_len:
                lengths.append(length)
                length *= LENGTH_FACTOR
        return sorted(lengths)

    def _fill(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        drawn: torch.Tensor | None,
    ) -> None:
        """Fill the inputs. Rows after them keep some token, at some position, of earlier steps.

        Tokens that only the device knows are looked up before the replay: graphs read one buffer.
        """
        if drawn is None:
            self._runtime.upload(token_ids, self._token_ids)
        else:
            ids = known(self._runtime.upload(token_ids), drawn)
            self._token_ids[: len(token_ids)].copy_(ids)
        self._runtime.upload(positions.copy(), self._positions)

    def _plan(self, regime: Regime, width: int, length: int) -> AttentionPlan:
        kernels = self._kernels[regime]
        assert isinstance(kernels.backend, PlansAhead)
        return kernels.backend.plan_capacity(
            kernels.view,
            max_seqs=width,
            max_tokens=width,
            max_new=1,
            max_len=length,
            q_heads=self._q_heads,
            windows=self._windows,
            dtype=self._dtype,
        )

    def _capture_whole(
        self, regime: Regime, width: int, length: int, batch: RaggedBatch
    ) -> _Captured:
        def capture() -> _Captured:
            plan = self._plan(regime, width, length)
            plan.update(batch)
            captured = self._capture(width, plan.call, plan.call)
            self._whole[regime, width, length] = plan, captured
            return captured

        return self._attempt(capture)

    def _capture_pieces(self, width: int) -> _Captured:
        def capture() -> _Captured:
            captured = self._capture(width, _no_attention, _Cut(self._runtime))
            self._pieces[width] = captured
            return captured

        return self._attempt(capture)

    def _attempt(self, capture: Callable[[], _Captured]) -> _Captured:
        """Capture a step; raises :class:`~vmserve.runner.runtime.CaptureError` if it fails.

        The step is then computed without a graph. After lack of memory, another attempt comes some
        steps later; after any other error there is none.
        """
        if self._pause > 0:
            self._pause -= 1
            raise CaptureError("no attempt so soon after one that found no memory")
        began, before = time.perf_counter(), self._runtime.allocated_bytes()
        try:
            captured = capture()
        except self._runtime.memory_errors as error:
            self._runtime.abort_capture()
            self._pause = self._last_pause = 2 * self._last_pause or PAUSE_STEPS
            logger.warning("no memory to capture a step, next try in %d: %s", self._pause, error)
            raise CaptureError(repr(error)) from error
        except Exception as error:
            self._disabled = repr(error)
            self._runtime.abort_capture()
            logger.error(
                "steps are not captured any more; --enforce-eager avoids the attempt",
                exc_info=error,
            )
            raise CaptureError(self._disabled) from error
        self.captured_bytes += max(0, self._runtime.allocated_bytes() - before)
        logger.info(
            "captured a decoding step of %d rows%s in %.2f s; %d are captured",
            len(captured.logits),
            f" in {len(captured.pieces) + 1} pieces" if captured.pieces else "",
            time.perf_counter() - began,
            self.num_captured,
        )
        return captured

    def _capture(self, width: int, first: AttentionCall, attention: AttentionCall) -> _Captured:
        """Capture a step. ``first``: attention for a run before, in which libraries set themselves
        up."""
        token_ids, positions = self._token_ids[:width], self._positions[:width]
        logits = self._network.forward(token_ids, positions, first)
        if self._logits is None:
            # One buffer for all graphs: otherwise each would keep its own for ever.
            shape = (self._widths[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        del logits
        output = self._logits[:width]
        self._runtime.begin_capture()
        output.copy_(self._network.forward(token_ids, positions, attention))
        last = self._runtime.end_capture()
        pieces = tuple(attention.pieces) if isinstance(attention, _Cut) else ()
        return _Captured(pieces, last, output)
