"""``vmserve bench papers``: experiments of the PagedAttention paper, simulated."""

from vmserve.bench.papers.figures import FIGURES, Options

__all__ = ["FIGURES", "Options"]
