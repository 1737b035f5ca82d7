"""Learn, while serving, how attention's measured time differs from the device profile's."""

from __future__ import annotations

__all__ = ["AttentionRatio"]

#: Weight of the past when a step is added: about the last hundred steps count.
_REMEMBERED = 0.99
#: Number of sequences up to which bit lengths are in a table: every step needs one.
_MOST = 4096
_SIZES = tuple(num.bit_length() for num in range(_MOST + 1))


class AttentionRatio:
    """The ratio of measured to predicted seconds, by the number of sequences in a step.

    A profile is measured on one layer with warm caches and an idle processor. A model's layers
    follow each other, and other programs use the machine. Both regimes have one ratio, so that a
    view used only by long requests does not look slow. Steps that read prompts have their own.
    """

    def __init__(self) -> None:
        #: Sums of measured and predicted seconds by (computes prompts, bit length of the number of
        #: sequences). The newest weigh most.
        self._sums: dict[tuple[bool, int], tuple[float, float]] = {}

    def learn(self, num_seqs: int, predicted: float, seconds: float, *, prompts: bool) -> float:
        """Add a step's measured seconds; returns the ratio before it."""
        size = _SIZES[num_seqs] if num_seqs <= _MOST else _SIZES[_MOST]
        key = (prompts, size)
        if key not in self._sums:
            ratio = self.of(num_seqs, prompts=prompts)
            self._sums[key] = (seconds, predicted)
            return ratio
        measured, expected = self._sums[key]
        self._sums[key] = (_REMEMBERED * measured + seconds, _REMEMBERED * expected + predicted)
        return measured / expected if expected else 1.0

    def of(self, num_seqs: int, *, prompts: bool = False) -> float:
        """The ratio for ``num_seqs`` sequences or the nearest number seen; 1 before the first
        step."""
        size = _SIZES[min(num_seqs, _MOST)]
        seen = [key for key in self._sums if key[0] == prompts and self._sums[key][1]]
        if not seen:
            return 1.0
        measured, expected = self._sums[min(seen, key=lambda key: abs(key[1] - size))]
        return measured / expected
