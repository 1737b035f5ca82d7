"""How long an engine has been silent, and whether that is longer than it usually is."""

from __future__ import annotations

__all__ = ["Pulse"]

#: An engine is suspected when it leaves this many times its usual number of pings unanswered.
_TIMES = 4
#: Fewest unanswered pings of a suspected engine.
_LEAST = 2.0
#: Part of the longest silence that is left after each ping.
_REMEMBERED = 0.99


class Pulse:
    """Counts pings, not seconds: whoever sends them may have been stopped itself.

    An engine answers a ping between two steps, so its last steps show how many it leaves
    unanswered. ``most``: pings after which it is suspected however long its steps are.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._usual = 1.0
        #: Pings since the engine's last message, including the one being sent.
        self.num_silent = 0

    def ping(self) -> None:
        """Note that a ping is sent."""
        self.num_silent += 1
        self._usual = max(1.0, self._usual * _REMEMBERED)

    def hear(self) -> None:
        """Note that the engine has said something."""
        if self.num_silent > self._usual:
            # Twice as much at most: after one that hung, the next one is not waited for as long.
            self._usual = min(self.num_silent, 2 * self._usual)
        self.num_silent = 0

    @property
    def is_suspect(self) -> bool:
        return self.num_silent > max(_LEAST, min(_TIMES * self._usual, self._most))
