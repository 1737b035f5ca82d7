"""``vmserve serve``: options in, a running server out."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vmserve.cli.engines import EngineChoice
from vmserve.cli.options import ENGINE_OPTIONS, parameters_of, with_parameters
from vmserve.client.client import Client
from vmserve.client.transports.supervised import Supervision
from vmserve.errors import ConfigurationError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.numbers.sizes import format_size
from vmserve.options import Option, check_options, declared_options, read_text, rules
from vmserve.server.auth import KeyRing, read_key_file
from vmserve.server.config import API, LIMITS, NETWORK, PROCESSES, ServerConfig
from vmserve.server.models.prefixes import Prefixes, read_prefixes
from vmserve.server.net.listen import (
    ConnectionLimits,
    bind,
    check_certificate,
    raise_descriptor_limit,
    url_of,
)
from vmserve.system.hosts import is_loopback
from vmserve.system.imports import import_quickly
from vmserve.system.logs import LOG_FORMATS, configure_logging

if TYPE_CHECKING:
    from vmserve.client.lending import KVPool
    from vmserve.server.models.registry import Models
    from vmserve.server.models.served import ServedModel
    from vmserve.server.models.specs import ModelSpec

__all__ = ["SERVE_OPTIONS", "ServeCommand", "serve_command", "server_config"]

logger = logging.getLogger(__name__)

_GROUPS = (NETWORK, API, LIMITS, PROCESSES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of the command that neither the HTTP server nor the engine has.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    models_config: Annotated[
        Path | None,
        Option(
            "TOML file of models: tables [models.NAME] with model, weight, kv_floor, kv_cap, "
            "preload, chat_template, tool_call_parser, reasoning_parser, pin_prefix and any option "
            "of the engine.",
            API,
            metavar="FILE",
        ),
    ] = None
    pin_prefixes: Annotated[
        tuple[Path, ...],
        Option(
            "File with a prefix whose KV cache is computed at start and kept: text, or (.json) "
            "messages for the chat template; repeatable.",
            API,
            flags=("--pin-prefix",),
        ),
    ] = ()
    enable_tokenizer_info_endpoint: Annotated[bool, Option("Answer /tokenizer_info.", API)] = False
    enable_server_load_tracking: Annotated[
        bool, Option("Accepted for compatibility; /load always counts.", API)
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Option("Accepted for compatibility; usage always has them.", API)
    ] = False
    enable_auto_tool_choice: Annotated[
        bool, Option("Accepted for compatibility; always on.", API)
    ] = False
    in_process_engine: Annotated[
        bool,
        Option(
            "Run the engine in the server's own process, unsupervised, to debug it.",
            PROCESSES,
        ),
    ] = False
    engine_restarts: Annotated[
        int,
        Option(
            "How often within an hour a dead engine is restarted. Its requests fail.",
            PROCESSES,
        ),
    ] = Supervision.restarts
    engine_hang_timeout: Annotated[
        float,
        Option(
            "Seconds of silence after which the engine counts as hung and is killed; no step "
            "may take longer.",
            PROCESSES,
        ),
    ] = Supervision.hang_timeout
    log_format: Annotated[
        str,
        Option(
            "Format of the log: text, or json with an object per line.",
            PROCESSES,
            choices=LOG_FORMATS,
        ),
    ] = Supervision.log_format

    def __post_init__(self) -> None:
        check_options(self)


#: What several models have instead of an option of one.
_OWN = declared_options(ServeOptions)
_ENGINES = declared_options(EngineChoice)
_SERVER = declared_options(ServerConfig)


class ServeCommand(TyperCommand):
    """Accepts several names after ``--served-model-name``, up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_option(args, "--served-model-name"))


def repeat_option(args: list[str], name: str) -> list[str]:
    """Rewrite each ``name a b`` in ``args`` as ``name a name b``."""
    spread: list[str] = []
    rest = collections.deque(args)
    while rest and rest[0] != "--":
        arg = rest.popleft()
        spread.append(arg)
        num_values = 0
        while arg == name and rest and not rest[0].startswith("-"):
            # The name before the first value is there already.
            spread += [name] if num_values else []
            spread.append(rest.popleft())
            num_values += 1
    return [*spread, *rest]


