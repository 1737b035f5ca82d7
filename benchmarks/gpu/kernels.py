"""How fast are our CUDA kernels, against the memory and against the stock kernel?

``python benchmarks/gpu/kernels.py`` on a machine with an NVIDIA GPU; see README.md beside this
file. ``--dry-run`` runs everything on tiny shapes with the kernels emulated on the CPU.
"""

import sys

from gpu_probe.bench_kernels import main

if __name__ == "__main__":
    sys.exit(main())
