"""RMSNorm with the residual before it, in one launch."""

from __future__ import annotations

import logging

import torch

from vmserve.attention.cuda.launcher import CudaLauncher, Launcher
from vmserve.attention.cuda.params import NormArgs
from vmserve.attention.cuda.variant import HEAD_DIMS, Variant

__all__ = ["NormKernel", "norm_kernel"]

logger = logging.getLogger(__name__)
#: Elements of a row: the most that a block's threads hold, and how many they move at once.
_MAX_SIZE, _UNIT = 16384, 8


class NormKernel:
    """The kernel, on the current stream. ``variant``: of the kernels; only its dtype matters."""

    def __init__(self, launcher: Launcher, variant: Variant) -> None:
        self._launcher = launcher
        self._variant = variant

    def takes(self, x: torch.Tensor) -> bool:
        """Whether the kernel supports these rows."""
        return (
            x.ndim == 2
            and x.is_contiguous()
            and x.shape[1] <= _MAX_SIZE
            and x.shape[1] % _UNIT == 0
            and x.data_ptr() % 16 == 0
        )

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The norm of ``x`` ``[rows, size]``, to which ``residual`` is added in place first."""
        out = torch.empty_like(x) if out is None else out
        if x.shape[0] == 0:
            return out
        args = NormArgs()
        args.x, args.weight, args.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        if residual is not None:
            args.residual = residual.data_ptr()
        args.eps, args.size = eps, x.shape[1]
        self._launcher.launch(self._variant, "vms_norm", x.shape[0], args)
        return out


def norm_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> NormKernel | None:
    """The kernel, loaded so that it may be captured; None if the device cannot run it.

    Torch's operations do the same. ``head_dim``: the model's, whose variant attention may have
    compiled already.
    """
    variant = Variant(dtype, head_dim if head_dim in HEAD_DIMS else HEAD_DIMS[0], True)
    refusal = Variant.refusal(variant.head_dim, dtype)
    if refusal is None:
        launcher = CudaLauncher(device)
        refusal = launcher.refusal(variant.head_dim)
    if refusal is not None:
        logger.info("norms are torch's operations: %s", refusal)
        return None
    launcher.resident(variant)
    return NormKernel(launcher, variant)
