"""Which regime a request is kept in: forced, or the one that is predicted to cost less.

What differs between the two views of a request's pages, over its whole life, is added up from a
:class:`~vmserve.scheduler.profile.DeviceProfile`: map calls, forks, what of a cached prefix must be
copied, the kernels themselves, memory that page tails keep from others while it is short, and
the calls of a second kernel family where nobody else in the batch uses it: or, if that is
cheaper, what it costs everybody in the batch to change regimes with the newcomer. The layers
outside attention cost both alike and are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from vmserve.memory.base import Regime
from vmserve.scheduler.attention_ratio import AttentionRatio
from vmserve.scheduler.demand import unit_tokens

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

#: The paged view must be predicted to save this share of all that differs; kernels whose times
#: differ by chance are equal in the profile already.
_MARGIN = 0.02
#: A running batch changes its regimes when that saves so many times what it costs.
_WORTH = 2.0
#: Weight of a new observation in a running average.
_NEWEST = 0.05
#: By what share the least time of a step that was seen is forgotten with each other one.
_FORGOTTEN = 0.001
#: Tokens that a request is expected to generate before any has ended.
_FIRST_GUESS = 256


class Situation(NamedTuple):
    """What surrounds a request when its regime is chosen."""

    #: Running sequences by regime, without the request's own.
    num_virtual: int = 0
    num_paged: int = 0
    num_free_slots: int = 1
    #: Tokens of its prompt that the prefix cache has.
    num_hit: int = 0
    #: 0: memory to spare; 1: every page is wanted.
    pressure: float = 0.0
    #: Of the pages that a virtual sequence takes, the share that its slot does not show already.
    unmapped_share: float = 1.0
    #: Pages that the pool may have.
    limit_pages: int = 1
    #: What a step takes however many sequences are in it.
    fixed_seconds: float = 0.0
    #: How often a request is expected to be preempted, and so starts again.
    num_preemptions: float = 0.0

    def num_running(self, regime: Regime) -> int:
        return self.num_virtual if regime is Regime.VIRTUAL else self.num_paged

    @property
    def page_step_seconds(self) -> float:
        """What it costs to keep a page for a step from others who want it: with its share of the
        pool they would be so much sooner done, and so many steps fewer would be needed."""
        return self.pressure * self.fixed_seconds / self.limit_pages


class RunningLength(NamedTuple):
    """A running sequence's tokens, and how many it is expected to generate yet."""

    num_tokens: int
    num_left: int


class RegimeCosts(NamedTuple):
    """Seconds over the life of a request, by what causes them."""

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
        """Without what comes of who else is in the batch."""
        return self.total - self.batch


class RegimeChoice(NamedTuple):
    """``reason``: "forced", "slots" (none is free), "default" (nothing speaks for the paged
    view, or not enough), or the cost that decided."""

    regime: Regime
    reason: str
    #: Predicted seconds of what differs, by regime; empty where nothing was predicted.
    predicted: dict[str, float]
    #: All that run, in the other regime, are to change to this one.
    moves_batch: bool = False
    #: Seconds that the request would have saved in the other regime, had it not been alone there.
    forgone: float = 0.0


