"""Choose the regime of a request: forced, or the one with the lower predicted cost.

The cost model adds up what differs between the two views over a request's life, from a
:class:`~vmserve.scheduler.profile.DeviceProfile`: mapping calls; forks; copies of a cached prefix;
the kernels themselves; memory lost in partly used pages while memory is short; calls of a second
kernel family, if no other in the batch uses it, or, if cheaper, changing the regime of the whole
batch. Layers outside attention cost the same in both and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from vmserve.memory.base import Regime, unit_tokens
from vmserve.scheduler.attention_ratio import AttentionRatio

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from vmserve.attention.base import RaggedBatch
    from vmserve.memory.layout import KVLayout
    from vmserve.scheduler.profile import DeviceProfile
    from vmserve.scheduler.sequence import Request

__all__ = [
    "CostModel",
    "RegimeChoice",
    "RegimeCosts",
    "RegimePolicy",
    "RunningLength",
    "Situation",
]

#: Share of all differing time that the paged view must be predicted to save. Kernels whose times
#: differ by chance are equal in the profile already.
_MARGIN = 0.02
#: Saving for which a running batch changes regime, as a multiple of the cost.
_WORTH = 2.0
#: Weight of a new observation in a running average.
_NEWEST = 0.05
#: Share by which the remembered least time of a step grows with each step.
_FORGOTTEN = 0.001
#: Tokens that a request is expected to generate before any has ended.
_FIRST_GUESS = 256


class Situation(NamedTuple):
    """The state of the engine when a request's regime is chosen."""

    #: Running sequences by regime, without the request's own.
    num_virtual: int = 0
    num_paged: int = 0
    num_free_slots: int = 1
    #: Tokens of the request's prompt in the prefix cache.
    num_hit: int = 0
    #: Pressure on memory. 0: memory to spare; 1: every page is wanted.
    pressure: float = 0.0
    #: Share of a virtual sequence's pages that its slot does not have mapped already.
    unmapped_share: float = 1.0
    #: Page limit of the pool.
    limit_pages: int = 1
    #: Seconds of a step that do not depend on its sequences.
    fixed_seconds: float = 0.0
    #: Expected number of preemptions of a request, after each of which it starts again.
    num_preemptions: float = 0.0

    def num_running(self, regime: Regime) -> int:
        return self.num_virtual if regime is Regime.VIRTUAL else self.num_paged

    @property
    def page_step_seconds(self) -> float:
        """Cost of keeping a page for one step from others that want it.

        With the page's share of the pool they would be done that much sooner, and that many fewer
        steps would be needed.
        """
        return self.pressure * self.fixed_seconds / self.limit_pages


class RunningLength(NamedTuple):
    """A running sequence's tokens, and how many more it is expected to generate."""

    num_tokens: int
    num_left: int


class RegimeCosts(NamedTuple):
    """Seconds over the life of a request, by cause."""

    maps: float
    forks: float
    prefix: float
    kernels: float
    memory: float
    batch: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def own(self) -> float:
        """The costs that do not depend on other sequences in the batch."""
        return self.total - self.batch


class RegimeChoice(NamedTuple):
    """``reason``: "forced", "slots" (none is free), "default" (the paged view saves nothing, or too
    little), or the cost that decided."""

    regime: Regime
    reason: str
    #: Predicted seconds that differ, by regime; empty if nothing was predicted.
    predicted: dict[str, float]
    #: Whether running sequences, all in the other regime, are to change to this one.
    moves_batch: bool = False
    #: Seconds that the request would have saved in the other regime, had others been there too.
    forgone: float = 0.0