#: The engine's option, which a server takes several times.
_MODELS = dataclasses.replace(
    ENGINE_OPTIONS["model"],
    type=tuple[str, ...],
    option=dataclasses.replace(
        ENGINE_OPTIONS["model"].option,
        help=f"{ENGINE_OPTIONS['model'].option.help} NAME=PATH gives it a name. Several models, "
        "one option each, share --kv-cache-memory.",
        metavar="[NAME=]PATH",
    ),
)
#: The options of ``vmserve serve`` without those of the engine, by group.
SERVE_OPTIONS = sorted(
    [*_SERVER.values(), *_OWN.values(), *_ENGINES.values()],
    key=lambda option: _GROUPS.index(option.option.group),
)


@with_parameters(
    [
        *parameters_of(SERVE_OPTIONS, keep_defaults=True),
        *parameters_of({**ENGINE_OPTIONS, "model": _MODELS}.values()),
    ]
)
def serve_command(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ] = None,
    **options: Any,
) -> None:
    """Serve models over HTTP, with the OpenAI API."""
    own = ServeOptions(**{name: options.pop(name) for name in _OWN if name in options})
    engines = EngineChoice(**{name: options.pop(name) for name in _ENGINES if name in options})
    configure_logging(logging.INFO, own.log_format)
    server = {name: options.pop(name) for name in _SERVER if name in options}
    if _has_several_keys(server) and not engines.engines:
        options.setdefault("fair_sharing", True)
    models = [
        _named_model(each) for each in _given_models(model_argument, options.pop("model", ()))
    ]
    several: Sequence[ModelSpec] = ()
    if len(models) > 1 or own.models_config is not None:
        from vmserve.server.models.specs import model_specs  # noqa: PLC0415 - most have one

        several = model_specs(models, own.models_config, options)
        name = several[0].name
    else:
        name, options["model"] = models[0] if models else (EMBEDDED_NAME, None)
    supervision = Supervision(
        restarts=own.engine_restarts,
        hang_timeout=own.engine_hang_timeout,
        log_format=own.log_format,
    )
    _check_together(own, engines, server, bool(several))
    engines.check(options)
    server["tenant_secret"] = _tenant_secret([options, *(dict(spec.engine) for spec in several)])
    _run(
        server_config(name, server),
        options,
        own.pin_prefixes,
        show_tokenizer=own.enable_tokenizer_info_endpoint,
        supervision=None if own.in_process_engine else supervision,
        several=several,
        engines=engines,
    )


def _has_several_keys(server: Mapping[str, Any]) -> bool:
    """Whether there may be several tenants: a file of keys is for that."""
    return len(_api_keys("api_key", server.get("api_keys", []))) > 1 or "named_keys" in server


def _tenant_secret(engines: Iterable[dict[str, Any]]) -> bytes:
    """What salts of tenants are derived from if prefixes outlive the process; else empty."""
    directory = next(filter(None, (options.get("kv_persist") for options in engines)), None)
    if directory is None:
        return b""
    from vmserve.memory.persist import directory_secret  # noqa: PLC0415 - needs the core

    return directory_secret(directory)


def _check_together(
    own: ServeOptions, engines: EngineChoice, server: dict[str, Any], are_several: bool
) -> None:
    """Refuse options that do not go together."""
    rules.check(
        {
            **engines.facts,
            "are_several": are_several,
            "engine_restarts": own.engine_restarts != 0,
            "idle_unload": "idle_unload" in server,
            "in_process_engine": own.in_process_engine,
            "models_config": own.models_config is not None,
            "pin_prefix": bool(own.pin_prefixes),
            "served_model_name": bool(server.get("served_model_names")),
        }
    )


