"""The command ``vmserve``, also as ``python -m vmserve``.

Until it runs, Ctrl-C ends the process as the system does: Python would print the traceback of
whatever is being imported.
"""

from __future__ import annotations

import signal

_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:  # not where nohup ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vmserve.cli import main as cli  # noqa: E402 - see above

__all__ = ["main"]


def main() -> None:
    """Run the command line, which ends the process."""
    signal.signal(signal.SIGINT, _INTERRUPT)
    try:
        cli.main()
    finally:
        if _INTERRUPT is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
