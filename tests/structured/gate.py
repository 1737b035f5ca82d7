"""Vetting that a test holds up, in the place of vetting processes."""

from __future__ import annotations

import threading

import pytest

from vmserve.structured.grammar import to_grammar
from vmserve.structured.spec import Constraint
from vmserve.structured.vetting import VettingProcess
from vmserve.structured.worker import Verdict

__all__ = ["Gate"]


class Gate:
    """Constraints with "bomb" in them pass when it is open; ``begun`` has all that came to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()
        monkeypatch.setattr(
            VettingProcess, "vet", lambda process, constraint: self._vet(constraint)
        )

    def _vet(self, constraint: Constraint) -> Verdict:
        self.begun.append(constraint.text)
        if "bomb" in constraint.text:
            assert self.open.wait(60)
        return Verdict(to_grammar(constraint))
