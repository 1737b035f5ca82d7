"""What goes to standard error: lines of text, or one JSON object per line.

Lines that belong to a request carry its id, wherever they are written.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
import traceback

__all__ = ["LOG_FORMATS", "configure_logging", "request_id"]

LOG_FORMATS = ("text", "json")

#: Id of the request that the current task serves; "" outside of one.
request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def configure_logging(level: int, log_format: str, process: str = "") -> None:
    """Log to standard error. ``process`` names this one among several of one server."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = _JsonFormatter if log_format == "json" else _TextFormatter
    handler.setFormatter(formatter(process))
    logging.basicConfig(level=level, handlers=[handler])
    for noisy in ("uvicorn.error", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = f"{process}: " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        given = request_id.get()
        text = (
            f"{self.formatTime(record)} {record.levelname} {self._process}"
            f"{record.getMessage()}{f' (request {given})' if given else ''}"
        )
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _JsonFormatter(logging.Formatter):
    """Times are UTC, in ISO 8601."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._process:
            entry["process"] = self._process
        if given := request_id.get():
            entry["request_id"] = given
        if record.exc_info:
            entry["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(entry, ensure_ascii=False)
