"""Engine options: parsed once, resolved once, never written again."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from vmserve import _core
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.footprint import activation_bytes, weight_bytes
from vmserve.sampling.tokens import sampling_bytes
from vmserve.sizes import format_size, parse_size

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["EngineConfig", "KVRegime", "ResolvedConfig", "ZeroPolicy"]

logger = logging.getLogger(__name__)

KVRegime = Literal["auto", "virtual", "paged"]
ZeroPolicy = Literal["always", "tenant", "never"]
#: "native": one call into C++ for the whole forward pass, on a CPU.
LinearBackend = Literal["auto", "native", "torch"]
#: Of linear layers. "int8": weights of 8 bits with a scale for each output, activations of 16;
#: "int8-dynamic": activations of 8 bits too, where the processor multiplies those faster.
Quantization = Literal["none", "int8", "int8-dynamic"]
KVMapper = Literal["auto", "off", "thread"]
Preemption = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority", "v0"]
#: Whether a step is launched while the one before it runs; "auto": on a GPU.
AsyncScheduling = Literal["auto", "on", "off"]

#: Share of the memory available at start that the KV cache may grow to on a CPU. Model
#: weights and activations live beside it, and other processes have a right to the rest.
CPU_KV_SHARE = 0.4
#: The least cap that is chosen where memory is short: too small a one is told at start with what
#: it would take, and growing beyond what is there is a recoverable error.
MIN_KV_BYTES = 64 << 20
#: Chunked prefill on a CPU: a step of 512 tokens keeps the pause of running decodes short
#: while the weights are already read far fewer times than they are multiplied.
DEFAULT_BATCHED_TOKENS = 512
DEFAULT_NUM_SEQS = 64
#: The same on a GPU, which reads its weights in a millisecond or a few and needs wide batches.
GPU_BATCHED_TOKENS = 2048
GPU_NUM_SEQS = 256
#: The least and the greatest value of each integer. A context of 1 has room for a prompt or an
#: answer; more than these sequences, tokens or pages no machine holds, and their bookkeeping is
#: allocated at start.
_RANGES = {
    "max_model_len": (2, 2**40),
    "max_num_seqs": (1, 2**20),
    "max_num_batched_tokens": (1, 2**31 - 1),
    "max_logprobs": (-1, 2**31 - 1),
    "block_size": (1, 2**31 - 1),
    "kv_layers_per_group": (1, 2**31 - 1),
    "tensor_parallel_size": (1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
}
#: Seconds after which a request that waits goes before higher priorities.
PRIORITY_MAX_WAIT = 60.0
#: Share of a GPU's memory that all of the engine may take: weights, activations and KV cache.
GPU_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options as the user gave them; ``None`` means "choose for me".

    Names and meanings are those of the command line (``--kv-regime`` is ``kv_regime``).
    Sizes are bytes or strings such as ``"512MiB"``.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_logprobs: int = 20
    kv_regime: KVRegime | None = None
    kv_cache_memory: int | str | None = None
    kv_page_size: int | str | None = None
    kv_zero_pages: ZeroPolicy = "tenant"
    kv_mapper: KVMapper = "auto"
    kv_driver: str = "auto"
    kv_layers_per_group: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int = 16
    swap_space: int | str = 0
    preemption: Preemption = "auto"
    scheduling_policy: SchedulingPolicy = "fcfs"
    priority_max_wait: float | None = None
    scheduler_delay_factor: float = 0.0
    async_scheduling: AsyncScheduling = "auto"
    fair_sharing: bool = False
    request_timeout: float | None = None
    regime_profile: str | None = None
    enable_prefix_caching: bool | None = None
    attention_backend: str = "auto"
    linear_backend: LinearBackend = "auto"
    quantization: Quantization = "none"
    trace_file: str | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        self._take_paths()
        self._check_choices()
        self._check_numbers()
        self._check_supported()

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Like the constructor, with a clear error for an unknown name."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigurationError(
                f"unknown engine option{'s' if len(unknown) > 1 else ''} "
                f"{', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**options)

    def _take_paths(self) -> None:
        """A ``Path`` is as good as its text: what is kept is text."""
        for name in ("model", "tokenizer", "kv_driver", "regime_profile", "trace_file"):
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
            elif value is not None and not isinstance(value, str):
                raise ConfigurationError(f"{name}: {value!r} is not a text or a path")

    def _check_choices(self) -> None:
        choices = {
            "kv_regime": (None, *get_args(KVRegime)),
            "kv_zero_pages": get_args(ZeroPolicy),
            "kv_mapper": get_args(KVMapper),
            "preemption": get_args(Preemption),
            "linear_backend": get_args(LinearBackend),
            "quantization": get_args(Quantization),
            "scheduling_policy": get_args(SchedulingPolicy),
            "async_scheduling": get_args(AsyncScheduling),
            "dtype": ("auto", "float32", "float", "bfloat16", "float16", "half"),
            "device": ("auto", "cpu", "cuda"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                names = ", ".join(filter(None, allowed))
                raise ConfigurationError(f"{name}: {value!r} is not one of {names}")

    def _check_numbers(self) -> None:
        for name, (minimum, maximum) in _RANGES.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigurationError(f"{name}: {value!r} is not an integer")
            if value < minimum:
                raise ConfigurationError(f"{name}: {value} is below the least value, {minimum}")
            if value > maximum:
                raise ConfigurationError(f"{name}: {value} is above the greatest value, {maximum}")
        for name in (
            "gpu_memory_utilization",
            "request_timeout",
            "priority_max_wait",
            "scheduler_delay_factor",
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int | float):
                raise ConfigurationError(f"{name}: {value!r} is not a number")
        for name in ("enable_prefix_caching", "enforce_eager", "fair_sharing"):
            if (value := getattr(self, name)) not in (None, True, False):
                raise ConfigurationError(f"{name}: {value!r} is neither True nor False")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization: {self.gpu_memory_utilization} is not in (0, 1]"
            )
        for name in ("request_timeout", "priority_max_wait"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}: {value} must be more than 0 seconds")
        if self.priority_max_wait is not None and self.scheduling_policy != "priority":
            raise ConfigurationError(
                "priority_max_wait: only the policy priority lets requests pass others; give "
                "--scheduling-policy priority too"
            )
        if not 0 <= self.scheduler_delay_factor <= 100:
            raise ConfigurationError(
                f"scheduler_delay_factor: {self.scheduler_delay_factor} is not in [0, 100]"
            )
        if self.scheduler_delay_factor and self.scheduling_policy != "v0":
            raise ConfigurationError(
                "scheduler_delay_factor: only the policy v0 waits before it reads prompts; "
                "give --scheduling-policy v0 too"
            )
        if self.async_scheduling == "on" and self.scheduling_policy == "v0":
            raise ConfigurationError(
                "async_scheduling: the policy v0 ends a step before it plans the next: use "
                "--async-scheduling off, or --scheduling-policy fcfs"
            )

    def _check_supported(self) -> None:
        refusals = [
            (self.tensor_parallel_size > 1, "tensor_parallel_size above 1", "use 1"),
        ]
        if self.preemption == "swap" and parse_size(self.swap_space, "swap_space") == 0:
            raise ConfigurationError(
                "preemption: swap needs host memory to swap to: give --swap-space, e.g. 4GiB"
            )
        if self.linear_backend == "native" and self.attention_backend not in ("auto", "cpu"):
            raise ConfigurationError(
                "linear_backend: native attends with our own kernels: use --attention-backend cpu, "
                f"not {self.attention_backend}"
            )
        for refused, what, remedy in refusals:
            if refused:
                raise UnsupportedError(f"{what} is not available in this version: {remedy}")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """What the engine runs with: every choice made, every number known."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    kv_regime: KVRegime
    kv_limit_bytes: int
    kv_page_bytes: int | None
    kv_zero_pages: ZeroPolicy
    kv_mapper: Literal["off", "thread"]
    kv_layers_per_group: int | None
    prefix_caching: bool
    block_tokens: int
    swap_bytes: int
    preemption: Preemption
    scheduling_policy: SchedulingPolicy
    #: Seconds after which a request that waits goes before higher priorities, where they count.
    priority_max_wait: float | None
    scheduler_delay_factor: float
    #: A step is launched while the one before it runs.
    async_scheduling: bool
    fair_sharing: bool
    #: Seconds from its arrival in which a request must end, where it does not say less.
    request_timeout: float | None
    #: A stored device profile; None: measured at start, where the regime is chosen by it.
    regime_profile: str | None
    trace_file: str | None
    #: Decoding steps are captured as graphs, where the device gains by it.
    captures_graphs: bool
    #: The most that activations take: what a GPU must keep free beside weights and KV cache.
    activation_bytes: int
    seed: int


