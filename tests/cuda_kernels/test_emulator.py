"""What the emulator is for: kernels with a mistake in them do not pass."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cuda_kernels.cases import VARIANTS, Case, check, make_case
from tests.cuda_kernels.emulation import ORDERS, EmulatedLauncher, Emulators
from vmserve.attention.base import LayerAttention
from vmserve.attention.cuda import CudaPagedBackend
from vmserve.attention.cuda.compile import source_directory
from vmserve.attention.cuda.plan import Resident

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)

SLOTS = VARIANTS[1]

#: A file, what is once in it, and what takes its place.
MISTAKES = {
    "no wait for the copies of the decode": ("decode.cuh", "ptx::copy_wait<kStages - 2>();", ""),
    "a wait for too few of them": ("decode.cuh", "wait<kStages - 2>", "wait<kStages - 1>"),
    "the warps of the decode do not meet": (
        "decode.cuh", "    ptx::sync_block();  // the tile has arrived, ", "    // ",
    ),
    "scores are read before they are there": (
        "decode.cuh", "(queries, stage, memory);\n    ptx::sync_block();\n",
        "(queries, stage, memory);\n",
    ),
    "a block's next item overwrites the one before": (
        "decode.cuh", "    ptx::sync_block();  // all warps are done before queries ", "    // ",
    ),
    "the warps of the append do not meet": (
        "append.cuh", "    ptx::sync_block();  // the tile has arrived, ", "    // ",
    ),
    "one key too many is read": (
        "kv.cuh", "begin + sixteen + r < end;", "begin + sixteen + r <= end;"
    ),
    "the edge is not masked": ("tile.cuh", "position >= high[i >> 1]", "position > high[i >> 1]"),
    "half a warp meets elsewhere": (
        "tile.cuh", "  return x + ptx::shuffle_xor(x, 2);",
        "  if ((ptx::thread() & 16) != 0) return x;\n  return x + ptx::shuffle_xor(x, 2);",
    ),
}  # fmt: skip


RUNS = [(order, eager) for order in ORDERS for eager in (False, True)]


def passes(emulators: Emulators, case: Case, spec: LayerAttention, order: str, eager: bool) -> bool:
    launcher = EmulatedLauncher(
        emulators, resident=Resident(1, 1), order=order, seed=1, eager_copies=eager
    )
    launcher.launch_blocks = 1  # works on all items, one after the other
    call = CudaPagedBackend(launcher).bind(case.view, case.batch)
    try:
        check(launcher, case, spec, call=call)
    except AssertionError:  # EmulationError is one
        return False
    return True


@pytest.mark.parametrize("mistake", ["none", *MISTAKES])
def test_mistakes_do_not_pass(mistake: str, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(source_directory(), sources)
    if mistake != "none":
        file, text, instead = MISTAKES[mistake]
        source = (sources / file).read_text("utf-8")
        assert source.count(text) == 1, "the kernels changed: change the mistake too"
        (sources / file).write_text(source.replace(text, instead), "utf-8")
    emulators = Emulators(tmp_path, sources)
    case = make_case(SLOTS, [260, 300, 77], [1, 1, 33])
    spec = LayerAttention(0, 0.125)
    caught = any(not passes(emulators, case, spec, order, eager) for order, eager in RUNS)
    emulators.close()
    assert caught == (mistake != "none"), "no order of threads and copies shows it"