class CostModel:
    """The cost of a request in each regime, from a device profile and a layout."""

    def __init__(self, profile: DeviceProfile, layout: KVLayout) -> None:
        self.profile = profile
        #: Measured attention seconds for each second of the profile.
        self.ratio = AttentionRatio()
        self._layout = layout
        self._token_bytes = layout.total_page_bytes / layout.page_tokens

    def costs(
        self, request: Request, num_output: int, regime: Regime, around: Situation
    ) -> RegimeCosts:
        """Predict the costs. ``num_output``: expected tokens of each of its sequences."""
        virtual = regime is Regime.VIRTUAL
        num_prompt = len(request.prompt_token_ids)
        end = num_prompt + num_output
        unit = unit_tokens(self._layout, regime)
        tail = around.num_hit % unit  # of the prefix: copied, so that it exists twice
        is_first = around.num_running(regime) == 0
        num_running = around.num_virtual + around.num_paged + request.num_branches
        waste = (tail + request.num_branches * unit / 2) / self._layout.page_tokens
        return RegimeCosts(
            maps=self._maps(request, num_prompt, end, around) if virtual else 0.0,
            forks=self._forks(request, num_prompt, end, unit, virtual=virtual),
            prefix=self._copies(tail),
            kernels=self._kernels(
                request, num_prompt, num_output, regime, around.num_hit, num_running
            ),
            memory=waste * num_output * around.page_step_seconds,
            batch=(
                self.ratio.of(num_running) * self.profile.kernels(regime).call * num_output
                if is_first
                else 0.0
            ),
        )

    def _maps(self, request: Request, num_prompt: int, end: int, around: Situation) -> float:
        """Seconds for mapping: the prompt's pages while the first step waits, the others hidden.

        A slot may have pages of an earlier sequence mapped, but never those of a cached prefix.
        """
        at_once = self._layout.pages_for(num_prompt + 1)
        shared = around.num_hit // self._layout.page_tokens
        later = self._layout.pages_for(end) - at_once
        profile = self.profile
        own = profile.map_page * (at_once - shared)
        hidden = profile.map_page_hidden * later * request.num_branches
        once = profile.map_page * shared + around.unmapped_share * (own + hidden)
        return once * (1 + around.num_preemptions)

    def _forks(
        self, request: Request, num_prompt: int, end: int, unit: int, *, virtual: bool
    ) -> float:
        """Seconds for forks. Choices fork once, at the prompt's end; about half of the beams fork
        at every step.

        A fork copies the used part of its last page or block, half of it on average. In the virtual
        view it also maps every page into its own slot.
        """
        lengths: Iterable[int] = (num_prompt,)
        num_forks = request.num_branches - 1
        if request.is_gang:
            lengths = range(num_prompt, end)
            num_forks = request.num_branches // 2
        if num_forks == 0:
            return 0.0
        copied = (num_prompt % unit) if not request.is_gang else (unit - 1) / 2
        pages = sum(self._layout.pages_for(length) for length in lengths) if virtual else 0
        times = 1 if not request.is_gang else end - num_prompt
        return num_forks * (self.profile.map_page * pages + times * self._copies(copied))

    def _copies(self, num_tokens: float) -> float:
        return num_tokens * self._token_bytes / self.profile.copy_bytes_per_second

    def _kernels(
        self,
        request: Request,
        num_prompt: int,
        num_output: int,
        regime: Regime,
        num_hit: int,
        num_running: int,
    ) -> float:
        kernel = self.profile.kernels(regime)
        read = num_output * (num_prompt + (num_output + 1) / 2)
        pairs = (num_prompt - num_hit) * (num_prompt + num_hit + 1) / 2
        decodes = request.num_branches * (kernel.sequence * num_output + kernel.read * read)
        prompt = self.ratio.of(num_running, prompts=True) * kernel.pair * pairs
        return self.ratio.of(num_running) * decodes + prompt

    # -- those that run -----------------------------------------------------------------

    def cost_of_moving(
        self, regime: Regime, leaving: list[RunningLength], page_step_seconds: float
    ) -> float:
        """Seconds to change all running sequences, which are of ``regime``, to the other regime."""
        saved, cost = self.gain_of_leaving(regime, leaving, 0, page_step_seconds)
        return _WORTH * cost - saved

    def gain_of_leaving(
        self,
        regime: Regime,
        leaving: list[RunningLength],
        num_steps: int,
        page_step_seconds: float = 0.0,
    ) -> tuple[float, float]:
        """What changing all sequences of ``regime`` to the other saves, and what it costs.

        ``num_steps``: steps for which both regimes are expected to run in parallel.
        ``page_step_seconds``: as in :class:`Situation`.
        """
        kernels, others = self.profile.kernels(regime), self.profile.kernels(regime.other)
        ratio = self.ratio.of(len(leaving))
        saved = ratio * kernels.call * num_steps
        coarser = unit_tokens(self._layout, regime) - unit_tokens(self._layout, regime.other)
        waste = coarser / 2 / self._layout.page_tokens * page_step_seconds
        for length, left in leaving:
            read = left * (length + left / 2)
            saved += left * (ratio * (kernels.sequence - others.sequence) + waste)
            saved += ratio * read * (kernels.read - others.read)
        if regime is Regime.VIRTUAL:
            return saved, 0.0  # the pages' blocks are the block table
        # At worst, nothing lies in order and all of it is copied.
        pages = sum(self._layout.pages_for(length) for length, _ in leaving)
        tokens = sum(length for length, _ in leaving)
        return saved, self.profile.map_page * pages + self._copies(tokens)


