"""A buddy allocator of token slots, as for Orca in the PagedAttention paper."""

from __future__ import annotations

__all__ = ["Buddy", "power_of_two"]


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


class Buddy:
    """Contiguous chunks of 2^k out of ``size``, which must be a power of two itself.

    A chunk is split from the smallest free one that holds it, lowest address first, and merges with
    its buddy when both are free (Knuth, The Art of Computer Programming, 2.5).
    """

    def __init__(self, size: int) -> None:
        if size < 1 or power_of_two(size) != size:
            raise ValueError(f"a buddy allocator manages a power of two, not {size}")
        self.size = size
        self._free: dict[int, set[int]] = {size: {0}}

    @property
    def num_free(self) -> int:
        return sum(chunk * len(addresses) for chunk, addresses in self._free.items())

    def allocate(self, count: int) -> tuple[int, int] | None:
        """Allocate ``(address, chunk)`` for ``count``; None if no gap is large enough."""
        chunk = wanted = power_of_two(count)
        while chunk <= self.size and not self._free.get(chunk):
            chunk *= 2
        if chunk > self.size:
            return None
        address = min(self._free[chunk])
        self._free[chunk].remove(address)
        while chunk > wanted:
            chunk //= 2
            self._free.setdefault(chunk, set()).add(address + chunk)
        return address, wanted

    def free(self, address: int, chunk: int) -> None:
        """Free a pair from :meth:`allocate`, once."""
        while chunk < self.size and (address ^ chunk) in self._free.get(chunk, ()):
            self._free[chunk].remove(address ^ chunk)
            address &= ~chunk
            chunk *= 2
        self._free.setdefault(chunk, set()).add(address)
