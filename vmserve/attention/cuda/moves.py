"""Copy and zero runs of device memory, many in a launch, for blocks that fork or are freed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vmserve.attention.cuda.launcher import Launcher
from vmserve.attention.cuda.params import MoveArgs
from vmserve.attention.cuda.variant import Variant

__all__ = ["Mover"]

#: Any variant will do: the moves do not depend on it.
_VARIANT = Variant(torch.bfloat16, 128, True)
_PIECE_BYTES = 64 << 10
_MAX_PIECES = 64


class Mover:
    """Copies and zeros on the current stream. Byte ranges may have any alignment; in one call no
    destination may overlap another run."""

    def __init__(self, launcher: Launcher, variant: Variant = _VARIANT) -> None:
        self._launcher = launcher
        self._variant = variant

    def copy(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """``runs``: (destination, source, bytes)."""
        self._move("vms_copy", runs)

    def zero(self, runs: Sequence[tuple[int, int]]) -> None:
        """``runs``: (address, bytes)."""
        self._move("vms_zero", [(address, 0, num_bytes) for address, num_bytes in runs])

    def _move(self, kernel: str, runs: Sequence[tuple[int, int, int]]) -> None:
        if runs:
            longest = max(num_bytes for _, _, num_bytes in runs)
            self.launch(kernel, self.staged(runs), len(runs), longest)

    def staged(self, runs: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """The runs on the device: their number, then four integers for each."""
        rows = [(len(runs), 0, 0, 0), *((*run, 0) for run in runs)]
        device = self._launcher.device
        table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        return table.to(device, non_blocking=True)

    def launch(self, kernel: str, table: torch.Tensor, num_runs: int, longest: int) -> None:
        """``table``: as :meth:`staged` makes it; it may be on the device already."""
        args = MoveArgs()
        args.num_runs, args.runs = table.data_ptr(), table.data_ptr() + 32
        args.pieces = max(1, min(_MAX_PIECES, -(-longest // _PIECE_BYTES)))
        self._launcher.launch(self._variant, kernel, max(1, num_runs) * args.pieces, args)
