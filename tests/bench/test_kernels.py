"""``vmserve bench kernels``: what is timed computes what it says, and the command writes it down.

Nothing here looks at a time.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import torch

from tests.support.bench import bench, compared_with_itself
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.memory.views import PagedView
from vmserve_bench.kernels.rig import SHAPES, Rig, Shape
from vmserve_bench.kernels.sections import BLOCK_SIZES, Options


def test_the_views_of_a_rig_show_the_same_bytes() -> None:
    rig = Rig(Shape("tiny", 4, 2, 16), torch.float32, (3, 64, 1), least_bytes=100_000)
    assert rig.layer_bytes == 3 * 64 * 2 * 2 * 16 * 4
    assert rig.num_layers == 3
    assert rig.memory.nbytes >= 100_000
    dense, paged = rig.view(), rig.view(16)
    assert isinstance(paged, PagedView)
    assert sorted(paged.block_tables.view(-1).tolist()) == list(range(12))
    assert paged.block_tables.view(-1).tolist() != list(range(12))
    for layer in range(rig.num_layers):
        blocks = dense.keys[layer].reshape(12, 16, 2, 16)
        assert torch.equal(paged.keys[layer], blocks)
        assert paged.values[layer].data_ptr() == dense.values[layer].data_ptr()


def test_products_are_those_that_causality_leaves() -> None:
    shape = Shape("tiny", 2, 1, 8)
    assert Rig(shape, torch.float32, (3, 10, 1), 1).layer_products == 4 * 3 * 10 * 2 * 8
    assert Rig(shape, torch.float32, (1, 10, 4), 1).layer_products == 4 * (7 + 8 + 9 + 10) * 2 * 8


def test_a_timed_function_computes_every_layer() -> None:
    rig = Rig(SHAPES[0], torch.float32, (2, 32, 1), least_bytes=500_000)
    rig.memory.fill_(1.0)
    rig.attention()()
    for keys in rig.view().keys:
        assert torch.equal(keys[:, 31], rig.inputs[1])
        assert (keys[:, :31] == 1).all()
    call = CpuBackend().bind(rig.view(16), RaggedBatch.build([0, 1], [31, 31], [1, 1]))
    assert call(LayerAttention(0, 0.1), *rig.inputs).isfinite().all()


def test_reading_reads_everything() -> None:
    """Three and a half items of work, whose end is no whole line."""
    rig = Rig(Shape("tiny", 1, 1, 8), torch.float32, (1, 57345, 1), least_bytes=1)
    words = rig.memory.view(torch.int64).numpy()
    assert rig.read() == int(np.bitwise_xor.reduce(words)) % 2**64


def test_quick_run_of_everything(tmp_path: Path) -> None:
    path, tables = tmp_path / "r.json", tmp_path / "t.md"
    output = bench("kernels --quick --json", path, "--markdown", tables)
    assert "decode: one layer" in output
    written = compared_with_itself(path, "kernels")
    assert (written["benchmark"], written["quick"]) == ("kernels", True)
    assert written["num_threads"] >= 1
    sections = written["sections"]
    assert list(sections) == ["decode", "blocks", "prefill", "products"]
    decode = sections["decode"]["points"]
    assert {(p["shape"], p["dtype"], p["num_seqs"]) for p in decode} == set(
        product((shape.shape for shape in SHAPES), ("float32", "bfloat16"), (1, 2))
    )
    for point in decode:
        assert set(point["layer_ns"]) == {"contiguous", "paged", "sdpa", "read"}
        assert all(len(samples) == 2 for samples in point["samples_ns"].values())
        assert point["num_layers"] * point["layer_bytes"] >= Options(quick=True).least_bytes
    names = {f"blocks of {size}" for size in BLOCK_SIZES}
    for point in sections["blocks"]["points"]:
        assert set(point["ratio_to_contiguous"]) == names
    chunks = [(p["context"], p["num_new"]) for p in sections["prefill"]["points"][:2]]
    assert chunks == [(64, 64), (96, 32)]
    text = tables.read_text()
    assert "--quick" in text.splitlines()[0]
    assert "| 125M GQA bfloat16 | 2 x 63 + 1 |" in text