class CostModel:
    """What a request costs in each regime, from a device's profile and a layout."""

    def __init__(self, profile: DeviceProfile, layout: KVLayout) -> None:
        self.profile = profile
        #: What attention takes for each second of the profile's.
        self.ratio = AttentionRatio()
        self._layout = layout
        self._token_bytes = layout.total_page_bytes / layout.page_tokens

    def costs(
        self, request: Request, num_output: int, regime: Regime, around: Situation
    ) -> RegimeCosts:
        """``num_output``: tokens that each of its sequences is expected to generate."""
        virtual = regime is Regime.VIRTUAL
        num_prompt = len(request.prompt_token_ids)
        end = num_prompt + num_output
        unit = unit_tokens(self._layout, regime)
        tail = around.num_hit % unit  # of the prefix, copied and so there twice
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
        """The prompt's pages while the first step waits, the others behind the steps.

        A slot may show pages of an earlier sequence already, but never those of a cached prefix.
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
        """Choices fork once, at the end of the prompt; about half of the beams at every step.

        A fork copies what of its last page, or block, is filled: half of it on average, and in
        the virtual view maps every page at its own slot.
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
        """What it costs all sequences of ``regime``, the only ones, to change to the other."""
        saved, cost = self.gain_of_leaving(regime, leaving, 0, page_step_seconds)
        return _WORTH * cost - saved

    def gain_of_leaving(
        self,
        regime: Regime,
        leaving: list[RunningLength],
        num_steps: int,
        page_step_seconds: float = 0.0,
    ) -> tuple[float, float]:
        """What it saves, and what it costs, if all sequences of ``regime`` change to the other.

        ``num_steps``: for how long both regimes are expected to run beside each other.
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
        # At worst nothing lies in order and all of it is copied.
        pages = sum(self._layout.pages_for(length) for length, _ in leaving)
        tokens = sum(length for length, _ in leaving)
        return saved, self.profile.map_page * pages + self._copies(tokens)


class RegimePolicy:
    """``virtual`` and ``paged`` are what they say; ``auto`` asks the cost model.

    Without a cost model ``auto`` keeps what forks paged and everything else virtual.
    """

    def __init__(
        self, regime: Literal["auto", "virtual", "paged"], costs: CostModel | None = None
    ) -> None:
        self._forced = None if regime == "auto" else Regime(regime)
        self._model = costs
        self._mean_output = float(_FIRST_GUESS)
        self._least_step_seconds = 0.0
        self._num_preemptions = 0.0
        #: What requests have lost by joining a batch that is not in this regime.
        self._forgone = dict.fromkeys(Regime, 0.0)

    @property
    def predicts(self) -> bool:
        """Whether a choice asks what surrounds the request."""
        return self._forced is None and self._model is not None

    @property
    def fixed_seconds(self) -> float:
        """Of each step, from the profile; at most so much, where it does not know that: the least
        that one has taken lately."""
        profile = self.profile
        if profile is not None and profile.weights > 0:
            return profile.step + profile.weights
        return self._least_step_seconds

    @property
    def profile(self) -> DeviceProfile | None:
        """What predictions are made from; None where none are made."""
        return None if self._model is None else self._model.profile

    # -- what is observed ---------------------------------------------------------------

    def attended(self, regime: Regime, batch: RaggedBatch, seconds: float) -> float:
        """The batch's sequences of a regime spent so long in attention; returns what was predicted,
        0 where nothing is."""
        model = self._model
        if model is None:
            return 0.0
        # Once a step: as few calls as can be.
        num_seqs = batch.num_new.shape[0]
        profile = model.profile
        kernels = profile.virtual if regime is Regime.VIRTUAL else profile.paged
        predicted = kernels.batch_seconds(batch.num_past, batch.num_new, batch.num_tokens)
        prompts = batch.num_tokens > num_seqs
        return predicted * model.ratio.learn(num_seqs, predicted, seconds, prompts=prompts)

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        least = self._least_step_seconds * (1 + _FORGOTTEN)
        self._least_step_seconds = min(seconds, least or seconds)

    @property
    def num_preemptions(self) -> float:
        """Of a request, on average lately."""
        return self._num_preemptions

    def finished(self, num_output: int, num_preemptions: int = 0) -> None:
        """A sequence ended with so many tokens generated; its request was so often preempted."""
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
        """``cost_of_moving``: what it costs those that run, all of one regime, to change to the
        other; below 0 where they gain by it. None: some must stay, or it is not known."""
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
            # What a hit costs in a slot, its maps and copies, is counted; kernels are estimated.
            margin = 0.0 if around.num_hit else _MARGIN * costs[there].own
            moving = cost_of_moving() if forgone > margin else None
            # With what others have forgone: to stay here, or to be alone there, must be dearer.
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
        """A request is served so.

        What newcomers lose because they join the batch where it is adds up: once it is more than
        what it costs to move the batch, the next one moves it. So neither is paid more than twice,
        whatever comes (as whoever rents skis until the rents are the price of a pair).
        """
        other = choice.regime.other
        self._forgone[choice.regime] = 0.0
        self._forgone[other] = max(0.0, self._forgone[other] + choice.forgone)

    def cost_of_moving(
        self, regime: Regime, leaving: list[RunningLength], page_step_seconds: float
    ) -> float | None:
        """As the cost model says; None without one."""
        if self._model is None:
            return None
        return self._model.cost_of_moving(regime, leaving, page_step_seconds)

    def reconsider(
        self,
        running: Mapping[Regime, list[RunningLength]],
        forking: Collection[Regime] = (),
        page_step_seconds: float = 0.0,
    ) -> Regime | None:
        """The regime that all of its sequences should leave now; None if that does not pay.

        ``running``: those of each regime; ``forking``: regimes in which some will fork again, and
        stay for that.
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
