"""Engines of every pair of options, each with too little of everything, and what they answer.

``python -m tests.lives.engines --engines 10000 --seed 0`` runs as many, on all cores, and prints
what came of them as JSON. A row that fails is named; ``--only SEED:ROW`` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.lives.life import Asked, Chances, Life, answered, whole, without_logprobs
from tests.lives.pairs import Row, covering_rows, pairs_of
from vmserve import LLM, BeamSearchParams, SamplingParams  # first: before torch is loaded
from vmserve.models import resolve_model
from vmserve.sampling import GenerationParams

from tests.models import checkpoints  # isort: skip

__all__ = ["AXES", "Lives", "rows_of"]

MAX_LEN = 96
NUM_REQUESTS = 12
#: Requests of a family, of which each engine gets some.
CATALOGUE = 60
FAMILIES = {
    "embedded": None,
    "gemma3": lambda: checkpoints.gemma3(num_hidden_layers=4, sliding_window=24),
    "gpt-oss": lambda: checkpoints.gpt_oss(num_hidden_layers=4, sliding_window=20),
    "qwen3-next": lambda: checkpoints.qwen3_next(num_experts=4, num_experts_per_tok=2),
    "deepseek-v3": checkpoints.deepseek_v3,
    "qwen3-moe": lambda: checkpoints.qwen3_moe(num_experts=4, num_experts_per_tok=2),
}
#: Values of each axis: options of the engine, and what happens to it.
AXES: dict[str, Sequence[Any]] = {
    "family": list(FAMILIES),
    "dtype": ["float32", "bfloat16"],
    "quantization": ["none", "int8", "int8-dynamic"],
    "kv_cache_dtype": ["auto", "int8"],
    "kv_regime": ["auto", "virtual", "paged"],
    "kv_mapper": ["auto", "off"],
    "kv_zero_pages": ["tenant", "always", "never"],
    "kv_eager_slots": [4, 0],
    "block_size": [16, 32],
    "pages": ["least", "larger", "default"],
    "pool": [1.0, 1.2, 1.6, 3.0],
    "max_num_seqs": [1, 3, 8],
    "max_num_batched_tokens": [8, 24, 256],
    "enable_prefix_caching": [True, False],
    "kv_persist": ["none", "roomy", "tight"],
    "swap_space": [0, "256KiB", "64MiB"],
    "preemption": ["auto", "recompute", "swap"],
    "scheduling_policy": ["fcfs", "priority"],
    "priority_max_wait": [None, 0.01],
    "fair_sharing": [False, True],
    "speculative": ["off", "prompt-lookup", "auto", "draft-model"],
    "async_scheduling": ["off", "on"],
    "events": ["calm", "aborts", "conversions", "limits", "lends", "resets"],
    "faults": ["none", "apply", "batch", "plan"],
}
_EVENTS = {
    "calm": {"abort": 0.0, "convert": 0.0},
    "aborts": {"abort": 0.15, "convert": 0.02},
    "conversions": {"convert": 0.4},
    "limits": {"limit": 0.1, "pin": 0.02},
    "lends": {"lend": 0.15, "pin": 0.02},
    "resets": {"reset": 0.03, "pin": 0.05},
}
_FAULTS = {
    "none": {},
    "apply": {"fault_apply": 0.04},
    "batch": {"fault_batch": 0.01},
    "plan": {"fault_plan": 0.01},
}
#: Options that decide about the bits of an answer.
_BITS = ("family", "dtype", "quantization", "kv_cache_dtype")


def allowed(row: Row) -> bool:
    """Whether no option of the row is refused beside another one (docs/features.md)."""
    has_states = row["family"] == "qwen3-next"
    drafts = row["speculative"] != "off"
    return not (
        (row["kv_persist"] != "none" and not row["enable_prefix_caching"])
        or (row["preemption"] == "swap" and not row["swap_space"])
        or (row["priority_max_wait"] is not None and row["scheduling_policy"] != "priority")
        or (has_states and (drafts or row["async_scheduling"] == "on"))
        # A model that drafts is smaller than the one that it drafts for.
        or (row["speculative"] == "draft-model" and row["family"] != "embedded")
        # A draft model has a part of a fixed limit, which the least pool has no room for.
        or (row["speculative"] == "draft-model" and row["pool"] < 1.6)
    )


def rows_of(seed: int) -> list[Row]:
    return covering_rows(AXES, allowed, seed)


class Lives:
    """Runs engines one after the other; files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._roomy: dict[tuple[Any, ...], LLM] = {}
        self._known: dict[tuple[Any, ...], Any] = {}
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        for llm in self._roomy.values():
            llm.close()

    # -- models and requests --------------------------------------------------------------

    @functools.cache  # noqa: B019 - one object a process
    def _model(self, family: str) -> dict[str, str]:
        make = FAMILIES[family]
        if make is None:
            return {}
        directory = self._folder / family
        if not (directory / "done").exists():
            checkpoints.save(make(), directory)
            (directory / "done").touch()
        return {"model": str(directory), "tokenizer": str(resolve_model(None))}

    @functools.cache  # noqa: B019 - as above
    def _catalogue(self, family: str) -> list[tuple[list[int], GenerationParams]]:
        rng = random.Random(family)
        most = 900 if family == "embedded" else checkpoints.VOCAB
        heads = [[rng.randrange(5, most) for _ in range(MAX_LEN)] for _ in range(4)]
        heads.append(heads[0][:33] + heads[1][33:])
        return [self._request(rng, rng.choice(heads), heads[0]) for _ in range(CATALOGUE)]

    @staticmethod
    def _request(
        rng: random.Random, head: list[int], stops: list[int]
    ) -> tuple[list[int], GenerationParams]:
        prompt = head[: rng.choice([1, 2, 15, 16, 17, 32, 33, 64, rng.randrange(1, 80)])]
        most = min(MAX_LEN - len(prompt), rng.choice([1, 2, 5, 20, 60]))
        if rng.random() < 0.2:
            return prompt, BeamSearchParams(
                beam_width=rng.randrange(1, 4),
                max_tokens=most,
                length_penalty=rng.choice([0.0, 1.0]),
                ignore_eos=rng.random() < 0.5,
                logprobs=rng.choice([None, 2]),
            )
        n = rng.choice([1, 1, 2, 3, 5])
        scored = rng.choice([None, None, None, 0, 2])
        return prompt, SamplingParams(
            n=n,
            best_of=n + rng.choice([0, 2]) if rng.random() < 0.3 else None,
            temperature=rng.choice([0.0, 0.9, 1.3]) if n == 1 else 1.0,
            seed=rng.randrange(1000),
            max_tokens=0 if scored is not None and rng.random() < 0.3 else most,
            prompt_logprobs=scored,
            logprobs=rng.choice([None, None, 1, 5]),
            ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logit_bias=rng.choice([None, None, {7: 2.5}]),
            stop_token_ids=tuple(set(stops)) if rng.random() < 0.2 else (),
            detokenize=False,
        )

    def _alone(self, row: Row, prompt: list[int], params: GenerationParams) -> Any:
        """The answer in a roomy engine of the same bits, to this request alone."""
        bits = tuple(row[axis] for axis in _BITS)
        key = (bits, repr((prompt, params)))
        if key not in self._known:
            if bits not in self._roomy:
                self._roomy[bits] = LLM(
                    **self._model(row["family"]),
                    **{axis: row[axis] for axis in _BITS[1:]},
                    max_model_len=MAX_LEN,
                    kv_cache_memory="32MiB",
                    enable_prefix_caching=False,
                )
            llm = self._roomy[bits]
            if isinstance(params, BeamSearchParams):
                [output] = llm.beam_search([prompt], params)
            else:
                [output] = llm.generate([prompt], params)
            self._known[key] = answered(output)
        return self._known[key]

    # -- an engine ------------------------------------------------------------------------

    def _options(self, row: Row) -> dict[str, Any]:
        names = {*AXES} - {"family", "pages", "pool", "kv_persist", "events", "faults"}
        options = {name: row[name] for name in names}
        if row["speculative"] == "draft-model":
            options["speculative_model"] = "vmserve-embedded"
        if row["kv_persist"] != "none":
            name = "-".join(str(row[axis]) for axis in (*_BITS, "block_size", "kv_persist"))
            options["kv_persist"] = str(self._folder / "kv" / name)
            if row["kv_persist"] == "tight":
                options["kv_persist_bytes"] = "2MiB"
        sizes = {"max_model_len": MAX_LEN, "kv_cache_memory": "least"}
        return {**self._model(row["family"]), **options, **sizes}

    def _page_size(self, row: Row) -> int | None:
        """The least that holds a block at an even distance, four times as much, or as planned."""
        if row["pages"] == "default":
            return None
        key = ("page", *(row[axis] for axis in (*_BITS, "block_size")))
        if key not in self._known:
            self._known[key] = self._least_page(row)
        return int(self._known[key]) * (4 if row["pages"] == "larger" else 1)

    def _least_page(self, row: Row) -> int:
        plain = {axis: row[axis] for axis in (*_BITS[1:], "block_size")}
        for pages in range(1, 65):
            with contextlib.suppress(Exception):
                LLM(
                    **self._model(row["family"]),
                    **plain,
                    max_model_len=MAX_LEN,
                    kv_page_size=4096 * pages,
                    kv_cache_memory="least",
                ).close()
                return 4096 * pages
        raise AssertionError(row)

    def _open(self, row: Row) -> LLM:
        options = self._options(row)
        options["kv_page_size"] = self._page_size(row)
        if row["speculative"] == "draft-model":
            options["kv_cache_memory"] = "4MiB"
            return LLM(**options)
        llm = LLM(**options)
        if row["pool"] > 1:
            least = llm.engine.kv_bounds()[1]
            llm.engine.set_kv_cache_memory(int(least * row["pool"]))
        return llm

    def run(self, row: Row, seed: str) -> None:
        """One life of an engine with these options. Raises what does not hold."""
        rng = random.Random(seed)
        chances = Chances(check=0.2, **_EVENTS[row["events"]], **_FAULTS[row["faults"]])
        catalogue = self._catalogue(row["family"])

        def ask() -> Asked:
            prompt, params = rng.choice(catalogue)
            while params.num_sequences > row["max_num_seqs"] and isinstance(
                params, BeamSearchParams
            ):
                prompt, params = rng.choice(catalogue)
            asked = Asked(prompt, params, rng.choice(["", "", "a"]), rng.choice(["", "t", "u"]))
            asked.priority = rng.choice([0, 0, 1, -1])
            asked.stream = not isinstance(params, BeamSearchParams) and rng.random() < 0.4
            asked.stream = asked.stream and params.num_sequences == params.n
            return asked

        with self._open(row) as llm:
            life = Life(llm, rng, chances)
            life.live(NUM_REQUESTS, ask)
            life.check_ends()
            for name in life.done:
                asked = life.asked[name]
                expected = self._alone(row, asked.prompt, asked.params)
                found = whole(asked)
                if row["async_scheduling"] == "on":
                    # Whether torch draws, in single precision, depends on what overlaps.
                    found, expected = without_logprobs(found), without_logprobs(expected)
                assert found == expected, (name, asked)
            life.check_failures()
            life.check_nothing_left()
            self._count(life)

    def _count(self, life: Life) -> None:
        stats = life.engine.stats()
        counts = self.counts
        counts["engines"] += 1
        counts["answers"] += len(life.done)
        counts["aborted"] += len(life.aborted)
        counts["failed"] += len(life.failed)
        counts["waits for a pool"] += life.num_waits
        for name in (
            "num_preemptions_total", "num_swapped_out_total", "prefix_cache_hits_total",
            "persist_restored_blocks_total", "persist_written_blocks_total", "forks_total",
            "converted_to_virtual_total", "converted_to_paged_total", "evicted_blocks_total",
            "steps_overlapped_total", "spec_decode_num_accepted_tokens_total", "compactions_total",
        ):  # fmt: skip
            if stats.get(name):
                counts[name] += int(stats[name])
                counts["engines with " + name] += 1


