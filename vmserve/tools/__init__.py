"""Tool calls in a model's text: parsers for the conventions of several families of models."""

from __future__ import annotations
