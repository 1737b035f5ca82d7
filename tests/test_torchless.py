"""What computes without torch, against what torch computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vmserve.attention.cpu import tensor_tuple
from vmserve.errors import ConfigurationError
from vmserve.memory import host_views
from vmserve.memory.layout import plan_layout
from vmserve.memory.manager import MemoryManager
from vmserve.memory.tensors import arena_tensors, contiguous_view
from vmserve.models.blocks import ACTIVATIONS
from vmserve.models.decoder_config import ACTIVATION_NAMES
from vmserve.models.rope import HostRotations, RopeConfig
from vmserve.models.rotary_embedding import RotaryEmbedding
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple, as_float32, rounded
from vmserve.numbers.torch_dtypes import as_torch
from vmserve.sampling.sampler import Sampler
from vmserve.sampling.torch_sampler import TorchSampler
from vmserve.system import threads

import torch  # isort: skip


def test_types_and_arrays_are_torchs() -> None:
    array = np.zeros((4, 6, 8), dtype=np.float32)[1:, ::2]
    assert array_tuple(array) == tensor_tuple(torch.from_numpy(array))
    assert set(ACTIVATION_NAMES) == set(ACTIVATIONS)
    for dtype in DType:
        assert as_torch(dtype).itemsize == dtype.itemsize
        assert DType.of(str(dtype)) is dtype
        # A KV cache's fp8 is torch's codes, with scales beside them.
        torchs = DType.FLOAT8_E4M3FN if dtype is DType.FP8 else dtype
        assert DType.of(as_torch(dtype)) is torchs
    with pytest.raises(ConfigurationError, match="dtype 'int16' is not one of float8_e4m3fn, "):
        DType.of(torch.int16)


def test_rounding_and_widening_have_torchs_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    # Ties to even and to odd, and what rounds up to the next power of two.
    bits[:6] = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3FFFFFFF, 0x00008000, 0x80018000]
    numbers = bits.view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    for dtype, narrow in ((DType.BFLOAT16, np.uint16), (DType.FLOAT16, np.float16)):
        with np.errstate(over="ignore"):
            found = rounded(numbers, dtype)
        expected = torch.from_numpy(numbers).to(as_torch(dtype))
        assert found.dtype == narrow
        assert np.array_equal(found.view(np.int16), expected.view(torch.int16).numpy())
        wide = as_float32(found, dtype)
        assert np.array_equal(wide, expected.float().numpy())
    assert rounded(numbers, DType.FLOAT32) is numbers


@pytest.mark.parametrize("layers_per_group", [1, 2])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_views_are_at_the_addresses_of_tensors(dtype: DType, layers_per_group: int) -> None:
    layout = plan_layout(4, 2, 24, dtype, 4096, layers_per_group=layers_per_group)
    memory = MemoryManager(layout, num_slots=3, max_len=300, limit_bytes=1 << 22)
    view = contiguous_view(memory)
    for buffers, num_tokens, (keys, values) in (
        (memory.slot_buffers(), memory.max_len, (view.keys, view.values)),
        (memory.arena_buffers(), layout.page_tokens, arena_tensors(memory)),
    ):
        found = host_views._layers(memory, buffers, num_tokens)
        assert found == ([*map(tensor_tuple, keys)], [*map(tensor_tuple, values)])
    memory.close()


@pytest.mark.parametrize("theta", [10_000.0, 500_000])
def test_rotations(theta: float) -> None:
    rope = RopeConfig("default", {"rope_theta": theta}, 64, 8192)
    ours, theirs = HostRotations(rope, 8192), RotaryEmbedding(rope, 8192, torch.device("cpu"))
    # The powers of theta differ by a last bit at most, in few of the frequencies.
    frequencies = theirs._frequencies.numpy()
    assert np.abs(ours._frequencies - frequencies).max() <= np.spacing(frequencies).max()
    assert np.count_nonzero(ours._frequencies != frequencies) <= 2
    for found, sign in zip(ours.upto(100, DType.FLOAT32), (1, -1), strict=True):
        assert found.shape == (100, 1, 64)
        angles = np.outer(np.arange(100, dtype=np.float32), ours._frequencies)
        function = np.cos if sign == 1 else np.sin
        exact = function(angles.astype(np.float64))
        assert np.array_equal(found[:, 0, 32:], exact.astype(np.float32))
        assert np.array_equal(found[:, 0, :32], sign * found[:, 0, 32:])
    rotary = theirs.at(torch.arange(100), torch.bfloat16)
    for found, tensor in zip(ours.upto(100, DType.BFLOAT16), rotary, strict=True):
        expected = tensor.view(torch.int16).numpy()
        assert np.count_nonzero(found.view(np.int16) != expected) <= 3


def test_beam_candidates_are_those_of_torch() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(size=(6, 300)).astype(np.float32).round(1)  # with many equals
    logits[2, 5], logits[3, 7], logits[4] = np.nan, np.inf, -np.inf
    masks = [None, *(generator.random(300) < 0.5 for _ in range(5))]
    ours, theirs = Sampler(300), TorchSampler(300)
    found = ours.beam_candidates(logits, 8, masks)
    expected = theirs.beam_candidates(torch.from_numpy(logits), 8, masks)
    assert np.array_equal(found[0], expected[0])
    assert np.allclose(found[1], expected[1], rtol=0, atol=2e-6)
    assert ours.num_repaired_rows == theirs.num_repaired_rows == 3


def test_as_many_threads_as_cores_or_as_somebody_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    assert threads.num_threads() == 3
    torch.set_num_threads(before)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 9})
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / str(cpu)).write_text(siblings)
    monkeypatch.setattr(threads, "_SIBLINGS", str(tmp_path / "{}"))
    for said, number in (("", 3), ("5", 5), ("4,2", 4), ("0", 3), ("many", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        threads._default.cache_clear()
        assert threads._default() == number
    threads._default.cache_clear()
    program = (
        "import sys, vmserve.system.threads as t; print(t.num_threads(), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["7", "False"]
