"""Paths through memory and scheduler: options that take one, and counters that prove it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.support.engines import change_regimes, each_step
from vmserve import LLM, KVPool, RequestOutput
from vmserve.engine.engine import LLMEngine
from vmserve.sampling import GenerationParams
from vmserve.types import RequestTerms

__all__ = ["ALONE", "PATHS", "Asked", "Served", "Way", "serve", "together"]

Asked = Sequence[tuple[list[int], GenerationParams]]
ALONE = {"enable_prefix_caching": False}
_ids = itertools.count()


def _make_room(engine: LLMEngine, step: int) -> None:
    """Windows leave so much room that nobody would have to go."""
    if step % 6 == 5:
        engine.scheduler.make_room()


class Way(NamedTuple):
    """How a path is taken. ``num_times``: the last time is that of the path."""

    options: dict[str, Any]
    #: Counters that it moves.
    moves: tuple[str, ...] = ()
    before_step: Callable[[LLMEngine, int], object] = lambda engine, step: None
    num_times: int = 1


PATHS = {
    "together": Way(ALONE),
    "hits": Way({}, ("prefix_hit_blocks_total",), num_times=2),
    "recompute": Way(
        {**ALONE, "kv_cache_memory": "least", "preemption": "recompute"},
        ("num_preemptions_total",),
        _make_room,
    ),
    "swap": Way(
        {"kv_cache_memory": "least", "preemption": "swap", "swap_space": "64MiB"},
        ("swapped_out_blocks_total", "swapped_in_blocks_total"),
        _make_room,
    ),
    "convert": Way(
        {**ALONE, "kv_regime": "auto"},
        ("converted_to_paged_total", "converted_to_virtual_total"),
        change_regimes,
    ),
    "lookup": Way({"speculative": "prompt-lookup"}, ("spec_decode_num_accepted_tokens_total",)),
    "draft": Way(
        {"speculative": "draft-model", "speculative_model": "vmserve-embedded"},
        ("spec_decode_num_draft_tokens_total",),
    ),
    "overlap": Way({**ALONE, "async_scheduling": "on"}, ("steps_overlapped_total",)),
    "persist": Way({"kv_persist": "a folder"}, ("persist_restored_blocks_total",)),
    "lent": Way({"kv_cache_memory": None}),
    "ranks": Way(
        {"tensor_parallel_size": 2, "speculative": "prompt-lookup"},
        ("prefix_hit_blocks_total", "spec_decode_num_accepted_tokens_total"),
        num_times=2,
    ),
}


class Served(NamedTuple):
    """What came of requests on a path."""

    #: The answers, each time.
    found: list[list[RequestOutput]]
    stats: dict[str, float | int]
    #: Windows of the kinds of layers.
    windows: set[int | None]


def serve(
    llm_of: Callable[..., AbstractContextManager[LLM]],
    path: str,
    options: dict[str, Any],
    asked: Asked,
    folder: Path,
) -> Served:
    """Take a path, and assert that it was taken and that nothing is left.

    ``options``: with those of the path. ``folder``: where a path keeps files.
    """
    way = PATHS[path]
    if path == "persist":
        options = {**options, "kv_persist": str(folder)}
        with llm_of(**options) as llm:
            together(llm, asked)
    if path == "lent":
        options = {**options, "kv_pool": KVPool("64MiB")}
    num_mixed = 0
    with llm_of(**options) as llm:
        memory = llm.engine.memory
        limits = [memory.limit_pages]

        def look(engine: LLMEngine, step: int) -> None:
            nonlocal num_mixed
            limits.append(memory.limit_pages)
            now = memory.stats()
            num_mixed += now.virtual_seqs > 0 and now.paged_seqs > 0

        if options.get("kv_cache_memory") == "least":
            least = llm.engine.kv_bounds()[1]
            page = memory.layout.total_page_bytes
            llm.engine.set_kv_cache_memory(max(int(1.5 * least), least + 2 * page))
        each_step(llm, before=way.before_step, after=look)
        found = [together(llm, asked) for _ in range(way.num_times)]
        memory.wait()
        memory.check()
        stats = llm.stats()
        windows = {kind.window for kind in memory.kinds}
        pids = llm.engine.ranks.pids if path == "ranks" else []
    assert all(stats[name] > 0 for name in way.moves), {name: stats[name] for name in way.moves}
    assert stats["num_seqs"] == stats["used_pages"] == stats["swap_blocks"] == 0
    preemptions = [result.metrics.num_preemptions for result in found[0]]
    match path:
        case "recompute" | "swap":
            assert sum(preemptions) == stats["num_preemptions_total"]
            assert max(preemptions) < 50
            assert (stats["swapped_in_blocks_total"] > 0) == (path == "swap")
        case "convert":
            assert num_mixed > 3
            assert stats["converted_zero_copy_total"] >= stats["converted_to_paged_total"]
        case "persist":
            cached = [result.metrics.num_cached_tokens for result in found[0]]
            block = options.get("block_size", 16)
            expected = [(len(prompt) - 1) // block * block for prompt, _ in asked[:3]]
            assert cached[:3] == expected
        case "lent":
            assert max(limits) > limits[0]
        case "ranks":
            assert (stats["tensor_parallel_size"], len(pids)) == (2, 1)
            assert not any(map(psutil.pid_exists, pids))
    return Served(found, stats, windows)


def together(llm: LLM, asked: Asked) -> list[RequestOutput]:
    """Answers of one batch, in which beams may be among the others."""

    def works() -> list[Any]:
        opened = [
            llm._client.open(prompt, one, request_id=str(next(_ids)), terms=RequestTerms())
            for prompt, one in asked
        ]
        return [llm._complete(each, lambda num_tokens: None) for each in opened]

    return llm._driver.run(works)
