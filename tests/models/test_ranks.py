"""Ranks that compute together: their logits have the bits of one rank's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.attention.views import dense_view
from tests.models.checkpoints import NATIVE as VARIANTS
from tests.models.checkpoints import llama, save
from tests.models.gguf_checkpoints import convert
from tests.models.schedule import SCHEDULE, SLOTS, random_prompts
from vmserve import _core
from vmserve.attention.base import RaggedBatch
from vmserve.attention.cpu import ISA_VARIABLE, CpuBackend
from vmserve.errors import DriverError, UnsupportedError
from vmserve.models import ModelConfig
from vmserve.models.hidden import HiddenRows
from vmserve.models.native import NativeDecoder, load_native
from vmserve.models.slices import Slices
from vmserve.numbers.dtypes import DType
from vmserve.numbers.torch_dtypes import as_torch

#: The longest prompt is attended to in several parts.
LONG = 700


@contextmanager
def memory(num_bytes: int = 1 << 28) -> Iterator[int]:
    """A descriptor, as the ranks of a group inherit it."""
    descriptor = os.memfd_create("ranks")
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


class Rank:
    """A decoder and its own KV cache."""

    def __init__(
        self, path: Path, dtype: DType, quantization: str, group: _core.RankGroup | None
    ) -> None:
        model = ModelConfig.from_directory(path)
        network: Any = model.network
        self.decoder: NativeDecoder = load_native(
            path, model, dtype, LONG + 64, quantization=quantization, group=group
        )
        self.view = dense_view(
            model.num_layers, max(SLOTS) + 1, LONG + 64, Slices(network, group).kv_heads,
            model.head_dim, as_torch(dtype),
        )  # fmt: skip

    def step(
        self, past: list[int], new: list[int], wanted: list[int] | None, num_hidden: int
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
        active = [i for i, count in enumerate(new) if count]
        slots, before = [SLOTS[i] for i in active], [past[i] for i in active]
        batch = RaggedBatch.build(slots, before, [new[i] for i in active])
        prompts = random_prompts([p + n for p, n in zip(past, new, strict=True)])
        tokens = [token for i in active for token in prompts[i][past[i] :]]
        hidden = HiddenRows(num_hidden) if num_hidden else None

        class Part:
            call = CpuBackend().bind(self.view, batch)
            seconds = 0.0

        class Parts:
            parts = (Part(),)

        attention: Any = Parts()
        rows = None if wanted is None else np.array(wanted)
        logits = self.decoder.forward(
            np.array(tokens), np.zeros(len(tokens), np.int64), attention, rows, hidden
        )
        return logits, None if hidden is None else hidden.take()

    def run(self) -> list[np.ndarray[Any, Any]]:
        """Chunks beside decodes, a long prompt, rows in another order, and hidden states."""
        found = []
        past = [0] * len(SLOTS)
        for new in SCHEDULE:
            found.append(self.step(past, list(new), None, 0)[0])
            past = [p + n for p, n in zip(past, new, strict=True)]
        self.step([0, 0, 0, 0], [LONG, 0, 0, 0], [], 0)
        found.append(self.step([LONG, 0, 0, 0], [1, 0, 0, 0], None, 0)[0])
        logits, states = self.step([LONG, 0, 0, 0], [40, 0, 3, 0], [42, 3, 3, 39, 0], 2)
        assert states is not None
        return [*found, logits, states]


def run_ranks(path: Path, dtype: DType, quantization: str, size: int) -> list[Any]:
    with memory() as descriptor, ThreadPoolExecutor(size) as pool:
        groups = [_core.RankGroup(descriptor, rank, size) for rank in range(size)]
        ranks = [Rank(path, dtype, quantization, group) for group in groups]
        first, *others = [each.result(60) for each in [pool.submit(r.run) for r in ranks]]
    assert all(len(rows) == 0 for other in others for rows in other)
    return first


def assert_same_bits(path: Path, dtype: DType, quantization: str, sizes: tuple[int, ...]) -> None:
    alone = Rank(path, dtype, quantization, None).run()
    for size in sizes:
        together = run_ranks(path, dtype, quantization, size)
        for rows, expected in zip(together, alone, strict=True):
            assert rows.tobytes() == expected.tobytes()


def save_as(variant: str, dtype: DType, path: Path) -> Path:
    save(VARIANTS[variant], path)
    if dtype == DType.BFLOAT16:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        model.save_pretrained(path)
    return path


#: More ranks than key-value heads, and than cores; biases; one matrix of q, k and v;
#: norms behind products; sinks, biases of experts and experts in one tensor; a shared expert.
SIZES = {
    "llama-odd": (2, 6),
    "llama": (2, 4),
    "qwen2": (2,),
    "phi3": (2,),
    "gemma3-odd": (2,),
    "gpt-oss": (2,),
    "qwen2-moe": (2, 4),
}


@pytest.mark.parametrize("variant", SIZES)
def test_ranks_compute_the_bits_of_one(variant: str, tmp_path: Path) -> None:
    path = save_as(variant, DType.FLOAT32, tmp_path)
    assert_same_bits(path, DType.FLOAT32, "none", SIZES[variant])


@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("quantization", ["none", "int8", "int8-dynamic"])
def test_any_form_of_weights_has_the_same_bits(
    quantization: str, dtype: DType, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    path = save_as("llama", dtype, tmp_path)
    assert_same_bits(path, dtype, quantization, (2,))


@pytest.mark.parametrize("matrices", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_integers_of_a_file_have_the_same_bits(matrices: str, tmp_path: Path) -> None:
    save(llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512), tmp_path / "from")
    path = tmp_path / "x.gguf"
    convert(tmp_path / "from", path, lambda writer: None, matrices)
    assert_same_bits(path, DType.FLOAT32, "none", (2,))


def test_ranks_share_the_weights(tmp_path: Path) -> None:
    save(llama(hidden_size=256, intermediate_size=512), tmp_path)
    alone = Rank(tmp_path, DType.FLOAT32, "none", None).decoder.packed_bytes
    with memory() as descriptor:
        for rank in range(4):
            group = _core.RankGroup(descriptor, rank, 4)
            mine = Rank(tmp_path, DType.FLOAT32, "none", group).decoder.packed_bytes
            assert alone / 4 <= mine < alone / 3  # heads are fewer than ranks


@pytest.mark.parametrize("count", [4, 54, 127, 128, 49152])
def test_slices_are_all_outputs(count: int) -> None:
    with memory() as descriptor:
        groups = [_core.RankGroup(descriptor, rank, 4) for rank in range(4)]
    end = 0
    for group in groups:
        first, own = group.slice(count)
        assert first == end
        assert own > 0
        end += own
    assert end == count


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    path = save_as("llama-odd", DType.FLOAT32, tmp_path / "llama")
    latents = save_as("deepseek-v2", DType.FLOAT32, tmp_path / "latents")
    with memory() as descriptor:
        group = _core.RankGroup(descriptor, 0, 4)
        with pytest.raises(UnsupportedError, match=r"among 1, 2, 6 ranks, not 4"):
            Rank(path, DType.FLOAT32, "none", group)
        with pytest.raises(UnsupportedError, match="layers of latents"):
            Rank(latents, DType.FLOAT32, "none", group)
        with pytest.raises(ValueError, match="rank 0 of 4 is taken"):
            _core.RankGroup(descriptor, 0, 4)
        with pytest.raises(ValueError, match="rank 1 of 3: the group has 4"):
            _core.RankGroup(descriptor, 1, 3)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = save_as("llama", DType.FLOAT32, tmp_path)
    with memory(8192) as descriptor:
        rank = Rank(path, DType.FLOAT32, "none", _core.RankGroup(descriptor, 0, 1))
        with pytest.raises(ValueError, match="40 rows do not fit"):
            rank.step([0, 0, 0, 0], [40, 0, 0, 0], None, 0)


def test_a_killed_rank_ends_the_wait_of_the_others() -> None:
    with memory() as descriptor, ThreadPoolExecutor(1) as pool:
        group = _core.RankGroup(descriptor, 0, 2)
        # It joins, is met once and then says nothing more.
        program = (
            "import sys, time; from vmserve import _core\n"
            f"group = _core.RankGroup({descriptor}, 1, 2); group.wait()\n"
            "print(flush=True); time.sleep(600)"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[descriptor], stdout=subprocess.PIPE
        ) as other:
            group.wait()
            assert other.stdout is not None
            other.stdout.readline()
            waiter = pool.submit(group.wait)
            other.send_signal(signal.SIGKILL)  # nobody has waited for it yet
            with pytest.raises(DriverError, match="rank 1 of 2 has ended"):
                waiter.result(30)
            with pytest.raises(DriverError, match="rank 1 of 2 has ended"):
                group.wait()


def test_a_rank_that_leaves_ends_the_group() -> None:
    with memory() as descriptor, ThreadPoolExecutor(1) as pool:
        first, second = (_core.RankGroup(descriptor, rank, 2) for rank in range(2))
        waiter = pool.submit(first.wait)
        del second
        with pytest.raises(DriverError, match="rank 1 of 2 has ended"):
            waiter.result(30)
