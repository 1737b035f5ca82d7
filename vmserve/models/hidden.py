"""Final hidden states, for rows that want them instead of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

__all__ = ["HiddenRows"]


class HiddenRows:
    """Where a forward pass puts the states of the last ``num_rows`` rows that it is asked for.

    They are ``[num_rows, hidden_size]``, after the last norm: what the LM head would read.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._values: NDArray[np.float32] | torch.Tensor | None = None

    def put(self, values: NDArray[np.float32] | torch.Tensor) -> None:
        self._values = values

    def take(self) -> NDArray[np.float32]:
        """Return the states on the host; with a GPU, wait for them."""
        values = self._values
        assert values is not None, "the model has run"
        if isinstance(values, np.ndarray):
            return values
        host: NDArray[np.float32] = values.float().cpu().numpy()
        return host