class RegimePolicy:
    """``virtual`` and ``paged`` force a regime; ``auto`` asks the cost model.

    Without a cost model, ``auto`` keeps requests that fork paged and all others virtual.
    """

    def __init__(
        self, regime: Literal["auto", "virtual", "paged"], costs: CostModel | None = None
    ) -> None:
        self._forced = None if regime == "auto" else Regime(regime)
        self._model = costs
        self._mean_output = float(_FIRST_GUESS)
        self._least_step_seconds = 0.0
        self._num_preemptions = 0.0
        #: Seconds that requests have lost by joining a batch that is not in this regime.
        self._forgone = dict.fromkeys(Regime, 0.0)

    @property
    def predicts(self) -> bool:
        """Whether a choice depends on the situation of the request."""
        return self._forced is None and self._model is not None

    @property
    def fixed_seconds(self) -> float:
        """Fixed seconds of each step: from the profile, but at most the least time seen lately."""
        profile = self.profile
        if profile is not None and profile.weights > 0:
            return profile.step + profile.weights
        return self._least_step_seconds

    @property
    def profile(self) -> DeviceProfile | None:
        """The profile behind the predictions; None if there are none."""
        return None if self._model is None else self._model.profile

    # -- what is observed ---------------------------------------------------------------

    def attended(self, regime: Regime, batch: RaggedBatch, seconds: float) -> float:
        """Learn a step's attention seconds in one regime; returns the prediction, or 0 without
        one."""
        model = self._model
        if model is None:
            return 0.0
        # Called at each step: keep it to few calls.
        num_seqs = batch.num_new.shape[0]
        profile = model.profile
        kernels = profile.virtual if regime is Regime.VIRTUAL else profile.paged
        predicted = kernels.batch_seconds(batch.num_past, batch.num_new, batch.num_tokens)
        prompts = batch.num_tokens > num_seqs
        return predicted * model.ratio.learn(num_seqs, predicted, seconds, prompts=prompts)

    def stepped(self, seconds: float) -> None:
        """Learn the seconds of a step."""
        least = self._least_step_seconds * (1 + _FORGOTTEN)
        self._least_step_seconds = min(seconds, least or seconds)

    @property
    def num_preemptions(self) -> float:
        """Preemptions of a request, as a running average."""
        return self._num_preemptions

    def finished(self, num_output: int, num_preemptions: int = 0) -> None:
        """Learn from a sequence that ended with ``num_output`` tokens, and its request's
        preemptions."""
        self._mean_output += _NEWEST * (num_output - self._mean_output)
        self._num_preemptions += _NEWEST * (num_preemptions - self._num_preemptions)

    @property
    def mean_output(self) -> float:
        return self._mean_output

    def expected_output(self, request: Request) -> int:
        return max(1, min(request.max_tokens, round(self._mean_output)))

    # -- choices ------------------------------------------------------------------------

    def choose(
        self,
        request: Request,
        around: Situation | None = None,
        cost_of_moving: Callable[[], float | None] = lambda: None,
    ) -> RegimeChoice:
        """Choose a regime.

        ``cost_of_moving``: seconds to change all running sequences, which are of one regime, to the
        other; negative if they gain. None: some cannot change, or it is not known.
        """
        if self._forced is not None:
            return RegimeChoice(self._forced, "forced", {})
        if self._model is None or around is None:
            forks = request.num_branches > 1
            return RegimeChoice(
                Regime.PAGED if forks else Regime.VIRTUAL, "forks" if forks else "default", {}
            )
        num_output = self.expected_output(request)
        costs = {
            regime: self._model.costs(request, num_output, regime, around) for regime in Regime
        }
        predicted = {regime.value: cost.total for regime, cost in costs.items()}
        virtual, paged = costs[Regime.VIRTUAL], costs[Regime.PAGED]
        if around.num_free_slots <= 0:
            return RegimeChoice(Regime.PAGED, "slots", predicted)
        forgone = 0.0
        if bool(around.num_virtual) != bool(around.num_paged):  # the batch has one regime
            there = Regime.PAGED if around.num_paged else Regime.VIRTUAL
            other = there.other
            forgone = costs[there].own - costs[other].own
            # The costs of a cached prefix in a slot, mapping and copies, are counted; kernels are
            # estimated.
            margin = 0.0 if around.num_hit else _MARGIN * costs[there].own
            moving = cost_of_moving() if forgone > margin else None
            # With what others have forgone, both staying here and being alone there must cost more.
            least = min(forgone, costs[other].batch) + self._forgone[other]
            if moving is not None and moving < least:
                reason = _deciding(costs[other]._replace(batch=0.0), costs[there])
                return RegimeChoice(other, reason, predicted, moves_batch=True)
        regime, reason = Regime.VIRTUAL, "default"
        if paged.total < (1 - _MARGIN) * virtual.total:
            regime, reason = Regime.PAGED, _deciding(paged, virtual)
        elif virtual.total < paged.total:
            reason = _deciding(virtual, paged)
        return RegimeChoice(regime, reason, predicted, forgone=forgone)

    def kept(self, choice: RegimeChoice) -> None:
        """Learn that a request runs with this choice.

        What newcomers lose by joining the batch in its regime adds up. Once it exceeds the cost of
        moving the batch, the next newcomer moves it. So no more than twice the better of both is
        paid, whatever comes (the ski rental problem: rent until the rents reach the price).
        """
        other = choice.regime.other
        self._forgone[choice.regime] = 0.0
        self._forgone[other] = max(0.0, self._forgone[other] + choice.forgone)

    def cost_of_moving(
        self, regime: Regime, leaving: list[RunningLength], page_step_seconds: float
    ) -> float | None:
        """:meth:`CostModel.cost_of_moving`; None without a cost model."""
        if self._model is None:
            return None
        return self._model.cost_of_moving(regime, leaving, page_step_seconds)

    def reconsider(
        self,
        running: Mapping[Regime, list[RunningLength]],
        forking: Collection[Regime] = (),
        page_step_seconds: float = 0.0,
    ) -> Regime | None:
        """The regime that all its sequences should leave now; None if that does not pay.

        ``running``: sequences of each regime. ``forking``: regimes that some must stay in because
        they will fork again.
        """
        if self._forced is not None or self._model is None:
            return None
        num_steps = min(max((left for _, left in each), default=0) for each in running.values())
        best: tuple[float, Regime] | None = None
        for regime, leaving in running.items():
            if regime in forking:
                continue
            saved, cost = self._model.gain_of_leaving(regime, leaving, num_steps, page_step_seconds)
            if saved > _WORTH * cost and (best is None or saved - cost > best[0]):
                best = (saved - cost, regime)
        return None if best is None else best[1]


def _deciding(better: RegimeCosts, worse: RegimeCosts) -> str:
    """The cost at which the better choice saves most."""
    return max(better._fields, key=lambda name: getattr(worse, name) - getattr(better, name))
