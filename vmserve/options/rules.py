"""What does not go with what: every refusal of one feature by another, in one table.

A :class:`Rule` refuses two *facts* together: values of options, and what is known of the model, the
device and the process. :func:`check` is asked wherever more is known than before (options as they
are read, the model, the device, ...). It passes over rules of which a fact is not known yet, so
that it can be asked early and again. To find where a rule refuses, search for its later fact. Rules
of options alone refuse in ``EngineConfig``. docs/features.md has the table, which
``scripts/options`` prints.

What one option says alone (its range, a size, a file) is checked where it is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from vmserve.errors import ConfigurationError, UnsupportedError

__all__ = ["RULES", "Fact", "Rule", "check"]


class Fact(NamedTuple):
    """Something that is known by a name, and when it counts."""

    name: str
    #: The fact as the table calls it.
    says: str
    holds: Callable[[Any], bool]
    #: A value with which it holds.
    example: Any


class Rule(NamedTuple):
    """Two facts that exclude each other.

    ``text``: the error, with the names of known facts in braces. ``kind``: UnsupportedError for
    what could work one day, else ConfigurationError.
    """

    this: Fact
    other: Fact
    text: str
    kind: type[ConfigurationError] = ConfigurationError


def check(facts: Mapping[str, Any]) -> None:
    """Raise what the first rule says of which both facts are known and hold."""
    for rule in RULES:
        if _holds(rule.this, facts) and _holds(rule.other, facts):
            raise rule.kind(rule.text.format_map(facts))


def _holds(fact: Fact, facts: Mapping[str, Any]) -> bool:
    return fact.name in facts and fact.holds(facts[fact.name])


# -- facts ------------------------------------------------------------------------------


def _is(name: str, value: str) -> Fact:
    return Fact(name, f"`{_option(name)} {value}`", lambda given: given == value, value)


def _given(name: str, example: Any, says: str | None = None) -> Fact:
    """An option has a value."""
    return Fact(name, says or f"`{_option(name)}`", lambda value: value is not None, example)


def _missing(name: str) -> Fact:
    return Fact(name, f"a missing `{_option(name)}`", lambda value: value is None, None)


def _true(name: str, says: str, example: Any = True) -> Fact:
    """Something that is, or a reason why it is not."""
    return Fact(name, says, bool, example)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_ASYNC = _is("async_scheduling", "on")
_DRAFT_MODEL = _given("speculative_model", "tiny.gguf")
_KV_PERSIST = _given("kv_persist", "DIR")
_RANKS = Fact(
    "tensor_parallel_size", "`--tensor-parallel-size` above 1", lambda value: value > 1, 2
)
_STATES = _true("state_bytes", "a model with linear attention", 4096)
_NATIVE = _true(
    "native_asked",
    "`--linear-backend native`, `--quantization`",
    "linear_backend: native",
)
_LAUNCHED = _given("launched_rank", 0, "torchrun, srun")
_SEVERAL = _true("are_several", "several models")
_OTHERS_ENGINES = _true("whose_engines", "`--engine`, `--distributed-executor ray`", "--engine")
_BACKEND = "the {backend} backend"

# -- rules ------------------------------------------------------------------------------

_STEPS: Final = (
    Rule(
        _given("priority_max_wait", 5.0),
        Fact(
            "scheduling_policy",
            "a `--scheduling-policy` other than `priority`",
            lambda value: value != "priority",
            "fcfs",
        ),
        "priority_max_wait: only the policy priority lets requests pass others; give "
        "--scheduling-policy priority too",
    ),
    Rule(
        _is("speculative", "draft-model"),
        _missing("speculative_model"),
        "speculative: draft-model needs a model that drafts: give --speculative-model",
    ),
    Rule(
        _DRAFT_MODEL,
        Fact(
            "speculative",
            "a `--speculative` other than `draft-model` and `auto`",
            lambda value: value not in ("draft-model", "auto"),
            "prompt-lookup",
        ),
        "speculative_model: it drafts with --speculative draft-model, or with auto as far as it "
        "pays, not with {speculative}",
    ),
    Rule(
        _given("num_speculative_tokens", 5),
        _is("speculative", "off"),
        "num_speculative_tokens: nothing is drafted with --speculative off",
    ),
    Rule(
        Fact(
            "speculative",
            "a `--speculative` other than `off`",
            lambda value: value != "off",
            "auto",
        ),
        _STATES,
        "speculative: {speculative}: a model with linear attention takes no drafts, because its "
        "state cannot forget a token that is rejected: use off",
    ),
    Rule(
        _ASYNC,
        _STATES,
        "async_scheduling: the states of a model with linear attention take a step's tokens once "
        "these are known: use off",
    ),
    Rule(
        _ASYNC,
        _RANKS,
        "async_scheduling: {tensor_parallel_size} ranks know a step's tokens before the next step "
        "begins: use --async-scheduling off",
        UnsupportedError,
    ),
)
_DRAFTS: Final = (
    Rule(
        _DRAFT_MODEL,
        Fact("device_type", "a GPU", lambda value: value != "cpu", "cuda"),
        "speculative_model: a draft model runs beside a model on the CPU only: use --device cpu, "
        "or --speculative prompt-lookup",
        UnsupportedError,
    ),
    Rule(
        _DRAFT_MODEL,
        _true("draft_state_bytes", "a draft model with linear attention", 4096),
        "speculative_model: {speculative_model} has linear attention, whose state cannot forget a "
        "token that is rejected: use a draft model with attention alone",
    ),
    Rule(
        _DRAFT_MODEL,
        _true(
            "draft_refusal",
            "a draft model that the native decoder does not run",
            "it has rotary positions only",
        ),
        "speculative_model: {speculative_model} cannot draft: draft models run in the native CPU "
        "decoder, and {draft_refusal}",
        UnsupportedError,
    ),
    Rule(
        _DRAFT_MODEL,
        _true(
            "tokenizer_difference",
            "a draft model with another tokenizer",
            "it has 151,936 tokens, not 49,152",
        ),
        "speculative_model: {speculative_model} has another tokenizer: {tokenizer_difference}: use "
        "a draft model of the same family",
    ),
)
_MEMORY: Final = (
    Rule(
        _RANKS,
        Fact(
            "kv_cache_memory", "a pool of several models", lambda value: value == "least", "least"
        ),
        "tensor_parallel_size: {tensor_parallel_size} ranks have a fixed KV cache, which a pool of "
        "several models does not lend: serve this model by a server of its own, or leave "
        "--tensor-parallel-size at 1",
        UnsupportedError,
    ),
    Rule(
        _is("preemption", "swap"),
        Fact("swap_bytes", "`--swap-space 0`", lambda value: value == 0, 0),
        "preemption: swap needs host memory to swap to: give --swap-space, e.g. 4GiB",
    ),
    Rule(
        _given("kv_persist_bytes", "20GiB"),
        _missing("kv_persist"),
        "kv_persist_bytes: nothing is kept without a directory: give --kv-persist too",
    ),
    Rule(
        _KV_PERSIST,
        Fact(
            "enable_prefix_caching",
            "`--no-enable-prefix-caching`",
            lambda value: value is False,
            False,
        ),
        "kv_persist: what it keeps are cached prefixes: leave --no-enable-prefix-caching out, or "
        "--kv-persist",
    ),
    Rule(
        _KV_PERSIST,
        _RANKS,
        "kv_persist: the blocks of {tensor_parallel_size} ranks are not kept yet: use "
        "--tensor-parallel-size 1, or leave --kv-persist out",
        UnsupportedError,
    ),
    Rule(
        _KV_PERSIST,
        _true("no_host_memory", "a page driver without host memory"),
        "kv_persist: this page driver has no host memory through which blocks go to the disk: "
        "leave --kv-persist out, or --kv-driver",
    ),
    Rule(
        Fact(
            "kv_driver",
            "a `--kv-driver` of host memory",
            lambda value: value not in ("auto", "cuda"),
            "host",
        ),
        Fact("device_type", "a GPU", lambda value: value == "cuda", "cuda"),
        "kv_driver: {kv_driver} gives memory of the processor, and the model is on the GPU: use "
        "--kv-driver auto, or --device cpu",
    ),
    Rule(
        _is("kv_driver", "cuda"),
        Fact("device_type", "a model on the CPU", lambda value: value == "cpu", "cpu"),
        "kv_driver: cuda gives memory of a GPU, and the model is on the CPU{no_gpu}: use "
        "--kv-driver auto, or --device cuda",
    ),
)
_RANKS_AND_LAUNCHERS: Final = (
    Rule(
        _RANKS,
        _true(
            "ranks_refusal",
            "a model whose parts they do not divide",
            "32 query heads and 8 key-value heads are divided among 1, 2, 4, 8 ranks, not 3",
        ),
        "tensor_parallel_size: {tensor_parallel_size} ranks cannot divide this model: "
        "{ranks_refusal}",
        UnsupportedError,
    ),
    Rule(
        _RANKS,
        _true("launched_rank", "a process that a launcher started as rank 1 or above", 1),
        "tensor_parallel_size: a launcher has started this process as rank {launched_rank} of "
        "{tensor_parallel_size}; only rank 0 has an engine: start a command of vmserve with it, "
        "say serve, in which the others serve rank 0",
    ),
    Rule(
        _RANKS,
        _true("other_size", "a launcher that started another number of processes", 3),
        "{launcher} has started {other_size:,} processes ({size_name}), but "
        "--tensor-parallel-size is {tensor_parallel_size:,}: make them equal",
    ),
    Rule(
        _NATIVE,
        _LAUNCHED,
        "linear_backend: ranks of the native decoder share memory, and are started by the engine: "
        "start one process without torchrun or srun, or give --linear-backend torch",
        UnsupportedError,
    ),
    Rule(
        _RANKS,
        Fact("missing_gpus", "fewer GPUs on this host", lambda value: value > 0, 1),
        "tensor_parallel_size: {tensor_parallel_size} ranks need {tensor_parallel_size} GPUs, and "
        "there are {num_gpus}: lower --tensor-parallel-size, or start ranks on several hosts",
    ),
)
_DECODERS: Final = (
    Rule(
        _is("linear_backend", "native"),
        Fact(
            "attention_backend",
            "an `--attention-backend` other than `cpu`",
            lambda value: value not in ("auto", "cpu"),
            "sdpa",
        ),
        "linear_backend: native attends with our own kernels: use --attention-backend cpu, not "
        "{attention_backend}",
    ),
    Rule(
        _NATIVE,
        _true(
            "native_refusal",
            "a GPU, or a model that the native decoder does not run",
            "it runs on a CPU only",
        ),
        "{native_asked} cannot serve this model: {native_refusal}",
    ),
    Rule(
        _NATIVE,
        _true("attends_by", "attention that other kernels compute", "sdpa"),
        "linear_backend: native attends with the cpu backend alone, and --attention-backend "
        "{attention_backend} is {attends_by} here: use --attention-backend cpu, or "
        "--linear-backend torch without --quantization",
    ),
    Rule(
        _true("native_only", "weights that stay quantized", "quantized GGUF files"),
        _true("torch_because", "layers that torch computes", "it runs on a CPU only"),
        "{model_name}: {native_only} run in the native CPU decoder only: {torch_because}",
        UnsupportedError,
    ),
)
_ATTENTION: Final = (
    Rule(
        _true("quantized_by", "checkpoints of GPTQ, AWQ, compressed-tensors", "GPTQ"),
        _true("no_family", "a model that the native decoder does not know", "MptForCausalLM"),
        "{quantized_by} checkpoints run in the native CPU decoder only, which has no {no_family}: "
        "use the model's bfloat16 or float16 weights",
        UnsupportedError,
    ),
    Rule(
        _true("kernels_device", "kernels of a device", "cpu"),
        _true("nobody_reads", "a `--kv-cache-dtype` that none of them reads", "fp8"),
        "kv_cache_dtype: no kernels read a KV cache of {nobody_reads} on the device "
        "{kernels_device} for this model{refusals}: use {readable}",
        UnsupportedError,
    ),
    Rule(
        _true("lacks_windows", "an `--attention-backend` without windows"),
        _true("windows", "layers with a sliding window"),
        f"layers of this model see a window of positions, which {_BACKEND} as it is installed "
        "cannot do: use --attention-backend auto",
        UnsupportedError,
    ),
    Rule(
        _true("lacks_sinks", "an `--attention-backend` without sinks"),
        _true("sinks", "attention with sinks"),
        f"the attention of this model has sinks, which {_BACKEND} cannot do: use "
        "--attention-backend auto",
        UnsupportedError,
    ),
    Rule(
        _true("lacks_latents", "an `--attention-backend` without latents"),
        _true("latents", "attention over latents"),
        f"values of this model's attention are parts of its keys, which {_BACKEND} cannot do: use "
        "--attention-backend auto",
        UnsupportedError,
    ),
    Rule(
        _true("lacks_softcap", "an `--attention-backend` without softcaps"),
        _true("num_capped", "layers with a softcap", 26),
        "{num_capped} layers of this model cap their attention scores at {softcap:g}, which "
        f"{_BACKEND} cannot do: {{softcap_remedy}}",
        UnsupportedError,
    ),
    Rule(
        _true("backend", "an `--attention-backend`", "sdpa"),
        Fact("unread_kv_dtype", "a `--kv-cache-dtype` that it does not read", bool, "int8"),
        f"kv_cache_dtype: {_BACKEND} reads no KV cache of {{unread_kv_dtype}}: use "
        "--attention-backend auto, or --kv-cache-dtype auto",
        UnsupportedError,
    ),
    Rule(
        _true("backend", "an `--attention-backend`", "sdpa"),
        _true("foreign_device", "a device that it has no kernels for", "cuda"),
        "attention_backend: {backend} has no kernels for the device {foreign_device}: use auto or "
        "one of {able}",
    ),
    Rule(
        _true("backend", "an `--attention-backend`", "sdpa"),
        _true("head_refusal", "heads that it does not serve", "it wants at most 256"),
        "attention_backend: {backend} cannot serve a head_dim of {head_dim} in {dtype}: "
        "{head_refusal}; use auto",
    ),
)
_SERVING: Final = (
    Rule(
        _given("engine_key_file", "FILE"),
        Fact("engines", "a missing `--engine`", lambda value: not value, ()),
        "engine_key_file: --engine HOST:PORT is missing",
    ),
    Rule(
        _given("ray_num_cpus", 2),
        Fact("uses_ray", "a missing `--distributed-executor ray`", lambda value: not value, False),
        "ray_num_cpus: --distributed-executor ray is missing",
    ),
    *(
        Rule(
            _given(one, "FILE"),
            _missing(other),
            "ssl_certfile and ssl_keyfile go together: a certificate, and its private key",
        )
        for one, other in (("ssl_certfile", "ssl_keyfile"), ("ssl_keyfile", "ssl_certfile"))
    ),
    Rule(
        _true("added_model", "`POST /v1/models/add`"),
        _true("unshared_memory", "an engine with `--in-process-engine`, or several engines"),
        "the engine of this server has memory that no other model can share: start it without "
        "--in-process-engine and --data-parallel-size, or with --models-config",
    ),
    Rule(
        _true("idle_unload", "`--idle-unload`"),
        _true("in_process_engine", "`--in-process-engine`"),
        "idle_unload: an engine in the server's own process cannot be ended: leave out "
        "--in-process-engine",
    ),
    Rule(
        _true("in_process_engine", "`--in-process-engine`"),
        Fact("is_one_process", "several engines", lambda value: not value, False),
        "data_parallel_size: an engine in the server's own process is the only one: leave out "
        "--in-process-engine",
    ),
    *(
        Rule(
            _true(name, f"`{_option(name)}`"),
            _OTHERS_ENGINES,
            f"{name}: {_option(name)} is for engines that the server starts, not for "
            "{whose_engines}",
        )
        for name in ("in_process_engine", "models_config", "engine_restarts", "idle_unload")
    ),
    Rule(
        _SEVERAL,
        _OTHERS_ENGINES,
        "model: --model is for engines that the server starts, not for {whose_engines}",
    ),
    *(
        Rule(
            fact,
            _true("engines", "`--engine`"),
            f"{name}: {_option(name)} is for engines that the server starts, not for --engine",
        )
        for name, fact in (
            ("distributed_executor", _true("uses_ray", "`--distributed-executor ray`")),
            ("data_parallel_size", _given("data_parallel_size", 2)),
        )
    ),
    Rule(
        _true(
            "engine_option", "options of the engine, which `vmserve engine` takes", "max_model_len"
        ),
        _true("engines", "`--engine`"),
        "{engine_option}: options of the engine are given to `vmserve engine`, not with --engine",
    ),
    *(
        Rule(
            _true(name, f"`{_option(name)}`"),
            _SEVERAL,
            f"{name}: {_option(name)} goes with one model, and several are given{remedy}",
        )
        for name, remedy in (
            ("served_model_name", ": name each, as --model NAME=PATH"),
            ("pin_prefix", ": give pin_prefix in tables of --models-config"),
            ("in_process_engine", ""),
        )
    ),
    Rule(
        Fact("is_one_process", "several engines", lambda value: not value, False),
        _SEVERAL,
        "data_parallel_size: --data-parallel-size goes with one model, and several are given",
    ),
    Rule(
        _SEVERAL,
        _true("table_kv_cache_memory", "`kv_cache_memory` of one of them"),
        "kv_cache_memory is the memory of all models together: give kv_floor or kv_cap, or "
        "--kv-cache-memory to the server",
    ),
    Rule(
        _SEVERAL,
        _true("unlimited_gpu", "a GPU, and no `--kv-cache-memory`"),
        "kv_cache_memory: several models share a GPU's memory: say how much of it their KV caches "
        "may take together, e.g. --kv-cache-memory 16GiB",
    ),
    Rule(
        _true("kv_pool", "`LLM(kv_pool=...)`"),
        Fact("is_one_process", "several engines", lambda value: not value, False),
        "kv_pool: a pool lends to one engine, not to several",
    ),
    Rule(
        _true("kv_pool", "`LLM(kv_pool=...)`"),
        _true("own_kv_cache_memory", "`kv_cache_memory`"),
        "kv_cache_memory: the pool lends this model its memory; give kv_floor, kv_cap or neither",
    ),
    Rule(
        _true("lent_name", "a member of a `KVPool`", "chat"),
        Fact("lent_memory", "memory of its own", lambda value: value != "least", "4GiB"),
        "{lent_name}: its engine has memory of its own; start it with kv_cache_memory least",
    ),
    Rule(
        _true("engines_here", "`--data-parallel-size` above 1 on one host", 2),
        _true("on_gpu", "a GPU"),
        "data_parallel_size: engines of one server would share a GPU: start a server for each GPU, "
        "with CUDA_VISIBLE_DEVICES, or give --device cpu",
    ),
)
RULES: Final = (
    *_STEPS,
    *_DRAFTS,
    *_MEMORY,
    *_RANKS_AND_LAUNCHERS,
    *_DECODERS,
    *_ATTENTION,
    *_SERVING,
)
