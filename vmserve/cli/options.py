"""Engine options as the command line spells them, declared once for all commands.

A command that takes all of them is written with ``**engine_options`` and decorated with
:func:`with_engine_options`; one that takes some annotates its parameters with the aliases
(``seed: opt.Seed = 0``). An option that is not given is left to
:class:`vmserve.config.EngineConfig`, which knows the defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from vmserve.config import AsyncScheduling as _AsyncScheduling
from vmserve.config import KVMapper as _KVMapper
from vmserve.config import KVRegime as _KVRegime
from vmserve.config import LinearBackend as _LinearBackend
from vmserve.config import Preemption as _Preemption
from vmserve.config import Quantization as _Quantization
from vmserve.config import SchedulingPolicy as _SchedulingPolicy
from vmserve.config import ZeroPolicy
from vmserve.errors import ConfigurationError

__all__ = ["ENGINE_OPTIONS", "server_url", "with_engine_options"]

_MODEL = "Model and tokenizer"
_KV = "KV cache"
_SCHEDULING = "Scheduling"
_DEVICE = "Device"


def _option(*names: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar)


Model = Annotated[
    str | None,
    _option(
        "--model",
        help="A directory in Hugging Face layout or a hub id. Default: vmserve-embedded, the model "
        "in the package.",
        panel=_MODEL,
        metavar="PATH",
    ),
]
Tokenizer = Annotated[
    str | None,
    _option(
        "--tokenizer",
        help="A directory or a hub id, where it is not the model's own.",
        panel=_MODEL,
        metavar="PATH",
    ),
]
DType = Annotated[
    str | None,
    _option(
        "--dtype",
        help="auto, float32 (float), bfloat16 or float16 (half). Default: auto, the model's own.",
        panel=_MODEL,
    ),
]
MaxModelLen = Annotated[
    int | None,
    _option(
        "--max-model-len",
        help="Most tokens of a request, prompt and answer. Default: the model's context.",
        panel=_MODEL,
    ),
]
MaxLogprobs = Annotated[
    int | None,
    _option(
        "--max-logprobs",
        help="Most log-probabilities per token that a request may ask for; -1: the whole "
        "vocabulary. Default: 20.",
        panel=_MODEL,
    ),
]
Seed = Annotated[
    int | None,
    _option("--seed", help="Feeds requests without a seed of their own. Default: 0.", panel=_MODEL),
]
Device = Annotated[
    str | None, _option("--device", help="auto, cpu or cuda. Default: auto.", panel=_DEVICE)
]
AttentionBackend = Annotated[
    str | None,
    _option("--attention-backend", help="auto or a backend's name. Default: auto.", panel=_DEVICE),
]
LinearBackend = Annotated[
    _LinearBackend | None,
    _option(
        "--linear-backend",
        help="native (C++, on a CPU) or torch. Default: auto, native where it can run the model.",
        panel=_DEVICE,
    ),
]
Quantization = Annotated[
    _Quantization | None,
    _option(
        "--quantization",
        help="int8 keeps the linear layers' weights in half the memory of bfloat16 and changes the "
        "logits a little; int8-dynamic rounds what they are multiplied by to 8 bits as well (to 16 "
        "otherwise, and on a processor without AVX512_VNNI): longer prompts are faster, and the "
        "logits change more. Native only. Default: none.",
        panel=_DEVICE,
    ),
]
TensorParallelSize = Annotated[
    int | None,
    _option("--tensor-parallel-size", "-tp", help="Devices per layer. Default: 1.", panel=_DEVICE),
]
EnforceEager = Annotated[
    bool | None,
    _option(
        "--enforce-eager",
        help="Never capture graphs of a step. Default: captured on a GPU.",
        panel=_DEVICE,
    ),
]
GPUMemoryUtilization = Annotated[
    float | None,
    _option(
        "--gpu-memory-utilization",
        help="On a GPU the share of its memory for weights, activations and KV cache; on a CPU the "
        "cap of the KV cache as a share of all memory. Default: 0.9 on a GPU.",
        panel=_KV,
    ),
]
KVRegime = Annotated[
    _KVRegime | None,
    _option(
        "--kv-regime",
        help="How a request's KV cache is laid out and read. Default: auto, chosen per request; "
        "virtual on a GPU, where both in one batch cost more launches.",
        panel=_KV,
    ),
]
KVCacheMemory = Annotated[
    str | None,
    _option(
        "--kv-cache-memory",
        help="The most that the KV cache may grow to, e.g. 512MiB or 4GiB. Default: 40 % of the "
        "memory that is free at start, on a GPU what --gpu-memory-utilization leaves.",
        panel=_KV,
        metavar="SIZE",
    ),
]
KVPageSize = Annotated[
    str | None,
    _option(
        "--kv-page-size",
        help="Bytes of a page. Default: planned from the model and the device.",
        panel=_KV,
        metavar="SIZE",
    ),
]
KVZeroPages = Annotated[
    ZeroPolicy | None,
    _option(
        "--kv-zero-pages",
        help="When pages are zeroed before they are used again. Default: tenant, for another one.",
        panel=_KV,
    ),
]
KVMapper = Annotated[
    _KVMapper | None,
    _option(
        "--kv-mapper",
        help="Map pages ahead in a thread while steps compute. Default: auto, on.",
        panel=_KV,
    ),
]
KVDriver = Annotated[
    str | None,
    _option(
        "--kv-driver",
        help="host, cuda, or the path of a page driver's shared library. Default: auto, the "
        "device's own.",
        panel=_KV,
    ),
]
KVLayersPerGroup = Annotated[
    int | None,
    _option(
        "--kv-layers-per-group",
        help="Layers whose keys and values lie side by side in a page: more of them make pages of "
        "fewer tokens. Default: planned for the device.",
        panel=_KV,
    ),
]
BlockSize = Annotated[
    int | None,
    _option("--block-size", help="Tokens of a KV block. Default: 16.", panel=_KV),
]
SwapSpace = Annotated[
    str | None,
    _option(
        "--swap-space",
        help="Host memory for preempted requests, e.g. 1GiB. Default: 0, none.",
        panel=_KV,
        metavar="SIZE",
    ),
]
EnablePrefixCaching = Annotated[
    bool | None,
    _option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the KV cache of finished requests for those with the same start. Default: on.",
        panel=_KV,
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    _option(
        "--max-num-seqs",
        help="Most sequences that run at once. Default: 64, on a GPU 256.",
        panel=_SCHEDULING,
    ),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    _option(
        "--max-num-batched-tokens",
        help="Most tokens computed in a step; longer prompts are cut into chunks. Default: 512, "
        "on a GPU 2048.",
        panel=_SCHEDULING,
    ),
]
Preemption = Annotated[
    _Preemption | None,
    _option(
        "--preemption",
        help="What becomes of a request that makes room for another. Default: auto.",
        panel=_SCHEDULING,
    ),
]
AsyncScheduling = Annotated[
    _AsyncScheduling | None,
    _option(
        "--async-scheduling",
        help="Launches a step while the one before it runs. Default: auto, on a GPU.",
        panel=_SCHEDULING,
    ),
]
SchedulingPolicy = Annotated[
    _SchedulingPolicy | None,
    _option(
        "--scheduling-policy",
        help="Who runs first: first come, or lowest priority number, which also takes the places "
        "of higher ones; v0 is the PagedAttention paper's, steps of prompts or of decodes, for "
        "comparison. Default: fcfs.",
        panel=_SCHEDULING,
    ),
]
PriorityMaxWait = Annotated[
    float | None,
    _option(
        "--priority-max-wait",
        help="With the policy priority: seconds after which a request that waits goes before all "
        "priorities, a quarter of the sequences at most. Default: 60.",
        panel=_SCHEDULING,
        metavar="SECONDS",
    ),
]
SchedulerDelayFactor = Annotated[
    float | None,
    _option(
        "--scheduler-delay-factor",
        help="With the policy v0: prompts wait for so many times as long as the last ones took, "
        "to be read together. Default: 0.",
        panel=_SCHEDULING,
    ),
]
FairSharing = Annotated[
    bool | None,
    _option(
        "--fair-sharing/--no-fair-sharing",
        help="Tenants (API keys) share places and tokens equally: who has had the fewest is next, "
        "and takes places from one with more. Default: no.",
        panel=_SCHEDULING,
    ),
]
RequestTimeout = Annotated[
    float | None,
    _option(
        "--request-timeout",
        help="Seconds in which a request must end, waiting included; then it fails. Default: none.",
        panel=_SCHEDULING,
        metavar="SECONDS",
    ),
]
RegimeProfile = Annotated[
    str | None,
    _option(
        "--regime-profile",
        help="What --kv-regime auto goes by, as `vmserve bench profile` wrote it. Default: "
        "measured at start.",
        panel=_KV,
        metavar="PATH",
    ),
]

TraceFile = Annotated[
    str | None,
    _option(
        "--trace-file",
        help="Write what each step did to this file, which opens in Perfetto. Default: none.",
        panel=_SCHEDULING,
        metavar="PATH",
    ),
]

#: Parameter name (that of the field of EngineConfig) and its annotation.
ENGINE_OPTIONS: Final[dict[str, Any]] = {
    "model": Model,
    "tokenizer": Tokenizer,
    "dtype": DType,
    "max_model_len": MaxModelLen,
    "max_logprobs": MaxLogprobs,
    "seed": Seed,
    "device": Device,
    "attention_backend": AttentionBackend,
    "linear_backend": LinearBackend,
    "quantization": Quantization,
    "tensor_parallel_size": TensorParallelSize,
    "enforce_eager": EnforceEager,
    "kv_regime": KVRegime,
    "kv_cache_memory": KVCacheMemory,
    "kv_page_size": KVPageSize,
    "kv_zero_pages": KVZeroPages,
    "kv_mapper": KVMapper,
    "kv_driver": KVDriver,
    "kv_layers_per_group": KVLayersPerGroup,
    "block_size": BlockSize,
    "swap_space": SwapSpace,
    "enable_prefix_caching": EnablePrefixCaching,
    "gpu_memory_utilization": GPUMemoryUtilization,
    "max_num_seqs": MaxNumSeqs,
    "max_num_batched_tokens": MaxNumBatchedTokens,
    "preemption": Preemption,
    "scheduling_policy": SchedulingPolicy,
    "async_scheduling": AsyncScheduling,
    "priority_max_wait": PriorityMaxWait,
    "scheduler_delay_factor": SchedulerDelayFactor,
    "fair_sharing": FairSharing,
    "request_timeout": RequestTimeout,
    "regime_profile": RegimeProfile,
    "trace_file": TraceFile,
}


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command`` a parameter for each engine option in place of its ``**`` parameter.

    The command is called with those that the user gave, and only those.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ENGINE_OPTIONS.items()
    ]

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        given = {
            name: value
            for name, value in kwargs.items()
            if name not in ENGINE_OPTIONS or value is not None
        }
        command(*args, **given)

    parameters = [*own, *added]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def server_url(text: str) -> str:
    """A server's address without the ``/v1`` that it may end with.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        usable = False
    if not usable:
        raise ConfigurationError(f"{text!r} is not a URL: write e.g. http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")
