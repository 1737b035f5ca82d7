"""The stand-alone ``KVCache``, as another serving framework would use it."""

from __future__ import annotations

import doctest
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conformance import plugins
from tests.memory.support import areas
from vmserve import _core
from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory import kv_cache
from vmserve.memory.kv_cache import KVCache
from vmserve.memory.layout import plan_layout

LAYOUT = plan_layout(2, 2, 64, torch.float32, 4096, page_tokens=16)
PAGE = LAYOUT.total_page_bytes


def make(num_slots: int = 3, max_len: int = 64, pages: int = 8) -> KVCache:
    return KVCache(LAYOUT, num_slots=num_slots, max_len=max_len, limit_bytes=pages * PAGE)


def alloc(cache: KVCache) -> int:
    slot = cache.alloc_slot()
    assert slot is not None
    return slot


def test_the_example_in_the_docstring() -> None:
    results = doctest.testmod(kv_cache)
    assert (results.failed, results.attempted > 0) == (0, True)


def test_step_maps_all_or_nothing_and_says_what_is_missing() -> None:
    with make(pages=5) as cache:
        a, b = alloc(cache), alloc(cache)
        assert cache.step({a: 20, b: 16}) == 0
        assert cache.block_tables().tolist() == [[0, 1, -1, -1], [2, -1, -1, -1], [-1] * 4]
        assert cache.step({a: 64, b: 64}) == 3  # 5 more pages, 2 left
        assert cache.stats().used_pages == 3
        assert cache.step({a: 64}) == 0
        cache.free_slot(b)
        assert cache.step([64, 0, 0]) == 0
        assert cache.block_tables()[0].tolist() == [0, 1, 3, 4]
        assert cache.block_tables().dtype == torch.int32


def test_lengths_as_a_sequence_are_one_per_slot() -> None:
    with make() as cache:
        alloc(cache), alloc(cache)
        assert cache.step([17, 3]) == 0
        assert cache.block_tables()[:, 0].tolist() == [0, 2, -1]
        with pytest.raises(ValueError, match="slot 2 is not allocated"):
            cache.step([17, 3, 1])


def test_only_integers_are_slots_and_lengths() -> None:
    with make() as cache:
        slot = alloc(cache)
        for length in (10.99, "7", None, torch.tensor(2.5)):
            with pytest.raises(TypeError, match=f"length of slot 0: .*{length}.* is not an int"):
                cache.step({slot: length})  # type: ignore[dict-item]
            with pytest.raises(TypeError, match="is not an integer"):
                cache.step([length])  # type: ignore[list-item]
        for call in (cache.free_slot, lambda slot: cache.fork(slot, 0)):
            with pytest.raises(TypeError, match=r"slot: 0\.0 is not an integer"):
                call(0.0)  # type: ignore[arg-type]
        assert cache.stats().used_pages == 0
        assert cache.step({slot: torch.tensor(20)}) == 0  # type: ignore[dict-item]
        assert cache.step(np.array([33])) == 0  # type: ignore[arg-type]
        assert cache.stats().used_pages == 3


def test_attention_reads_a_slot_and_a_block_table_alike() -> None:
    with make() as cache:
        alloc(cache)
        slot, length = alloc(cache), 37
        assert cache.step({0: 5, slot: length}) == 0
        written = torch.randn(2, 2, length, 2, 64)
        for layer, (keys, values) in enumerate(cache.tensors()):
            keys[slot, :length], values[slot, :length] = written[layer]
        query = torch.randn(2, 1, 64)
        table = cache.block_tables()[slot, :3].long()
        in_slot = [tensor[slot, :length] for tensor in cache.tensors()[1]]
        paged = [tensor[table].flatten(0, 1)[:length] for tensor in cache.paged_tensors()[1]]
        keys, values = (tensor.transpose(0, 1) for tensor in in_slot)
        through_slot = F.scaled_dot_product_attention(query, keys, values)
    keys, values = written[1].transpose(1, 2)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, keys, values), through_slot)
    assert torch.equal(torch.stack(paged), written[1])


