"""A device that computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vmserve.runner.cpu_runtime import CpuRuntime

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall
    from vmserve.attention.states import StepStates
    from vmserve.models import LoadedModel
    from vmserve.models.hidden import HiddenRows
    from vmserve.sampling.tokens import Logits

__all__ = ["NullRuntime"]


class NullRuntime(CpuRuntime):
    """The processor without a forward pass: in all logits ``token_id`` is the likeliest token."""

    def __init__(self, token_id: int = 17, *, driver: str = "host") -> None:
        super().__init__(driver=driver)
        self.token_id = token_id
        #: Tokens of the last step.
        self.num_tokens = 0
        self._logits = np.zeros((0, 0), dtype=np.float32)

    def forward(
        self,
        model: LoadedModel,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        logits_rows: NDArray[np.int64] | None = None,
        drawn: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
        states: StepStates | None = None,
    ) -> Logits:
        self.num_tokens = len(token_ids)
        num_rows = len(token_ids if logits_rows is None else logits_rows)
        if num_rows > len(self._logits):
            self._logits = np.zeros((num_rows, model.config.vocab_size), dtype=np.float32)
            self._logits[:, self.token_id] = 1.0
        return self._logits[:num_rows]
