"""Causal language models that the decoder does not know, run by ``transformers``.

Their attention goes through transformers' attention interface to our KV memory; everything
else is their own code. ``docs/decisions/0007-models-outside-the-decoder.md`` says what is
refused, and how that is found out.
"""

from __future__ import annotations

from vmserve.models.foreign.inspection import ForeignConfig
from vmserve.models.foreign.model import ForeignModel, load_foreign

__all__ = ["ForeignConfig", "ForeignModel", "load_foreign"]
