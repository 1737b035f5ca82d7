"""``vmserve bench papers``: simulated (``figures``) and real (``real``, ``real_virtual``)."""

from vmserve.bench.papers.figures import FIGURES, Options

__all__ = ["FIGURES", "Options"]
