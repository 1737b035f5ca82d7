"""Engine options as given (:class:`EngineConfig`) and as resolved against a model."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from vmserve.errors import ConfigurationError
from vmserve.memory.limits import available_memory
from vmserve.models.footprint import (
    activation_bytes,
    kv_token_bytes,
    state_copy_bytes,
    weight_bytes,
)
from vmserve.numbers.dtypes import DType
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.options import Bounds, Option, check_options, rules
from vmserve.sampling.tokens import sampling_bytes

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = [
    "LEAST",
    "LEAST_BYTES",
    "EngineConfig",
    "KVRegime",
    "ResolvedConfig",
    "ZeroPolicy",
    "asked_itemsize",
    "resolve",
]

logger = logging.getLogger(__name__)

KVRegime = Literal["auto", "virtual", "paged"]
ZeroPolicy = Literal["always", "tenant", "never"]
#: "native": one call into C++ for the whole forward pass, on a CPU.
LinearBackend = Literal["auto", "native", "torch"]
#: Quantization of linear layers. "int8": 8-bit weights with a scale per output, 16-bit activations.
#: "int8-dynamic": 8-bit activations too, if the processor multiplies those faster.
Quantization = Literal["none", "int8", "int8-dynamic"]
KVMapper = Literal["auto", "off", "thread"]
KVCacheDType = Literal["auto", "int8", "fp8"]
Preemption = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
#: Source of drafts; "auto": as far as they pay.
Speculative = Literal["off", "prompt-lookup", "draft-model", "auto"]
#: Whether a step is launched while the previous one runs; "auto": on a GPU.
AsyncScheduling = Literal["auto", "on", "off"]

#: Share of the memory available at start that the KV cache may grow to on a CPU. The rest is for
#: weights, activations and other processes.
CPU_KV_SHARE = 0.4
#: Tokens that are whole pages of each size that is a default on a CPU.
_WHOLE_PAGES_TOKENS = 256
#: Smallest cap chosen when memory is short. A cap that is too small fails at start, with the size
#: needed; growing beyond the memory that exists is a recoverable error.
MIN_KV_BYTES = 64 << 20
#: Value of ``kv_cache_memory``: what the longest sequence needs;
#: :class:`vmserve.KVPool` lends more.
LEAST: Final = "least"
#: Value of :attr:`ResolvedConfig.kv_limit_bytes` that is not known yet.
LEAST_BYTES: Final = -1
#: Tokens of a step on a CPU. 512 keep the pause of running decodes short, and are enough that
#: reading the weights costs little compared with multiplying them.
DEFAULT_BATCHED_TOKENS = 512
DEFAULT_NUM_SEQS = 64
#: Tokens of a step on a GPU, which reads its weights in milliseconds and needs wide batches.
GPU_BATCHED_TOKENS = 2048
GPU_NUM_SEQS = 256
#: Seconds after which a waiting request goes before all priorities.
PRIORITY_MAX_WAIT = 60.0
#: Bytes that cached prefixes may take on the disk, if they are kept there.
DEFAULT_PERSIST_BYTES = 4 << 30
#: Share of a GPU's memory for the whole engine: weights, activations and KV cache.
GPU_SHARE = 0.9

_MODEL: Final = "Model and tokenizer"
_DEVICE: Final = "Device"
_KV: Final = "KV cache"
_SCHEDULING: Final = "Scheduling"
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options as the user gave them; ``None`` means "choose for me".

    Names and meanings are those of the command line (``--kv-regime`` is ``kv_regime``).
    Sizes are bytes or strings such as ``"512MiB"``. Numbers of sequences, tokens and pages have an
    upper bound since their bookkeeping is allocated at start.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    model: Annotated[
        str | None,
        Option(
            "A directory in Hugging Face layout, a GGUF file, a hub id, or what `vmserve models` "
            "lists.",
            _MODEL,
            default="vmserve-embedded, the model in the package",
            metavar="PATH",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "A directory or a hub id, if not the model's own tokenizer.", _MODEL, metavar="PATH"
        ),
    ] = None
    dtype: Annotated[
        str,
        Option(
            "auto, float32 (float), bfloat16 or float16 (half).",
            _MODEL,
            default="auto, the model's own",
            choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Option(
            "Most tokens of a request, prompt plus answer.",
            _MODEL,
            # A context of 1 has room for a prompt or an answer, not for both.
            Bounds(2, 2**40),
            default="the model's context",
        ),
    ] = None
    max_logprobs: Annotated[
        int,
        Option(
            "Most log-probabilities per token that a request may ask for; -1: the whole "
            "vocabulary.",
            _MODEL,
            Bounds(-1, _INT32_MAX),
        ),
    ] = 20
    seed: Annotated[
        int,
        Option("Seed of the requests that give none.", _MODEL, Bounds(-(2**63), 2**63 - 1)),
    ] = 0
    device: Annotated[
        str, Option("auto, cpu or cuda.", _DEVICE, choices=("auto", "cpu", "cuda"))
    ] = "auto"
    attention_backend: Annotated[str, Option("auto or a backend's name.", _DEVICE)] = "auto"
    linear_backend: Annotated[
        LinearBackend,
        Option(
            "native (C++, on a CPU) or torch.",
            _DEVICE,
            default="auto, native where it can run the model",
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization,
        Option(
            "int8 stores the weights of linear layers in half the memory of bfloat16. int8-dynamic "
            "also rounds their inputs to 8 bits (with int8, and without AVX512_VNNI, to 16): long "
            "prompts are faster, and answers change more. On SmolLM2-135M int8 changed 4.4 % of "
            "the likeliest tokens, int8-dynamic 7.0 %; `vmserve bench quality` measures it for "
            "your model. Native backend only.",
            _DEVICE,
        ),
    ] = "none"
    tensor_parallel_size: Annotated[
        int,
        Option(
            "Processes (ranks) that divide each layer and the KV cache among them. On a CPU each "
            "has its part of the cores, and tokens are those of one process.",
            _DEVICE,
            Bounds(1, 64, integer=True),
            flags=("--tensor-parallel-size", "-tp"),
        ),
    ] = 1
    enforce_eager: Annotated[
        bool,
        Option("Never capture a step as a graph.", _DEVICE, default="graphs are captured on a GPU"),
    ] = False
    kv_regime: Annotated[
        KVRegime | None,
        Option(
            "Layout of a request's KV cache: virtual (contiguous) or paged.",
            _KV,
            default="auto, chosen per request; on a GPU virtual, as two layouts in one batch take "
            "more launches",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        Option(
            "int8 and fp8 store keys and values in 8 bits, with a scale for each token and head: "
            "half the memory of bfloat16, so about twice the requests at once. `vmserve bench "
            "quality` measures what it costs your model. With our own attention kernels alone: "
            "int8 on a CPU, fp8 (e4m3) on a GPU.",
            _KV,
            default="auto, the model's own",
        ),
    ] = "auto"
    kv_cache_memory: Annotated[
        int | str | None,
        Option(
            "Most memory that the KV cache may grow to, that of all ranks together, e.g. 512MiB or "
            "4GiB; least: what the longest sequence needs.",
            _KV,
            default=f"{CPU_KV_SHARE * 100:g} % of the memory that is free at start; on a GPU what "
            "--gpu-memory-utilization leaves",
            metavar="SIZE",
        ),
    ] = None
    kv_page_size: Annotated[
        int | str | None,
        Option(
            "Bytes of a page.",
            _KV,
            default="planned from the model and the device",
            metavar="SIZE",
        ),
    ] = None
    kv_zero_pages: Annotated[
        ZeroPolicy,
        Option(
            "When pages are zeroed before they are reused.",
            _KV,
            default="tenant, before another tenant gets them",
        ),
    ] = "tenant"
    kv_mapper: Annotated[
        KVMapper,
        Option("Map pages ahead in a thread while steps compute.", _KV, default="auto, on"),
    ] = "auto"
    kv_eager_slots: Annotated[
        int,
        Option(
            "Most slots that are kept mapped for new requests of the virtual view; 0 for none. "
            "Needs the mapper.",
            _KV,
            Bounds(0, 2**20, integer=True),
        ),
    ] = 4
    kv_eager_tokens: Annotated[
        int | None,
        Option(
            "Tokens for which such a slot has pages. Given, as many slots as --kv-eager-slots says "
            "are kept.",
            _KV,
            Bounds(1, 2**40, integer=True),
            default="learnt from what new requests took, as are the slots",
        ),
    ] = None
    kv_driver: Annotated[
        str,
        Option(
            "host, cuda, or the path of a page driver's shared library.",
            _KV,
            default="auto, the device's own",
        ),
    ] = "auto"
    kv_layers_per_group: Annotated[
        int | None,
        Option(
            "Layers whose keys and values share a page; more layers mean fewer tokens per page.",
            _KV,
            Bounds(1, _INT32_MAX),
            default="planned for the device",
        ),
    ] = None
    block_size: Annotated[int, Option("Tokens of a KV block.", _KV, Bounds(1, _INT32_MAX))] = 16
    swap_space: Annotated[
        int | str,
        Option(
            "Host memory for preempted requests, e.g. 1GiB.",
            _KV,
            default="0, none",
            metavar="SIZE",
        ),
    ] = 0
    enable_prefix_caching: Annotated[
        bool | None,
        Option(
            "Keep the KV cache of finished requests for later ones with the same prefix.",
            _KV,
            default="on",
            negatable=True,
        ),
    ] = None
    kv_persist: Annotated[
        str | None,
        Option(
            "Keep cached prefixes in this directory, so that a prompt is not computed again after "
            "a restart. Several engines may share it. Whoever can read it can read prompts.",
            _KV,
            default="none, they end with the process",
            metavar="DIR",
        ),
    ] = None
    kv_persist_bytes: Annotated[
        int | str | None,
        Option(
            "Most that --kv-persist may take on the disk, e.g. 20GiB; what was used least recently "
            "goes first.",
            _KV,
            default=format_size(DEFAULT_PERSIST_BYTES),
            metavar="SIZE",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Option(
            "On a GPU: share of its memory for weights, activations and KV cache. On a CPU: "
            "cap of the KV cache as a share of all memory.",
            _KV,
            Bounds(0, 1, open_low=True),
            default=f"{GPU_SHARE} on a GPU",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(
            "Most sequences that run at once.",
            _SCHEDULING,
            Bounds(1, 2**20),
            default=f"{DEFAULT_NUM_SEQS}, on a GPU {GPU_NUM_SEQS}",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Option(
            "Most tokens computed in a step; longer prompts are cut into chunks.",
            _SCHEDULING,
            Bounds(1, _INT32_MAX),
            default=f"{DEFAULT_BATCHED_TOKENS}, on a GPU {GPU_BATCHED_TOKENS}",
        ),
    ] = None
    preemption: Annotated[
        Preemption,
        Option(
            "How a preempted request resumes: its KV cache is recomputed, or swapped to host "
            "memory.",
            _SCHEDULING,
        ),
    ] = "auto"
    scheduling_policy: Annotated[
        SchedulingPolicy,
        Option(
            "Who runs first. fcfs: first come, first served; priority: the lowest number, "
            "which may preempt higher ones.",
            _SCHEDULING,
        ),
    ] = "fcfs"
    async_scheduling: Annotated[
        AsyncScheduling,
        Option(
            "Launch a step while the one before it runs.", _SCHEDULING, default="auto, on a GPU"
        ),
    ] = "auto"
    speculative: Annotated[
        Speculative,
        Option(
            "Compute several tokens of an answer in a step, where the request's own text (prompt, "
            "answer so far, prediction) suggests how it goes on. The tokens are the same. "
            "prompt-lookup: wherever there is a match; auto: as far as it pays by the measured "
            "times of steps and by what was accepted; draft-model: by --speculative-model.",
            _SCHEDULING,
        ),
    ] = "off"
    speculative_model: Annotated[
        str | None,
        Option(
            "A small model with the same tokenizer, which drafts: a directory, a GGUF file, or a "
            "hub id. It runs on the CPU and takes a part of --kv-cache-memory.",
            _SCHEDULING,
            default="none",
            metavar="PATH",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Option(
            "Most tokens of a draft.",
            _SCHEDULING,
            Bounds(1, 15),
            default="of a draft model 5, with auto 7; of a text 7, with auto 15",
        ),
    ] = None
    priority_max_wait: Annotated[
        float | None,
        Option(
            "With the policy priority: seconds after which a waiting request goes before all "
            "priorities, for at most a quarter of the sequences.",
            _SCHEDULING,
            Bounds(0, open_low=True),
            default=f"{PRIORITY_MAX_WAIT:g}",
            metavar="SECONDS",
            unit="seconds",
        ),
    ] = None
    fair_sharing: Annotated[
        bool,
        Option(
            "Share places and tokens equally between tenants (API keys): the tenant that used"
            " the fewest tokens is next, and may preempt one that used more.",
            _SCHEDULING,
            default="no; of a server with several API keys, yes",
            negatable=True,
        ),
    ] = False
    request_timeout: Annotated[
        float | None,
        Option(
            "Seconds after which a request fails, waiting included.",
            _SCHEDULING,
            Bounds(0, open_low=True),
            default="none",
            metavar="SECONDS",
            unit="seconds",
        ),
    ] = None
    regime_profile: Annotated[
        str | None,
        Option(
            "Device profile for --kv-regime auto, as `vmserve bench profile` writes it.",
            _KV,
            default="measured at start",
            metavar="PATH",
        ),
    ] = None
    trace_file: Annotated[
        str | None,
        Option(
            "Write what each step did to this file, for Perfetto.",
            _SCHEDULING,
            default="none",
            metavar="PATH",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)
        rules.check(self.facts)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Make a configuration from keywords; an unknown name is a ConfigurationError."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigurationError(
                f"unknown engine option{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**options)

    @property
    def facts(self) -> dict[str, Any]:
        """What rules ask of options: :mod:`vmserve.options.rules`."""
        known = dict(vars(self))
        if self.preemption == "swap":
            known["swap_bytes"] = parse_size(self.swap_space, "swap_space")
        return known


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """The options that the engine runs with: every choice made, every number known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    kv_regime: KVRegime
    kv_cache_dtype: KVCacheDType
    #: Limit of the KV cache; :data:`LEAST_BYTES` until the memory is made, if that was asked for.
    kv_limit_bytes: int
    kv_page_bytes: int | None
    kv_zero_pages: ZeroPolicy
    kv_mapper: Literal["off", "thread"]
    kv_eager_slots: int
    kv_eager_tokens: int | None
    kv_layers_per_group: int | None
    prefix_caching: bool
    #: Directory of prefixes that outlive the process, and how many bytes they may take.
    kv_persist: str | None
    kv_persist_bytes: int
    block_tokens: int
    swap_bytes: int
    preemption: Preemption
    scheduling_policy: SchedulingPolicy
    #: Seconds after which a waiting request goes before all priorities; None without priorities.
    priority_max_wait: float | None
    #: Whether a step is launched while the previous one runs.
    async_scheduling: bool
    speculative: Speculative
    fair_sharing: bool
    #: Seconds after its arrival at which a request fails, unless it asks for fewer.
    request_timeout: float | None
    #: Path of a stored device profile; None: measured at start, if the regime depends on it.
    regime_profile: str | None
    trace_file: str | None
    #: Whether decoding steps are captured as graphs, on devices that gain by it.
    captures_graphs: bool
    #: Most memory that activations take; a GPU keeps it free besides weights and KV cache.
    activation_bytes: int
    seed: int


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    gpu_bytes: int | None = None,
    *,
    stored_bytes: int | None = None,
) -> ResolvedConfig:
    """Choose what the user left open, and check the options against the model.

    ``gpu_bytes``: total memory of the GPU that the model runs on; None on a CPU. ``stored_bytes``:
    of the files whose weights the native decoder keeps as they are; None: torch computes.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    context = model.max_position_embeddings
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ConfigurationError(
            f"max_model_len: {max_model_len} is above the model's own context of {context} tokens: "
            f"lower --max-model-len to {context} or less"
        )
    rules.check({**config.facts, "state_bytes": model.state_bytes})
    on_gpu = gpu_bytes is not None
    max_num_seqs = config.max_num_seqs or (GPU_NUM_SEQS if on_gpu else DEFAULT_NUM_SEQS)
    default_batched = GPU_BATCHED_TOKENS if on_gpu else DEFAULT_BATCHED_TOKENS
    batched = config.max_num_batched_tokens or max(default_batched, max_num_seqs)
    if batched < max_num_seqs:
        raise ConfigurationError(
            f"max_num_batched_tokens: {batched} is below max_num_seqs, {max_num_seqs}, so that not "
            "every running sequence could decode in a step: raise the one or lower the other"
        )
    vocabulary = model.vocab_size
    max_logprobs = config.max_logprobs
    page = config.kv_page_size
    activations = activation_bytes(model, batched, max_num_seqs)
    if on_gpu:
        activations += sampling_bytes(vocabulary, max_num_seqs)
        activations += state_copy_bytes(model, max_num_seqs)
    weights = weight_bytes(
        model,
        asked_itemsize(config, model),
        stored_bytes=stored_bytes,
        quantization=config.quantization,
    )
    if gpu_bytes is None:
        taken = _Taken(weights, activations)
        kv_limit_bytes = _kv_limit_bytes(config, model, max_num_seqs, max_model_len, taken)
    else:
        num_gpus = config.tensor_parallel_size
        kv_limit_bytes = _gpu_limit_bytes(
            config, num_gpus * gpu_bytes, _Taken(weights, num_gpus * activations)
        )
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_logprobs=vocabulary if max_logprobs == -1 else min(max_logprobs, vocabulary),
        # Two regimes in one batch take two kernels a layer; on a GPU such a step can be captured
        # only in pieces.
        kv_regime=config.kv_regime or ("virtual" if on_gpu else "auto"),
        kv_cache_dtype=config.kv_cache_dtype,
        kv_limit_bytes=kv_limit_bytes,
        kv_page_bytes=None if page is None else parse_size(page, "kv_page_size"),
        kv_zero_pages=config.kv_zero_pages,
        kv_layers_per_group=config.kv_layers_per_group,
        kv_mapper="off" if config.kv_mapper == "off" else "thread",
        kv_eager_slots=config.kv_eager_slots,
        kv_eager_tokens=config.kv_eager_tokens,
        prefix_caching=config.enable_prefix_caching is not False,
        kv_persist=config.kv_persist,
        kv_persist_bytes=(
            DEFAULT_PERSIST_BYTES
            if config.kv_persist_bytes is None
            else parse_size(config.kv_persist_bytes, "kv_persist_bytes")
        ),
        block_tokens=config.block_size,
        swap_bytes=_swap_bytes(config, model),
        preemption=config.preemption,
        scheduling_policy=config.scheduling_policy,
        priority_max_wait=_priority_max_wait(config),
        async_scheduling=config.async_scheduling == "on"
        or (config.async_scheduling == "auto" and on_gpu and not model.state_bytes),
        speculative=config.speculative,
        fair_sharing=config.fair_sharing,
        request_timeout=config.request_timeout,
        regime_profile=config.regime_profile,
        trace_file=config.trace_file,
        captures_graphs=not config.enforce_eager,
        activation_bytes=activations,
        seed=config.seed,
    )


def _priority_max_wait(config: EngineConfig) -> float | None:
    if config.scheduling_policy != "priority":
        return None
    return config.priority_max_wait or PRIORITY_MAX_WAIT


def _swap_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of the swap space.

    Raises :class:`ConfigurationError` for a size below one block or above the machine's memory.
    """
    size = parse_size(config.swap_space, "swap_space")
    if config.kv_cache_dtype == "auto":
        token = model.kv_elements * asked_itemsize(config, model)
    else:
        token = kv_token_bytes(model, DType(config.kv_cache_dtype))
    block = config.block_size * token
    if 0 < size < block:
        raise ConfigurationError(
            f"swap_space: {format_size(size)} holds no KV block of {format_size(block)}; a number "
            "alone is bytes: write e.g. 4GiB"
        )
    return _within(size, _physical_bytes(), "swap_space", "this machine's memory")


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within(size: int, most: int, option: str, what: str) -> int:
    """Return ``size``. Raises :class:`ConfigurationError` if it is above ``most``."""
    if size > most:
        raise ConfigurationError(
            f"{option}: {format_size(size)} is more than {what}, {format_size(most)}: lower "
            f"--{option.replace('_', '-')}"
        )
    return size


