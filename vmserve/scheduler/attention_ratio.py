"""How far attention's measured time is from what a device's profile says, learnt while serving."""

from __future__ import annotations

__all__ = ["AttentionRatio"]

#: What is remembered of the steps so far when another one is added: the last hundred count most.
_REMEMBERED = 0.99
#: Numbers of sequences by their size, which every step asks for: a table costs no call.
_MOST = 4096
_SIZES = tuple(num.bit_length() for num in range(_MOST + 1))


class AttentionRatio:
    """Measured seconds for each predicted one, by how many sequences compute in a step.

    A profile is measured on one layer whose pages are in the caches, on a processor with nothing
    else to do; a model's layers follow each other, and others take their part of a machine. The
    ratio is one for both regimes, so that a view that only long requests use does not look slow for
    that; steps that read prompts have their own.
    """

    def __init__(self) -> None:
        #: By (computes prompts, bit length of the number of sequences): sums of measured and
        #: predicted seconds, the newest counting most.
        self._sums: dict[tuple[bool, int], tuple[float, float]] = {}

    def learn(self, num_seqs: int, predicted: float, seconds: float, *, prompts: bool) -> float:
        """A step has taken so long; returns the ratio that was known of it before."""
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
        """Of steps with so many sequences, or else with the nearest number that was seen; 1 before
        any was."""
        size = _SIZES[min(num_seqs, _MOST)]
        seen = [key for key in self._sums if key[0] == prompts and self._sums[key][1]]
        if not seen:
            return 1.0
        measured, expected = self._sums[min(seen, key=lambda key: abs(key[1] - size))]
        return measured / expected
