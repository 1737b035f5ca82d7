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

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.attention.views import dense_view
from tests.models.checkpoints import MODELS, NATIVE, Saved, llama, save
from tests.models.gguf_checkpoints import convert
from tests.models.schedule import SCHEDULE, SLOTS, compute, random_prompts
from vmserve import _core
from vmserve.errors import DriverError, UnsupportedError
from vmserve.models import ModelConfig
from vmserve.models.hidden import HiddenRows
from vmserve.models.native import load_native
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
        self.decoder = load_native(
            path, model, dtype, LONG + 64, quantization=quantization, group=group
        )
        heads = Slices(model.network, group).kv_heads
        self.view = dense_view(
            model.num_layers, max(SLOTS) + 1, LONG + 64, heads, model.head_dim, as_torch(dtype)
        )

    def step(
        self, past: list[int], new: list[int], rows: list[int] | None = None, num_hidden: int = 0
    ) -> list[torch.Tensor]:
        """Logits, and the hidden states that are asked for."""
        active = [i for i, count in enumerate(new) if count]
        prompts = random_prompts([p + n for p, n in zip(past, new, strict=True)])
        hidden = HiddenRows(num_hidden) if num_hidden else None
        logits = compute(
            self.decoder,
            self.view,
            [prompts[i][past[i] :] for i in active],
            past=[past[i] for i in active],
            slots=[SLOTS[i] for i in active],
            rows=rows,
            hidden=hidden,
        )
        return [logits] if hidden is None else [logits, torch.from_numpy(hidden.take())]

    def run(self) -> list[torch.Tensor]:
        """Chunks beside decodes, a long prompt, rows in another order, and hidden states."""
        found = []
        past = [0] * len(SLOTS)
        for new in SCHEDULE:
            found += self.step(past, list(new))
            past = [p + n for p, n in zip(past, new, strict=True)]
        self.step([0, 0, 0, 0], [LONG, 0, 0, 0], [])
        found += self.step([LONG, 0, 0, 0], [1, 0, 0, 0])
        return found + self.step([LONG, 0, 0, 0], [40, 0, 3, 0], [42, 3, 3, 39, 0], 2)


def run_ranks(path: Path, dtype: DType, quantization: str, size: int) -> list[torch.Tensor]:
    with memory() as descriptor, ThreadPoolExecutor(size) as pool:
        groups = [_core.RankGroup(descriptor, rank, size) for rank in range(size)]
        ranks = [Rank(path, dtype, quantization, group) for group in groups]
        first, *others = [each.result(60) for each in [pool.submit(r.run) for r in ranks]]
    assert all(len(rows) == 0 for other in others for rows in other)
    return first


def assert_same_bits(
    path: Path, *sizes: int, dtype: DType = DType.FLOAT32, quantization: str = "none"
) -> None:
    alone = Rank(path, dtype, quantization, None).run()
    for size in sizes:
        together = run_ranks(path, dtype, quantization, size)
        for rows, expected in zip(together, alone, strict=True):
            assert rows.numpy().tobytes() == expected.numpy().tobytes()


#: More ranks than key-value heads, and than cores; biases; one matrix of q, k and v;
#: norms behind products; sinks, biases of experts and experts in one tensor; a shared expert.
@pytest.mark.parametrize("name", [name for name in NATIVE if MODELS[name].ranks])
def test_ranks_compute_the_bits_of_one(name: str, checkpoint: Saved) -> None:
    assert_same_bits(checkpoint(name), *MODELS[name].ranks)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("quantization", ["none", "int8", "int8-dynamic"])
def test_any_form_of_weights_has_the_same_bits(
    quantization: str, dtype: DType, isa: str, checkpoint: Saved, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=as_torch(dtype))
    model.save_pretrained(tmp_path)
    assert_same_bits(tmp_path, 2, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("matrices", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_integers_of_a_file_have_the_same_bits(matrices: str, tmp_path: Path) -> None:
    save(llama(num_hidden_layers=2, hidden_size=256, intermediate_size=512), tmp_path / "from")
    path = tmp_path / "x.gguf"
    convert(tmp_path / "from", path, lambda writer: None, matrices)
    assert_same_bits(path, 2)


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


def test_what_cannot_be_divided_is_refused(checkpoint: Saved) -> None:
    with memory() as descriptor:
        group = _core.RankGroup(descriptor, 0, 4)
        for name, told in (("llama-odd", "among 1, 2, 6 ranks, not 4"),
                           ("deepseek-v2", "layers of latents")):  # fmt: skip
            with pytest.raises(UnsupportedError, match=told):
                Rank(checkpoint(name), DType.FLOAT32, "none", group)
        for rank, size, told in ((0, 4, "rank 0 of 4 is taken"),
                                 (1, 3, "rank 1 of 3: the group has 4")):  # fmt: skip
            with pytest.raises(ValueError, match=told):
                _core.RankGroup(descriptor, rank, size)


def test_rows_that_do_not_fit_are_refused(checkpoint: Saved) -> None:
    with memory(8192) as descriptor:
        group = _core.RankGroup(descriptor, 0, 1)
        rank = Rank(checkpoint("llama"), DType.FLOAT32, "none", group)
        with pytest.raises(ValueError, match="40 rows do not fit"):
            rank.step([0, 0, 0, 0], [40, 0, 0, 0])


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
            for wait in (lambda: waiter.result(30), group.wait):
                with pytest.raises(DriverError, match="rank 1 of 2 has ended"):
                    wait()


def test_a_rank_that_leaves_ends_the_group() -> None:
    with memory() as descriptor, ThreadPoolExecutor(1) as pool:
        first, second = (_core.RankGroup(descriptor, rank, 2) for rank in range(2))
        waiter = pool.submit(first.wait)
        del second
        with pytest.raises(DriverError, match="rank 1 of 2 has ended"):
            waiter.result(30)