def server_config(model: str, given: dict[str, Any]) -> ServerConfig:
    """Make the server's configuration of options as typed: read files, normalise texts."""
    key_file, template = given.pop("named_keys", None), given.pop("chat_template", None)
    names = given.pop("served_model_names", ()) or (model,)
    return ServerConfig(
        **{
            **given,
            "served_model_names": tuple(names),
            "api_keys": _api_keys("api_key", given.get("api_keys", [])),
            "admin_api_key": _admin_key(given.get("admin_api_key")),
            "named_keys": () if key_file is None else read_key_file(key_file),
            "root_path": given.get("root_path", "").rstrip("/"),
            "allowed_origins": tuple(
                each.lower().rstrip("/") for each in given.get("allowed_origins", ())
            ),
            "allowed_hosts": tuple(each.lower() for each in given.get("allowed_hosts", ())),
            "chat_template": None if template is None else read_text(template, "chat_template"),
        }
    )


def _run(
    config: ServerConfig,
    engine_options: dict[str, Any],
    pinned: Iterable[Path],
    *,
    show_tokenizer: bool,
    supervision: Supervision | None,
    several: Sequence[ModelSpec],
    engines: EngineChoice,
) -> None:
    """Load the model and serve it until stopped. Without ``supervision`` the engine runs here.

    ``several``: models to serve instead, with ``engine_options`` unless they say otherwise.

    Raises :class:`~vmserve.errors.VmserveError` if the server cannot start, and if the engine died.
    """
    check_certificate(config)
    raise_descriptor_limit()
    ConnectionLimits.of(config)
    keys = config.key_ring()
    prefixes = Prefixes(read_prefixes(pinned), keys)
    if config.otlp_traces_endpoint is not None:
        from vmserve.server.observe.tracing import check_tracing  # noqa: PLC0415 - seldom asked for

        check_tracing(config.otlp_traces_endpoint)
    with _stoppable_start(), bind(config) as listener:
        if config.uds is None and not (config.keys or is_loopback(config.host)):
            logger.warning(
                "listening on %s without an API key: whoever reaches it can use it (--api-key)",
                config.host,
            )
        if several:
            assert supervision is not None
            make = _several_models(
                several, config, keys, engine_options, supervision, show_tokenizer
            )
        else:
            config, make = _one_model(
                config, keys, engine_options, prefixes, show_tokenizer, supervision, engines
            )
        asyncio.run(_serve(make, config, keys, listener))
    logger.info("stopped")


def _several_models(
    specs: Sequence[ModelSpec],
    config: ServerConfig,
    keys: KeyRing,
    shared: dict[str, Any],
    supervision: Supervision,
    show_tokenizer: bool,
) -> Callable[[], Awaitable[Models]]:
    """Load models on the event loop."""
    from vmserve.server.models.loading import ModelLoader  # noqa: PLC0415 - see _import_server

    loader = ModelLoader(
        config, keys, shared, supervision, show_tokenizer=show_tokenizer, specs=specs
    )
    return loader.load_all


def _one_model(
    config: ServerConfig,
    keys: KeyRing,
    engine_options: dict[str, Any],
    prefixes: Prefixes,
    show_tokenizer: bool,
    supervision: Supervision | None,
    engines: EngineChoice,
) -> tuple[ServerConfig, Callable[[], Awaitable[Models]]]:
    """Load one model now, and pin its prefixes on the event loop. Others may join it."""
    from vmserve.server.models.tokenizer_info import with_tokenizer  # noqa: PLC0415 - see _import_server

    began = time.monotonic()
    engine, name = _start_engine(engine_options, supervision, engines)
    if name is not None and config.served_model_names == (EMBEDDED_NAME,):
        config = dataclasses.replace(config, served_model_names=(name,))
    resolved = engine.resolved
    logger.info(
        "loaded in %.1f s; reserved: KV cache of up to %s, context of %d tokens, "
        "%d sequences at once",
        time.monotonic() - began,
        format_size(resolved.kv_limit_bytes),
        resolved.max_model_len,
        resolved.max_num_seqs,
    )
    base = config
    try:
        config = with_tokenizer(config, engine.tokenizer, shows_info=show_tokenizer)
        tokens = prefixes.tokens(engine.tokenizer, config.chat_template)
    except BaseException:
        asyncio.run(engine.shutdown())
        raise

    async def share(served: ServedModel) -> tuple[Callable[..., ServedModel], KVPool]:
        from vmserve.server.models.loading import (  # noqa: PLC0415 - most servers have one model
            ModelLoader,
            share_memory,
        )

        assert supervision is not None
        pool = await share_memory(served)
        loader = ModelLoader(
            base, keys, engine_options, supervision, show_tokenizer=show_tokenizer, pool=pool
        )
        return loader.make, pool

    may_share = share if supervision is not None and engines.is_one_process else None

    async def make() -> Models:
        from vmserve.server.models.registry import Models  # noqa: PLC0415 - see _import_server
        from vmserve.server.models.served import ServedModel  # noqa: PLC0415 - as above

        try:
            await prefixes.pin(engine, tokens)
        except BaseException:
            await engine.shutdown()
            raise
        return Models([ServedModel(config, engine)], share=may_share)

    return config, make


