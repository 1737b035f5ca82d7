"""The exception tree of vmserve.

    VmserveError
    ├── InvalidRequestError (also a ValueError)   the request is wrong: the caller can mend it
    ├── ConfigurationError (also a ValueError)    an engine option or a model directory is wrong
    │   ├── ChatTemplateError                     the model's template cannot be used: no chats
    │   └── UnsupportedError                      understood, but not offered by this version
    ├── OutOfMemoryError (also a MemoryError)     recoverable: carries numbers and a remedy
    ├── DeadlineError (also a TimeoutError)       the request's time was over before its answer
    ├── DriverError (also an OSError)             the memory system refused a call
    ├── EngineDeadError                           the engine stopped; nothing more can be served
    │   └── RankLostError                         because a process that computes with it has ended
    └── FrameTooLargeError                        an answer is too long for a message of a socket

Every message names the number that broke the rule and what to do about it, and
never contains a traceback or an address.
"""

from __future__ import annotations

__all__ = [
    "ChatTemplateError",
    "ConfigurationError",
    "DeadlineError",
    "DriverError",
    "EngineDeadError",
    "FrameTooLargeError",
    "InvalidRequestError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "RankLostError",
    "UnsupportedError",
    "VmserveError",
]


class VmserveError(Exception):
    """Base of every error that vmserve raises on purpose."""


class InvalidRequestError(VmserveError, ValueError):
    """A request that can never be served as it is.

    ``param`` names the offending field where there is one (the HTTP server
    reports it as ``error.param``).
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """A prompt of more tokens than the limit; of a long text only the beginning was read."""


class ConfigurationError(VmserveError, ValueError):
    """An engine option, or the files of a model, cannot be used."""


class ChatTemplateError(ConfigurationError):
    """The chat template in use is no template, or it is not known which of several it is."""


class UnsupportedError(ConfigurationError):
    """A documented feature that this version does not offer yet."""


class OutOfMemoryError(VmserveError, MemoryError):
    """Memory that was asked for is not there; the engine's state is unchanged."""


class DeadlineError(VmserveError, TimeoutError):
    """The request had a time limit and was not finished within it; its memory is free again."""


class DriverError(VmserveError, OSError):
    """A page driver call failed; the message names the call and the limit behind it.

    ``sticky``: the device is lost, and every later call may fail. ``completed``: so many runs of
    a batched call are done; the others had no effect.
    """

    sticky: bool = False
    completed: int = 0


class EngineDeadError(VmserveError):
    """The engine has stopped and cannot serve this or any further request."""


class RankLostError(EngineDeadError):
    """One of the engine's ranks has ended or hangs; the message says which, and how."""


class FrameTooLargeError(VmserveError):
    """A message between two processes is too long. Nothing of it was sent or read."""
