"""llama.cpp through its C interface: continuous batching as its server does it, without HTTP.

Every step is one ``llama_decode`` of a token for each running sequence and, as far as the batch
has room, of prompts. Each sequence has a stream of its own in the KV cache, as in ``llama-server``
with a given number of slots: in a unified cache, every sequence's attention would walk over all
sequences' cells.
"""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

from engines.stepped import run_all

Json = dict[str, Any]

#: llama.cpp's own defaults.
BATCH_TOKENS, UBATCH_TOKENS = 2048, 512
#: Cells of a stream are rounded up to so many.
CELLS = 256


@dataclass
class Running:
    number: int
    slot: int
    prompt: list[int]
    num_wanted: int
    #: Tokens of the prompt in the cache, then all of them.
    num_computed: int = 0
    num_made: int = 0
    last_token: int = 0


class LlamaCppEngine:
    def __init__(self, job: Json) -> None:
        self._options = dict(job["options"])
        self._num_threads = job["num_threads"]
        self._num_slots = int(self._options.pop("slots", job["max_num_seqs"]))
        self._batch_tokens = int(self._options.pop("batch", BATCH_TOKENS))
        self._ubatch_tokens = int(self._options.pop("ubatch", UBATCH_TOKENS))
        self._is_unified = bool(self._options.pop("kv_unified", False))
        if self._options:
            raise ValueError(f"llama.cpp has no option {', '.join(self._options)} here")
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(job["files"]["gguf"].encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the model")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._num_words = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(self._batch_tokens, 0, 1)
        self._context: Any = None
        self._shape = (0, 0)
        self._waiting: deque[tuple[int, Json]] = deque()
        self._running: list[Running] = []
        self._free: list[int] = []
        self._next_number = 0
        self.facts = {
            "computes_in": f"{job['weights']} weights, by kernels for {job['isa'] or 'this CPU'}",
            "kv_cache": "f16",
            "slots": self._num_slots,
            "system": llama_cpp.llama_print_system_info().decode(),
            "versions": {"llama-cpp-python": llama_cpp.__version__},
        }

    def prepare(self, requests: list[Json]) -> None:
        """A context with a stream for each sequence that runs at once, as long as the longest."""
        sequential = bool(requests[0].get("is_sequential"))
        longest = max(
            len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests
        )
        num_slots = 1 if sequential else min(self._num_slots, len(requests))
        self._make_context(num_slots, -(-longest // CELLS) * CELLS)

    def run(self, requests: list[Json]) -> list[Json]:
        first = self._next_number
        self._next_number += len(requests)
        return run_all(self, requests, first)

    def _make_context(self, num_slots: int, cells: int) -> None:
        """A KV cache for so many sequences; the one there is stays where it is the same."""
        if self._shape == (num_slots, cells):
            return
        self._free_context()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_slots * cells
        params.n_batch = self._batch_tokens
        params.n_ubatch = self._ubatch_tokens
        params.n_seq_max = num_slots
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = self._is_unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {num_slots} x {cells} cells")
        self._shape = (num_slots, cells)
        self._free = list(range(num_slots))

    def add(self, number: int, request: Json) -> None:
        self._waiting.append((number, request))

    def step(self) -> list[tuple[int, list[int]]]:
        self._admit()
        outputs: list[Running] = []
        self._batch.n_tokens = 0
        for one in self._running:
            if one.num_computed >= len(one.prompt):
                self._push(one, one.last_token, is_output=True)
                outputs.append(one)
        for one in self._running:
            room = self._batch_tokens - self._batch.n_tokens
            chunk = one.prompt[one.num_computed : one.num_computed + room]
            for token in chunk:
                is_last = one.num_computed + 1 == len(one.prompt)
                self._push(one, token, is_output=is_last)
                if is_last:
                    outputs.append(one)
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {self._batch.n_tokens} tokens: status {status}")
        return self._take(outputs)

    def _admit(self) -> None:
        while self._waiting and self._free:
            number, request = self._waiting.popleft()
            self._running.append(
                Running(
                    number,
                    self._free.pop(),
                    request["prompt_token_ids"],
                    request["num_output_tokens"],
                )
            )

    def _push(self, one: Running, token: int, *, is_output: bool) -> None:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place] = token
        batch.pos[place] = one.num_computed
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = one.slot
        batch.logits[place] = is_output
        batch.n_tokens += 1
        one.num_computed += 1

    def _take(self, outputs: list[Running]) -> list[tuple[int, list[int]]]:
        """The likeliest token of each, in the order in which the batch asked for logits."""
        if not outputs:
            return []
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), shape=(len(outputs), self._num_words)
        )
        found = []
        for one, token in zip(outputs, logits.argmax(axis=1).tolist(), strict=True):
            one.last_token = token
            one.num_made += 1
            found.append((one.number, [token]))
            if one.num_made == one.num_wanted:
                self._running.remove(one)
                self._free.append(one.slot)
                memory = llama_cpp.llama_get_memory(self._context)
                llama_cpp.llama_memory_seq_rm(memory, one.slot, -1, -1)
        return found

    def _free_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
        self._context = None

    def close(self) -> None:
        self._free_context()
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_model_free(self._model)


def create(job: Json) -> LlamaCppEngine:
    return LlamaCppEngine(job)
