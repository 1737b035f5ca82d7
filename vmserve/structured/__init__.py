"""Structured output: answers that match a JSON schema, a regex, a choice or a grammar.

What a request asks for is plain data (``spec``). It is compiled twice: first in a process of
its own with limits of time and memory (``vetting``, ``worker``), and only what passes there in
the engine's process (``compiler``). Each sequence then has a ``guide``: the state of the
grammar's parser, which says what tokens may follow.
"""

from __future__ import annotations