def test_fork_and_safe_tensors() -> None:
    with make(num_slots=2) as cache:
        slot = alloc(cache)
        cache.step({slot: 20})
        cache.tensors()[0][0][slot, :20] = 1.0
        fork = cache.fork(slot, 18)
        assert fork == 1
        assert cache.block_tables().tolist() == [[0, 1, -1, -1], [0, 2, -1, -1]]
        assert cache.fork(slot, 18) is None
        keys, values = cache.tensors(unmapped="zero")[0]
        assert float(keys[fork].sum()) == 18 * 2 * 64
        assert not values.any()
        assert "tensor" in str(keys)
        with pytest.raises(ValueError, match="unmapped is 'print': use 'fault' or 'zero'"):
            cache.tensors(unmapped="print")  # type: ignore[arg-type]


def access(tensor: torch.Tensor) -> str:
    """What the system lets a process do to the tensor's first byte: "rw", "r-" or "--"."""
    [area] = areas(tensor.data_ptr(), 1)
    return area.access


def test_pages_are_read_only_as_long_as_forks_share_them() -> None:
    with make() as cache:
        slot = alloc(cache)
        cache.step({slot: 64})
        keys, values = cache.tensors()[1]
        keys[slot, :64] = 1.0
        forks = [cache.fork(slot, 36), cache.fork(slot, 20)]
        assert forks == [1, 2]
        assert [access(keys[slot, start]) for start in (0, 16, 32, 48)] == ["r-", "r-", "rw", "rw"]
        assert [access(values[1, start]) for start in (0, 16, 32)] == ["r-", "r-", "rw"]
        keys[slot, 40] = 2.0  # behind the fork, on the page that it has a copy of
        assert float(keys[1, 32:36].mean()) == 1.0
        cache.free_slot(1)
        assert [access(keys[slot, start]) for start in (0, 16)] == ["r-", "rw"]
        cache.free_slot(slot)
        assert [access(values[2, start]) for start in (0, 16)] == ["rw", "rw"]
        keys[2, :20] = 3.0


def test_a_fork_without_a_page_for_its_copy() -> None:
    with make(pages=2) as cache:
        slot = alloc(cache)
        cache.step({slot: 20})
        with pytest.raises(OutOfMemoryError, match="needs 1 pages for its copy, 0 can be had"):
            cache.fork(slot, 18)
        assert cache.fork(slot, 16) == 1


def test_the_limit_and_trim() -> None:
    with make(pages=2) as cache:
        slot = alloc(cache)
        assert cache.step({slot: 64}) == 2
        cache.set_limit(4 * PAGE)
        assert cache.step({slot: 64}) == 0
        cache.free_slot(slot)
        assert cache.trim(keep_pages=1) == 3
        assert cache.stats().memfd_allocated_bytes == PAGE


def test_a_lower_limit_is_reached_as_slots_are_freed() -> None:
    with make(max_len=1024, pages=80) as cache:
        big, small = alloc(cache), alloc(cache)
        assert cache.step({big: 60 * 16, small: 20 * 16}) == 0
        cache.set_limit(10 * PAGE)
        assert cache.step({small: 21 * 16}) == 71
        assert cache.step({small: 20 * 16}) == 0  # nothing new is needed
        cache.free_slot(big)
        stats = cache.stats()
        assert (stats.memfd_allocated_bytes, stats.used_pages) == (20 * PAGE, 20)
        assert cache.step({small: 21 * 16}) == 11
        cache.free_slot(small)
        assert cache.stats().memfd_allocated_bytes == 10 * PAGE
        small = alloc(cache)
        assert cache.step({small: 10 * 16}) == 0
        assert cache.step({small: 11 * 16}) == 1


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("cuda", r"is a build without CUDA: install one .* use host"),
        ("rocm", "driver 'rocm' is unknown: use host, cuda, or"),
        ("/no-such.so", "no-such"),
        ("/some.so", "the driver keeps-all cannot unmap"),
    ],
)
def test_drivers_that_cannot_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, driver: str, message: str
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    if driver == "/some.so":
        made = SimpleNamespace(capabilities=SimpleNamespace(unmap=False), plugin_name="keeps-all")
        monkeypatch.setattr(_core, "PluginDriver", lambda *_: made)
    with pytest.raises(ConfigurationError, match=message):
        KVCache(LAYOUT, driver=driver, num_slots=1, max_len=16, limit_bytes=PAGE)


