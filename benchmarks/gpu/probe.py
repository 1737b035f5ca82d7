"""The GPU probe: one command that answers the riskiest questions about a virtual-memory KV cache.

``python benchmarks/gpu/probe.py`` on a machine with an NVIDIA GPU takes under 8 minutes; see
README.md beside this file. ``--dry-run`` runs the probe's own logic over host memory instead.
"""

import sys

from gpu_probe.cli import main

if __name__ == "__main__":
    sys.exit(main())