def _start_engine(
    options: dict[str, Any], supervision: Supervision | None, engines: EngineChoice
) -> tuple[Client, str | None]:
    """As :meth:`EngineChoice.start`. Without ``supervision`` the engine runs here."""
    if supervision is None:
        # Imported here since the server's own process usually has no engine.
        from vmserve.client.async_llm import AsyncLLM  # noqa: PLC0415

        return AsyncLLM(**options, progress=_report_phases()), None
    return engines.start(
        options, supervision=supervision, progress=_report_phases(), meanwhile=_import_server
    )


def _import_server() -> None:
    """Import the server's modules while the engine's process starts."""
    import_quickly("vmserve.server.run")


async def _serve(
    make: Callable[[], Awaitable[Models]],
    config: ServerConfig,
    keys: KeyRing,
    listener: socket.socket,
) -> None:
    from vmserve.server.app import create_app  # noqa: PLC0415 - see _import_server
    from vmserve.server.run import serve, stop_on_signals  # noqa: PLC0415 - as above

    models = await make()
    # The garbage collector need not visit loaded objects, which stay until the end.
    gc.collect()
    gc.freeze()
    stop = asyncio.Event()
    names = ", ".join(models.names)
    url = url_of(listener, tls=config.ssl_certfile is not None)
    page = "in a browser: figures and a chat; " if config.uds is None else ""
    with stop_on_signals(stop):
        await serve(
            create_app(models, config, keys),
            listener,
            stop,
            lambda: logger.info("ready: serving %s at %s (%sCtrl-C stops)", names, url, page),
        )


@contextlib.contextmanager
def _stoppable_start() -> Iterator[None]:
    """End the process without a traceback on a signal while the model loads."""

    def leave(number: int, frame: FrameType | None) -> None:
        logger.info("stopped while starting (%s)", signal.Signals(number).name)
        raise SystemExit(0)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _report_phases() -> Callable[[str, int, int], None]:
    """Return a progress function that logs each phase once, and how long the last one took."""
    began: dict[str, float] = {}

    def report(phase: str, done: int, total: int) -> None:
        if phase in began:
            return
        now = time.monotonic()
        if began:
            last, since = list(began.items())[-1]
            logger.info("%s took %.1f s", last, now - since)
        began[phase] = now
        logger.info("%s", phase)

    return report


def _given_models(argument: str | None, options: Sequence[str]) -> list[str]:
    if argument is None:
        return list(options)
    for option in options:
        if option != argument:
            raise ConfigurationError(
                f"two models are given, {argument} and --model {option}: to serve both, give each "
                "with --model"
            )
    return [argument]


def _named_model(text: str) -> tuple[str, str]:
    """Read ``NAME=MODEL``, or a model that is its own name; returns name and model.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    name, equals, model = text.partition("=")
    if not equals or "/" in name or Path(text).exists():
        return text, text
    if not (name and model):
        raise ConfigurationError(f"model: {text!r} is not NAME=PATH with a name and a path")
    return name, model


def _admin_key(given: str | None) -> str | None:
    keys = _api_keys("admin_api_key", [] if given is None else [given])
    return keys[0] if keys else None


def _api_keys(option: str, given: list[str]) -> tuple[str, ...]:
    variable = os.environ.get(f"VMSERVE_{option.upper()}")
    keys = tuple(given or ([variable] if variable else []))
    if not all(key.isprintable() and key == key.strip() for key in keys):
        raise ConfigurationError(
            f"{option}: no HTTP header carries a key with spaces around it or with characters that "
            "cannot be printed: choose another"
        )
    return keys
