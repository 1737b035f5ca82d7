"""The command ``vmserve``, also as ``python -m vmserve``.

Until it runs, Ctrl-C ends the process as the system does: Python would print the traceback of
whatever is being imported. Then SIGTERM ends it in order, as Ctrl-C does, so that temporary files
go; a second one ends it at once.
"""

from __future__ import annotations

import signal
from types import FrameType

_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:  # not where nohup ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vmserve.cli import main as cli  # noqa: E402 - see above

__all__ = ["main"]


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)  # as shells have it


def main() -> None:
    """Run the command line, which ends the process."""
    signal.signal(signal.SIGINT, _INTERRUPT)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)
    try:
        cli.main()
    finally:
        if _INTERRUPT is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