def resolve(
    config: EngineConfig, model: ModelConfig, gpu_bytes: int | None = None
) -> ResolvedConfig:
    """Fill in what the user left open, and check the options against the model.

    ``gpu_bytes``: all memory of the GPU that the model runs on; None on a CPU.
    """
    context = model.max_position_embeddings
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ConfigurationError(
            f"max_model_len: {max_model_len} is above the model's own context of {context} tokens: "
            f"lower --max-model-len to {context} or less"
        )
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
    if gpu_bytes is None:
        kv_limit_bytes = _kv_limit_bytes(config, model, max_num_seqs, max_model_len, activations)
    else:
        kv_limit_bytes = _gpu_limit_bytes(config, model, gpu_bytes, activations)
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        max_logprobs=vocabulary if max_logprobs == -1 else min(max_logprobs, vocabulary),
        # Both views in one batch are two kernels a layer, and on a GPU a step that is captured in
        # pieces only.
        kv_regime=config.kv_regime or ("virtual" if on_gpu else "auto"),
        kv_limit_bytes=kv_limit_bytes,
        kv_page_bytes=None if page is None else parse_size(page, "kv_page_size"),
        kv_zero_pages=config.kv_zero_pages,
        kv_layers_per_group=config.kv_layers_per_group,
        kv_mapper="off" if config.kv_mapper == "off" else "thread",
        prefix_caching=config.enable_prefix_caching is not False,
        block_tokens=config.block_size,
        swap_bytes=_swap_bytes(config, model),
        preemption=config.preemption,
        scheduling_policy=config.scheduling_policy,
        priority_max_wait=_priority_max_wait(config),
        scheduler_delay_factor=config.scheduler_delay_factor,
        async_scheduling=config.async_scheduling == "on"
        or (config.async_scheduling == "auto" and on_gpu and config.scheduling_policy != "v0"),
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
    """Raises :class:`ConfigurationError` for what holds no block, or more than there is."""
    size = parse_size(config.swap_space, "swap_space")
    block = config.block_size * 2 * model.num_layers * model.kv_heads * model.head_dim
    block *= _itemsize(config, model)
    if 0 < size < block:
        raise ConfigurationError(
            f"swap_space: {format_size(size)} holds no KV block of {format_size(block)}; a number "
            "alone is bytes: write e.g. 4GiB"
        )
    return _within(size, _physical_bytes(), "swap_space", "this machine's memory")


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within(size: int, most: int, option: str, what: str) -> int:
    """``size``; raises :class:`ConfigurationError` where it is above ``most``."""
    if size > most:
        raise ConfigurationError(
            f"{option}: {format_size(size)} is more than {what}, {format_size(most)}: lower "
            f"--{option.replace('_', '-')}"
        )
    return size