# -- the command --------------------------------------------------------------------------


def _numbered(seed: int) -> Iterator[tuple[str, Row]]:
    """Rows of one covering array after the other, with their names."""
    for number in itertools.count(seed):
        for place, row in enumerate(rows_of(number)):
            yield f"{number}:{place}", row


def _work(folder: Path, seed: int, num_engines: int, part: int, parts: int, told: Any) -> None:
    logging.disable(logging.ERROR)
    lives = Lives(folder / str(part))
    failures, pairs = [], set()
    numbered = itertools.islice(_numbered(seed), part, num_engines, parts)
    for done, (name, row) in enumerate(numbered):
        pairs |= pairs_of(row)
        try:
            lives.run(row, name)
        except Exception as error:  # noqa: BLE001 - all are told
            text = "".join(traceback.format_exception(error)[-3:])
            failures.append({"row": name, "options": row, "error": text})
            print(name, repr(error)[:300], file=sys.stderr, flush=True)
        if done % 100 == 99:
            print(f"part {part}: {done + 1} engines", file=sys.stderr, flush=True)
    lives.close()
    told.put((lives.counts, failures, pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help="SEED:ROW of a failure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if options.only:
            seed, place = map(int, options.only.split(":"))
            row = rows_of(seed)[place]
            print(json.dumps(row, indent=1))
            Lives(Path(made)).run(row, options.only)
            return
        began = time.monotonic()
        context = multiprocessing.get_context("spawn")
        told = context.Queue()
        common = (Path(made), options.seed, options.engines)
        workers = [
            context.Process(target=_work, args=(*common, part, options.processes, told))
            for part in range(options.processes)
        ]
        for worker in workers:
            worker.start()
        counts: Counter[str] = Counter()
        failures, pairs = [], set()
        for _ in workers:
            more, failed, covered = told.get()
            counts += more
            failures += failed
            pairs |= covered
        for worker in workers:
            worker.join()
    counts["pairs of options"] = len(pairs)
    counts["seconds"] = round(time.monotonic() - began)
    print(json.dumps({"seed": options.seed, "failures": failures, **counts}, indent=1))
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
