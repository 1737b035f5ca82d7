"""What layers compute besides products and attention, in one launch each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from vmserve.attention.cuda.launcher import CudaLauncher, Launcher
from vmserve.attention.cuda.params import GateArgs, NormArgs
from vmserve.attention.cuda.variant import HEAD_DIMS, Variant

__all__ = ["GateKernel", "LayerKernels", "NormKernel", "layer_kernels"]

logger = logging.getLogger(__name__)
#: Elements of a row: the most that a block's threads hold, and those that they move at once.
_MAX_SIZE, _UNIT = 16384, 8
#: Elements of a row per block of the gate's kernel: one unit for each thread.
_GATE_ELEMENTS = 128 * _UNIT
#: Codes of csrc/cuda/params.h by the name in config.json.
_ACTIVATIONS: Mapping[str, int] = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1}


class NormKernel:
    """RMSNorm with the residual before it, on the current stream.

    ``variant``: of the kernels; only its dtype matters.
    """

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


class GateKernel:
    """``activation(gate) * up``, on the current stream: to the bit as torch's two operations.

    ``variant``: as of :class:`NormKernel`; ``activation``: of csrc/cuda/params.h.
    """

    def __init__(self, launcher: Launcher, variant: Variant, activation: int) -> None:
        self._launcher = launcher
        self._variant = variant
        self._activation = activation

    def takes(self, gate: torch.Tensor, up: torch.Tensor) -> bool:
        """Whether the kernel supports these rows, which may be parts of longer ones."""
        return (
            gate.ndim == 2
            and gate.shape == up.shape
            and gate.shape[1] % _UNIT == 0
            and all(
                x.dtype == self._variant.dtype
                and x.stride(1) == 1
                and x.stride(0) % _UNIT == 0
                and x.data_ptr() % 16 == 0
                for x in (gate, up)
            )
        )

    def __call__(
        self, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``gate`` and ``up``: ``[rows, size]``; ``out``: the same (default: ``gate``)."""
        out = gate if out is None else out
        if gate.numel() == 0:
            return out
        args = GateArgs()
        args.gate, args.up, args.out = gate.data_ptr(), up.data_ptr(), out.data_ptr()
        args.gate_stride, args.up_stride, args.out_stride = (
            x.stride(0) * x.element_size() for x in (gate, up, out)
        )
        args.size, args.activation = gate.shape[1], self._activation
        args.pieces = -(-args.size // _GATE_ELEMENTS)
        self._launcher.launch(self._variant, "vms_gate", gate.shape[0] * args.pieces, args)
        return out


class LayerKernels:
    """Kernels of one variant; only its dtype matters."""

    def __init__(self, launcher: Launcher, variant: Variant) -> None:
        self._launcher = launcher
        self._variant = variant
        self.norm = NormKernel(launcher, variant)

    def gate(self, activation: str) -> GateKernel | None:
        """The kernel for an activation by its name in config.json; None: there is none."""
        number = _ACTIVATIONS.get(activation)
        return None if number is None else GateKernel(self._launcher, self._variant, number)


def layer_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> LayerKernels | None:
    """The kernels, loaded so that they may be captured; None if the device cannot run them.

    Torch's operations do the same. ``head_dim``: the model's, whose variant attention may have
    compiled already.
    """
    variant = Variant(dtype, head_dim if head_dim in HEAD_DIMS else HEAD_DIMS[0], True)
    refusal = Variant.refusal(variant.head_dim, dtype)
    if refusal is None:
        launcher = CudaLauncher(device)
        refusal = launcher.refusal(variant.head_dim)
    if refusal is not None:
        logger.info("norms and gates are torch's operations: %s", refusal)
        return None
    launcher.resident(variant)
    return LayerKernels(launcher, variant)