class _Taken(NamedTuple):
    """Bytes that are not for the KV cache."""

    weights: int
    activations: int


def _gpu_limit_bytes(config: EngineConfig, gpu_bytes: int, taken: _Taken) -> int:
    """The KV cache's cap on a GPU: as asked, or what weights and activations leave of the share.

    Raises :class:`ConfigurationError` if they leave next to nothing, and for more than the GPU has.
    """
    if config.kv_cache_memory == LEAST:
        return LEAST_BYTES
    if config.kv_cache_memory is not None:
        asked = parse_size(config.kv_cache_memory, "kv_cache_memory")
        return _within(asked, gpu_bytes, "kv_cache_memory", "the GPU's memory")
    share = config.gpu_memory_utilization or GPU_SHARE
    left = int(share * gpu_bytes) - sum(taken)
    if left < MIN_KV_BYTES:
        raise ConfigurationError(
            f"gpu_memory_utilization: {share:g} of the GPU's {format_size(gpu_bytes)} is less than "
            f"{format_size(taken.weights)} of weights, {format_size(taken.activations)} of "
            f"activations and {format_size(MIN_KV_BYTES)} of KV cache take: raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens, or use a half-precision "
            "--dtype"
        )
    return left


def asked_itemsize(config: EngineConfig, model: ModelConfig) -> int:
    """Bytes of a number of the type that is asked for."""
    if config.dtype == "auto":
        return model.dtype.itemsize
    return 2 if config.dtype in ("bfloat16", "float16", "half") else 4


