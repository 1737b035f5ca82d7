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

from engines.stepped import Stepped

Json = dict[str, Any]

#: llama.cpp's own defaults.
BATCH_TOKENS, UBATCH_TOKENS = 2048, 512
#: Cells of a stream are rounded up to so many.
CELLS = 256


@dataclass
class Running:
    number: int
    request: Json
    slot: int
    #: Of the prompt, then of the answer too; so many of them are in the cache.
    tokens: list[int]
    num_computed: int = 0


class Engine(Stepped):
    def __init__(self, job: Json) -> None:
        options = dict(job["options"])
        self._num_threads = job["num_threads"]
        self._num_slots = int(options.pop("slots", job["max_num_seqs"]))
        self._batch_tokens = int(options.pop("batch", BATCH_TOKENS))
        self._ubatch_tokens = int(options.pop("ubatch", UBATCH_TOKENS))
        self._is_unified = bool(options.pop("kv_unified", False))
        if options:
            raise ValueError(f"llama.cpp has no option {', '.join(options)} here")
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
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
        self._free: list[int] = []  # slots
        self.facts = {
            "computes_in": f"{job['weights']} weights, by kernels for {job['isa'] or 'this CPU'}",
            "kv_cache": "f16",
            "slots": self._num_slots,
            "more": [llama_cpp.__version__, llama_cpp.llama_print_system_info().decode()],
        }

    def prepare(self, requests: list[Json]) -> None:
        """A context with a stream for each sequence that runs at once, as long as the longest; one
        of that shape stays.
        """
        lengths = [len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests]
        is_alone = requests[0].get("is_sequential")
        num_slots = 1 if is_alone else min(self._num_slots, len(requests))
        shape = (num_slots, -(-max(lengths) // CELLS) * CELLS)
        if self._shape == shape:
            return
        self._free_context()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = shape[0] * shape[1]
        params.n_batch = self._batch_tokens
        params.n_ubatch = self._ubatch_tokens
        params.n_seq_max = num_slots
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = self._is_unified
        params.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {shape[0]} x {shape[1]} cells")
        self._shape, self._free = shape, list(range(num_slots))

    def add(self, number: int, request: Json) -> None:
        self._waiting.append((number, request))

    def step(self) -> list[tuple[int, list[int]]]:
        while self._waiting and self._free:
            number, request = self._waiting.popleft()
            tokens = list(request["prompt_token_ids"])
            self._running.append(Running(number, request, self._free.pop(), tokens))
        batch, outputs = self._batch, []
        batch.n_tokens = 0
        # First a token of each sequence that decodes, then prompts as far as there is room.
        for one in sorted(self._running, key=lambda one: len(one.tokens) - one.num_computed > 1):
            room = self._batch_tokens - batch.n_tokens
            for token in one.tokens[one.num_computed : one.num_computed + room]:
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, one.num_computed
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, one.slot
                one.num_computed += 1
                batch.logits[at] = one.num_computed == len(one.tokens)
                batch.n_tokens += 1
            if one.num_computed == len(one.tokens):
                outputs.append(one)
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {batch.n_tokens} tokens: status {status}")
        return self._take(outputs) if outputs else []

    def _take(self, outputs: list[Running]) -> list[tuple[int, list[int]]]:
        """The likeliest token of each, in the order in which the batch asked for logits."""
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(self._context), shape=(len(outputs), self._num_words)
        )
        found = []
        for one, token in zip(outputs, logits.argmax(axis=1).tolist(), strict=True):
            one.tokens.append(token)
            found.append((one.number, [token]))
            num_made = len(one.tokens) - len(one.request["prompt_token_ids"])
            if num_made == one.request["num_output_tokens"]:
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