def _gpu_limit_bytes(
    config: EngineConfig, model: ModelConfig, gpu_bytes: int, activations: int
) -> int:
    """The cap: as asked, or what weights and activations leave of the engine's share.

    Raises :class:`ConfigurationError` where they leave next to nothing, and for more than the GPU
    has.
    """
    if config.kv_cache_memory is not None:
        asked = parse_size(config.kv_cache_memory, "kv_cache_memory")
        return _within(asked, gpu_bytes, "kv_cache_memory", "the GPU's memory")
    share = config.gpu_memory_utilization or GPU_SHARE
    weights = weight_bytes(model, _itemsize(config, model))
    left = int(share * gpu_bytes) - weights - activations
    if left < MIN_KV_BYTES:
        raise ConfigurationError(
            f"gpu_memory_utilization: {share:g} of the GPU's {format_size(gpu_bytes)} is less than "
            f"{format_size(weights)} of weights, {format_size(activations)} of activations and "
            f"{format_size(MIN_KV_BYTES)} of KV cache take: raise --gpu-memory-utilization, lower "
            "--max-num-batched-tokens, or use a half-precision --dtype"
        )
    return left


def _itemsize(config: EngineConfig, model: ModelConfig) -> int:
    if config.dtype == "auto":
        return model.dtype.itemsize
    return 2 if config.dtype in ("bfloat16", "float16", "half") else 4


def _kv_limit_bytes(
    config: EngineConfig, model: ModelConfig, num_slots: int, max_len: int, activations: int
) -> int:
    """The cap: as asked, or a share of what is free beside weights and activations.

    The pool grows as it is used: of a cap that is above what is free now the log warns. Raises
    :class:`ConfigurationError` for one above all memory.
    """
    itemsize = 2 if config.dtype in ("bfloat16", "float16", "half") else 4
    free, whose = _core.SystemLimits().available_memory()  # of the system, or of the control group
    free -= weight_bytes(model, itemsize) + activations
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
    # A cap that no set of sequences could reach would only force larger pages: the planner
    # keeps the mappings of a full pool under the system's limit. In float32, the widest type.
    token_bytes = model.num_layers * 2 * model.kv_heads * model.head_dim * 4
    share = max(MIN_KV_BYTES, int(CPU_KV_SHARE * free))
    return min(share, num_slots * max_len * token_bytes)
