"""Drafts from a second model with the same tokenizer, smaller than the one that serves.

Its sequences follow those of the engine: when drafts are wanted they catch up with the tokens that
became known, forget what was rejected, and draw a few tokens more. They draw with the sampling
parameters and the random numbers of the request, so that both models draw the same token wherever
they agree, at any temperature (``docs/decisions/0064-a-draft-model.md``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vmserve.errors import ConfigurationError, DriverError, OutOfMemoryError
from vmserve.memory.base import Attach, MemoryPlan, Regime
from vmserve.numbers.sizes import format_size
from vmserve.sampling.params import with_checked
from vmserve.sampling.tokens import SamplingRow
from vmserve.scheduler.base import Columns, StepPlan
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.draft_lengths import Decoding, DraftLengths

if TYPE_CHECKING:
    from vmserve.memory.manager import MemoryManager
    from vmserve.runner.model_runner import Runner
    from vmserve.runner.runtime import DeviceRuntime
    from vmserve.sampling import TokenSampler
    from vmserve.speculation.policy import DraftPolicy

__all__ = ["DraftModel"]

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Shadow:
    """A sequence of the engine as the draft model has it.

    The tokens of ``own`` are ``num_known`` known ones and those drafted last. It has no prompt:
    whatever is not computed is caught up with.
    """

    own: Sequence
    row: SamplingRow
    num_known: int = 0
    #: Number of forgotten sequences when memory was refused to this one; it asks again after
    #: others.
    refused_at: int = -1


@dataclass(slots=True)
class _Work:
    """What one step does for a shadow: ``num_new`` tokens to catch up, ``length`` to draft."""

    place: int
    shadow: _Shadow
    num_new: int
    length: int
    draft: list[int] = field(default_factory=list)

    @property
    def num_drafted(self) -> int:
        """Drafted tokens whose keys and values are computed: all but the last."""
        return max(0, self.length - 1)


class DraftModel:
    """A :class:`~vmserve.speculation.base.Drafter` with a model, a KV memory and a sampler.

    ``policy``: how long drafts are; ``max_tokens``: rows of a step; ``share``: the part of the
    engine's KV cache that its memory has. Sequences for which its memory has no room get no drafts.
    """

    def __init__(
        self,
        memory: MemoryManager,
        runner: Runner,
        runtime: DeviceRuntime,
        sampler: TokenSampler,
        policy: DraftPolicy,
        *,
        max_tokens: int,
        window: int | None,
        share: float,
    ) -> None:
        self.memory = memory
        self.share = share
        self._runner = runner
        self._runtime = runtime
        self._sampler = sampler
        self._num_tokens = policy.most_drafted
        self._lengths = DraftLengths(policy)
        self._max_tokens = max_tokens
        self._window = window
        #: Shadows of sequences; None: the sequence gets no drafts.
        self._shadows: dict[Sequence, _Shadow | None] = {}
        self._num_forgotten = 0
        self._has_failed = False

    # -- the drafter --------------------------------------------------------------------

    def wanted(self, num_decoding: int) -> bool:
        return not self._has_failed and self._lengths.may_pay(num_decoding)

    def propose(self, sequences: Many[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        if self._has_failed:
            return None
        drafts: list[list[int]] = [[] for _ in sequences]
        work = self._work(sequences, num_prompt_rows, drafts)
        if work and self._compute(work, sequences):
            for each in work:
                drafts[each.place] = each.draft
        return drafts if any(drafts) else None

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._lengths.accepted(sequence, num_drafted, num_accepted)

    def learn(self, seconds: float, attention: float) -> None:
        self._lengths.learn(seconds, attention)

    def forget(self, sequence: Sequence) -> None:
        shadow = self._shadows.pop(sequence, None)
        self._lengths.forget(sequence)
        if shadow is not None:
            self._release(shadow)
            self._num_forgotten += 1

    def start_over(self) -> None:
        self._runtime.synchronize()
        self._shadows.clear()
        self._lengths.start_over()
        self.memory.start_over()
        self._num_forgotten += 1

    # -- what a step does ---------------------------------------------------------------

    def _work(
        self, sequences: Many[Sequence], num_prompt_rows: int, drafts: list[list[int]]
    ) -> list[_Work]:
        """What the step does for each sequence, those that are nearly caught up first.

        A draft of which the last step took a part, or nothing, goes on in ``drafts``.
        """
        followed = list(self._followed(sequences))
        self._catch_up([(sequences[place], shadow) for place, shadow in followed])
        decoding = [Decoding(sequence, 0, 0) for sequence in sequences]
        for place, shadow in followed:
            sequence = sequences[place]
            most = sequence.request.max_tokens - sequence.num_output - 1
            most = max(0, min(self._num_tokens, most, self.memory.max_len + 1 - shadow.num_known))
            if drafted := shadow.own.tokens[shadow.num_known :]:
                drafts[place] = drafted[:most]
            elif shadow.refused_at < self._num_forgotten:
                decoding[place] = Decoding(sequence, shadow.own.num_uncomputed, most)
        lengths = self._lengths.choose(decoding, num_prompt_rows)
        work = [
            _Work(place, shadow, shadow.own.num_uncomputed, lengths[place])
            for place, shadow in followed
            if lengths[place] > 0
        ]
        return sorted(work, key=lambda each: each.num_new)

    def _followed(self, sequences: Many[Sequence]) -> Iterator[tuple[int, _Shadow]]:
        for place, sequence in enumerate(sequences):
            if sequence not in self._shadows:
                self._shadows[sequence] = _shadow_of(sequence)
            shadow = self._shadows[sequence]
            if shadow is None:
                continue
            if max(sequence.tokens[shadow.num_known :], default=0) >= self._sampler.vocab_size:
                self.forget(sequence)  # its vocabulary has fewer spare ids
                self._shadows[sequence] = None
                continue
            yield place, shadow

    def _catch_up(self, followed: list[tuple[Sequence, _Shadow]]) -> None:
        """Take the tokens that became known; keep what was drafted as far as it is the same."""
        memory = self.memory
        kept, lengths = [], []
        for sequence, shadow in followed:
            own, known = shadow.own, sequence.tokens
            right, most = shadow.num_known, min(len(own.tokens), len(known))
            while right < most and own.tokens[right] == known[right]:
                right += 1
            if right < len(known):
                own.tokens[shadow.num_known :] = known[shadow.num_known :]
                own.num_computed = min(own.num_computed, right)
            right = min(right, own.num_computed)
            if right > shadow.num_known and own.memory_id is not None:
                kept.append(own.memory_id)
                lengths.append(right)
            shadow.num_known = len(known)
        if memory.options.prefix_caching:  # what is kept is published by its tokens
            self._publish([shadow for _, shadow in followed])
        if kept:
            memory.keep(kept, lengths)

    def _publish(self, shadows: list[_Shadow]) -> None:
        owners: list[int] = []
        tokens: list[int] = []
        for shadow in shadows:
            own = shadow.own
            if own.memory_id is not None:
                new = own.tokens[own.num_published : shadow.num_known]
                owners += [own.memory_id] * len(new)
                tokens += new
                own.num_published = shadow.num_known
        if owners:
            self.memory.append_tokens(owners, tokens)

    def _compute(self, work: list[_Work], sequences: Many[Sequence]) -> bool:
        """Compute and draw the drafts of a step; what finds no room is taken out of ``work``."""
        ops = self._start(work)
        planned = self._plan(work, ops, sequences)
        if planned is None:
            return False
        columns, memory_plan = planned
        try:
            epoch = self.memory.apply(memory_plan)
        except (OutOfMemoryError, DriverError) as error:
            logger.warning("no drafts of the draft model: %s", error)
            for each in work:
                self._refuse(each.shadow)
            return False
        try:
            self._draw(work, columns, memory_plan)
        except Exception as error:  # drafts are dispensable, the engine is not
            self._has_failed = True
            logger.error("the draft model failed: no more drafts", exc_info=error)
            self.memory.abandon(epoch)
            return False
        self.memory.launched(epoch)
        return True

    def _start(self, work: list[_Work]) -> dict[int, Attach]:
        """Open the memory of new sequences, and share the rows of a step."""
        ops: dict[int, Attach] = {}
        opened = set()
        left, taken = self._max_tokens, []
        for each in work:
            own, request = each.shadow.own, each.shadow.own.request
            if left == 0:
                break
            if own.memory_id is None:
                if request in opened:
                    continue  # in the next step it shares the prompt that this one computes
                if not self._open(own, ops):
                    continue
                opened.add(request)
            each.num_new = min(own.num_uncomputed, left)
            if each.num_new < own.num_uncomputed:
                each.length = 0
            left -= each.num_new
            taken.append(each)
        work[:] = taken
        return ops

    def _open(self, own: Sequence, ops: dict[int, Attach]) -> bool:
        """Open its memory, with what is cached of its tokens; False if no more can be open."""
        request, memory = own.request, self.memory
        is_caching = memory.options.prefix_caching
        seq = own.memory_id = memory.open(
            own.tokens if is_caching else (),
            regime=Regime.PAGED,
            tenant=request.memory_tenant,
            salt=request.cache_salt,
        )
        own.num_published, own.num_computed = len(own.tokens), 0
        if seq is not None and is_caching and memory.restore(seq, list(ops.values())):
            memory.finish_restores()
        if seq is not None and is_caching and (matched := memory.match(seq)):
            own.num_computed = matched
            ops[seq] = Attach(seq, matched)
        return seq is not None

    def _plan(
        self, work: list[_Work], ops: dict[int, Attach], sequences: Many[Sequence]
    ) -> tuple[Columns, MemoryPlan] | None:
        """Plan the memory of ``work``, without those for which there is no room."""
        while work:
            owns = [each.shadow.own for each in work]
            columns = Columns.of(owns, [each.num_new for each in work], self._window)
            drafted = columns.with_drafts(np.array([each.num_drafted for each in work]))
            starts = [ops[own.memory_id] for own in owns if own.memory_id in ops]
            plan = self.memory.plan(drafted.growths, starts)
            if isinstance(plan, MemoryPlan):
                return columns, plan
            if plan.lost_prefixes:
                has_released = self._release_lost(work, ops)
            else:
                has_released = self._release_others(sequences)
            if not has_released:
                self._refuse(work.pop().shadow)
        return None

    def _draw(self, work: list[_Work], columns: Columns, memory_plan: MemoryPlan) -> None:
        by_own = {each.shadow.own: each for each in work}
        drawing = [each.shadow.own for each in work]
        while drawing:
            plan = StepPlan(drawing, columns, int(columns.num_new.sum()), memory_plan)
            slots = self.memory.slots(plan.memory_ids)
            began = time.perf_counter()
            logits = self._runner.execute(plan, slots)
            for own, num_new in zip(drawing, columns.num_new.tolist(), strict=True):
                own.num_computed += num_new
            rows = [by_own[own].shadow.row for own in logits.samplers]
            samples = self._sampler.sample(logits.sampling_logits(self._runtime), rows)
            self._lengths.ran(plan.num_tokens, len(plan), time.perf_counter() - began)
            drawing = []
            for own, sample in zip(logits.samplers, samples, strict=True):
                each, token_id = by_own[own], sample.token_id
                each.draft.append(token_id)
                own.tokens.append(token_id)
                if len(each.draft) < each.length and token_id not in own.request.stop_ids:
                    drawing.append(own)
            columns = Columns.of(drawing, None, self._window)

    # -- memory -------------------------------------------------------------------------

    def part_of(self, num_bytes: int) -> int:
        """The draft model's part of the engine's KV cache.

        Raises :class:`~vmserve.errors.ConfigurationError` if that is not a page.
        """
        part, page = int(self.share * num_bytes), self.memory.layout.total_page_bytes
        if part < page:
            raise ConfigurationError(
                f"kv_cache_memory: the draft model's {self.share:.0%} of {format_size(num_bytes)} "
                f"do not hold a page of {format_size(page)}: give "
                f"{format_size(-int(-page // self.share))} or more"
            )
        return part

    @property
    def limit_bytes(self) -> int:
        return self.memory.limit_bytes

    def set_limit(self, num_bytes: int) -> None:
        self.memory.set_limit(num_bytes)
        self._num_forgotten += 1  # there may be room now

    def _release(self, shadow: _Shadow) -> None:
        own = shadow.own
        if own.memory_id is not None:
            self.memory.release(own.memory_id)
        own.memory_id, own.num_computed = None, 0
        del own.tokens[shadow.num_known :]

    def _refuse(self, shadow: _Shadow) -> None:
        """Give the memory of a sequence back, until another one is forgotten."""
        self._release(shadow)
        shadow.refused_at = self._num_forgotten

    def _release_lost(self, work: list[_Work], ops: dict[int, Attach]) -> bool:
        """Take those out of ``work`` whose cached prefixes are gone; a later step opens them
        again. Whether there were any."""
        lost = []
        for each in work:
            memory_id = each.shadow.own.memory_id
            if memory_id in ops and self.memory.match(memory_id) < ops[memory_id].num_tokens:
                lost.append(each)
        for each in lost:
            work.remove(each)
            self._release(each.shadow)
        return bool(lost)

    def _release_others(self, sequences: Many[Sequence]) -> bool:
        """Give back the memory of sequences that do not decode now; whether there was any."""
        decoding = set(sequences)
        others = [
            shadow
            for sequence, shadow in self._shadows.items()
            if shadow is not None and shadow.own.memory_id is not None and sequence not in decoding
        ]
        for shadow in others:
            self._release(shadow)
        return bool(others)


def _shadow_of(sequence: Sequence) -> _Shadow | None:
    request = sequence.request
    if not request.params.speculative or request.beams is not None:
        return None
    own = Sequence(request, sequence.index, [], 0)
    row = SamplingRow(
        params=with_checked(request.params, logprobs=None),
        seed=request.seed,
        index=sequence.index,
        tokens=own.tokens,
        num_prompt=sequence.num_prompt,
        stop_ids=request.stop_ids,
    )
    return _Shadow(own, row)
