"""What a run found, and the shape of an answer to one of the design's questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .common import Record


@dataclass(frozen=True)
class Verdict:
    """``answer`` is yes, no, or a short finding; ``open`` when the probe did not find out."""

    question: str
    answer: str
    detail: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """One line."""
        return f"{self.question} {self.answer.upper()}. {self.detail}".strip()

    def to_json(self) -> Record:
        """As a plain dictionary."""
        return {
            "question": self.question,
            "answer": self.answer,
            "detail": self.detail,
            "numbers": self.numbers,
        }


@dataclass(frozen=True)
class Findings:
    """All records of a run, and how each section ended."""

    records: Sequence[Record]
    status: dict[str, str]

    def of(self, section: str, kind: str) -> list[Record]:
        """The records of one kind from one section, in the order written."""
        return [r for r in self.records if r["section"] == section and r["kind"] == kind]

    def last(self, section: str, kind: str, **match: Any) -> Record | None:
        """The latest record of a kind whose fields equal ``match``."""
        for record in reversed(self.of(section, kind)):
            if all(record.get(name) == value for name, value in match.items()):
                return record
        return None


def yes(condition: bool) -> str:
    """``yes`` or ``no``."""
    return "yes" if condition else "no"


UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)
"""What records of an unforeseen shape raise: an answer is lost then, never the report."""


class Unanswered(Exception):
    """The records that a question needs are not there."""


def need(records: list[Record]) -> list[Record]:
    """``records``, or Unanswered when there are none."""
    if not records:
        raise Unanswered
    return records


def need_one(record: Record | None) -> Record:
    """``record``, or Unanswered when there is none."""
    if record is None:
        raise Unanswered
    return record
