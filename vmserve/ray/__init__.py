"""vmserve inside Ray: offline work over datasets, and a Ray Serve deployment.

Ray places, starts and restarts; what is computed, and its options, are vmserve's. It is no
dependency of vmserve: ``pip install 'vmserve[ray]'``.
"""

from vmserve.ray.predictor import Predictor
from vmserve.ray.serve import deployment

__all__ = ["Predictor", "deployment"]
