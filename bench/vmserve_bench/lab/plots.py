"""Files of plots. Needs the ``bench`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.figure import Figure

__all__ = ["save"]


def save(
    plots: Mapping[str, tuple[str, Callable[[Any], Figure]]],
    sections: Mapping[str, Any],
    directory: Path,
) -> list[Path]:
    """Draw each file of ``plots`` whose section is there; the files' paths.

    ``plots``: by file name, the section that it is of and the function that draws it.
    """
    paths = []
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "vmserve"}):
        for name, (section, plot) in plots.items():
            if section in sections:
                paths.append(directory / f"{name}.png")
                plot(sections[section]).savefig(paths[-1], dpi=110, metadata={"Software": None})
    return paths