def _kv_limit_bytes(
    config: EngineConfig, model: ModelConfig, num_slots: int, max_len: int, taken: _Taken
) -> int:
    """The KV cache's cap on a CPU: as asked, or a share of the memory that is free.

    Free memory is counted without weights and activations. A cap above it is logged as a warning,
    since the pool grows only as it is used, and so is too little for the rest. Raises
    :class:`ConfigurationError` for a cap above the machine's memory.
    """
    if config.kv_cache_memory == LEAST:
        return LEAST_BYTES
    all_free, whose = available_memory()  # of the system, or of the control group
    free = all_free - sum(taken)
    if free < MIN_KV_BYTES:
        logger.warning(
            "%s of weights, %s of activations and %s of KV cache are more than the %s that are "
            "free (%s): the system may swap or end this process; use a smaller model, "
            "--quantization int8, or a lower --max-num-batched-tokens",
            format_size(taken.weights),
            format_size(taken.activations),
            format_size(MIN_KV_BYTES),
            format_size(all_free),
            whose,
        )
    if config.kv_cache_memory is not None:
        asked = parse_size(config.kv_cache_memory, "kv_cache_memory")
        _within(asked, _physical_bytes(), "kv_cache_memory", "this machine's memory")
        if asked > free:
            logger.warning(
                "kv_cache_memory: %s, but beside weights and activations %s are free (%s): "
                "requests may find no memory; lower --kv-cache-memory",
                format_size(asked),
                format_size(max(0, free)),
                whose,
            )
        return asked
    if config.gpu_memory_utilization is not None:
        return int(config.gpu_memory_utilization * _physical_bytes())
    # The planner keeps the mappings of a full pool under the system's limit, so a cap that no set
    # of sequences can reach would only force larger pages. Counted in float32, the widest type.
    token_bytes = 4 * model.kv_elements
    # Heads that are fewer than the ranks are those of several.
    token_bytes *= max(1, config.tensor_parallel_size // model.kv_heads)
    # Pages of a sequence are its own, also the last.
    tokens = -(-max_len // _WHOLE_PAGES_TOKENS) * _WHOLE_PAGES_TOKENS
    # A checkpoint of a state lies next to the state itself.
    most = num_slots * (tokens * token_bytes + 2 * model.state_bytes)
    return min(default_kv_bytes(free), most)


def default_kv_bytes(free: int) -> int:
    """What KV caches may take on a CPU if nobody says it: a share of the memory that is free."""
    return max(MIN_KV_BYTES, int(CPU_KV_SHARE * free))