def test_a_driver_from_a_shared_library() -> None:
    library = str(plugins.sample())
    with KVCache(LAYOUT, driver=library, num_slots=2, max_len=64, limit_bytes=8 * PAGE) as cache:
        slot = alloc(cache)
        assert cache.step({slot: 20}) == 0
        keys, _ = cache.tensors()[1]
        keys[slot, :20] = 3.0
        twin = cache.fork(slot, 18)
        assert twin is not None
        assert float(keys[twin, :18].mean()) == 3.0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_slots": 0}, "num_slots: 0 is not between 1 and"),
        ({"num_slots": 10**9}, "num_slots: 1000000000 is not between"),
        ({"max_len": 0}, "max_len: 0 is not between"),
        ({"max_len": 1.5}, "max_len: 1.5 is not an integer"),
        # Counted in bytes these wrap around to nothing, or to a little.
        ({"max_len": 2**56}, "lower num_slots or max_len"),
        ({"max_len": 2**56 + 64, "num_slots": 2**14}, "lower num_slots or max_len"),
        ({"limit_bytes": "64MiB"}, "limit_bytes: '64MiB' is not an integer"),
        ({"limit_bytes": -1}, "limit_bytes: -1 is not between"),
        ({"read_slack_tokens": -1}, "read_slack_tokens: -1 is not between"),
        ({"zero_pages": "sometimes"}, "zero_pages: 'sometimes' is not one of always, tenant"),
    ],
)
def test_arguments_out_of_their_ranges(wrong: dict[str, Any], told: str) -> None:
    arguments: dict[str, Any] = {"num_slots": 4, "max_len": 1024, "limit_bytes": 64 << 20}
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        KVCache(LAYOUT, **arguments | wrong)


def test_threads_share_a_cache_each_with_slots_of_its_own() -> None:
    """Operations are bounded, and no slot is ever seen by two threads."""
    with make(num_slots=12, max_len=128, pages=60) as cache:
        tensors = cache.tensors()
        start = threading.Barrier(4)

        def live(name: int) -> None:
            dice, lengths = random.Random(name), dict[int, int]()
            start.wait()
            for _ in range(500):
                todo = dice.random()
                if todo < 0.2 and (slot := cache.alloc_slot()) is not None:
                    lengths[slot] = 0
                elif todo < 0.4 and lengths:
                    slot = dice.choice(list(lengths))
                    del lengths[slot]
                    cache.free_slot(slot)
                elif lengths:
                    slot = dice.choice(list(lengths))
                    before, length = lengths[slot], min(128, lengths[slot] + dice.randrange(1, 40))
                    if length > before and cache.step({slot: length}) == 0:
                        lengths[slot] = length
                        for pair in tensors:
                            for tensor in pair:
                                tensor[slot, before:length] = float(name)
                    for keys, values in tensors if lengths[slot] else ():
                        assert bool((keys[slot, : lengths[slot]] == name).all())
                        assert bool((values[slot, : lengths[slot]] == name).all())
            for slot in lengths:
                cache.free_slot(slot)

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(live, name) for name in range(1, 5)]:
                done.result()
        assert cache.stats().used_pages == 0
        assert cache.trim() > 0
        cache._memory.check()


def test_tensors_may_outlive_the_cache() -> None:
    cache = make()
    slot = alloc(cache)
    cache.step({slot: 4})
    keys = cache.tensors()[0][0]
    keys[slot, :4] = 2.0
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        cache.step({slot: 5})
    del cache
    assert float(keys[slot, :4].sum()) == 2.0 * 4 * 2 * 64
