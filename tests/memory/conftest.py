"""A million random steps, one command:

pytest tests/memory/test_stateful.py --hypothesis-profile=thorough --timeout=0
"""

from __future__ import annotations

from hypothesis import settings

#: Of ``scripts/test --fast``.
settings.register_profile("fast", max_examples=25, deadline=None)
settings.register_profile("thorough", max_examples=20_000, stateful_step_count=50, deadline=None)
