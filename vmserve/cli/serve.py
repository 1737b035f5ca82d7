"""``vmserve serve``: options in, a running server out."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from vmserve.cli.options import with_engine_options
from vmserve.errors import ChatTemplateError, ConfigurationError, InvalidRequestError
from vmserve.imports import import_quickly
from vmserve.ipc.client import ProcessLLM, Supervision
from vmserve.logs import LOG_FORMATS, configure_logging
from vmserve.models.hub import EMBEDDED_NAME, is_embedded
from vmserve.server.auth import KeyRing, read_key_file
from vmserve.server.config import ServerConfig, is_loopback
from vmserve.server.limits import WRITE_STALL_SECONDS
from vmserve.server.listen import (
    ConnectionLimits,
    bind,
    check_certificate,
    raise_descriptor_limit,
    url_of,
)
from vmserve.sizes import format_size
from vmserve.tools.reasoning import REASONING_PARSERS
from vmserve.tools.registry import PARSERS

if TYPE_CHECKING:
    from vmserve.client.async_llm import AsyncLLM
    from vmserve.text.tokenizer import Tokenizer

__all__ = ["ServeCommand", "check_template", "serve_command"]

logger = logging.getLogger(__name__)


_API = "HTTP API"
_NETWORK = "Network"
_LIMITS = "Limits"
_PROCESSES = "Processes"


class ServeCommand(TyperCommand):
    """Lets ``--served-model-name`` take several names, up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_option(args, "--served-model-name"))


def repeat_option(args: list[str], name: str) -> list[str]:
    """``[name, a, b]`` as ``[name, a, name, b]``, wherever it stands in ``args``."""
    spread: list[str] = []
    rest = collections.deque(args)
    while rest and rest[0] != "--":
        arg = rest.popleft()
        spread.append(arg)
        num_values = 0
        while arg == name and rest and not rest[0].startswith("-"):
            # The first value follows the name that is there already.
            spread += [name] if num_values else []
            spread.append(rest.popleft())
            num_values += 1
    return [*spread, *rest]


@with_engine_options
def serve_command(
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", rich_help_panel=_NETWORK)
    ] = 8000,
    uds: Annotated[
        str | None,
        typer.Option(
            help="Path of a Unix socket to listen on instead.",
            rich_help_panel=_NETWORK,
            metavar="PATH",
        ),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            help="Prefix under which every route answers too, e.g. /llm.", rich_help_panel=_NETWORK
        ),
    ] = "",
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            "--allowed-origins",
            help="Origin (scheme://host[:port], or *) whose pages may call the server; repeatable. "
            "Default: with keys all, without the server's own and those of loopback.",
            rich_help_panel=_NETWORK,
            show_default=False,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name (or *) under which a server without keys on loopback answers, beside "
            "localhost and addresses; repeatable. Given, it holds for every server.",
            rich_help_panel=_NETWORK,
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests must carry; repeatable. Also VMSERVE_API_KEY.",
            rich_help_panel=_NETWORK,
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with lines name:key or name:sha256:DIGEST; after the name may stand "
            "sequences=N, requests=N, tokens-per-minute=N. Who has a key is a tenant: nothing of "
            "the KV cache is shared between tenants.",
            rich_help_panel=_NETWORK,
        ),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            help="Key of the routes that change how the server runs: the KV cache's memory, "
            "clearing the prefix cache. Default: VMSERVE_ADMIN_API_KEY, or no such routes.",
            rich_help_panel=_NETWORK,
            show_default=False,
        ),
    ] = None,
    share_prefix_cache_across_keys: Annotated[
        bool,
        typer.Option(
            "--share-prefix-cache-across-keys",
            help="Let all keys share cached prefixes, which then tell of each other's prompts.",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    ssl_certfile: Annotated[
        str | None,
        typer.Option(
            help="Certificate (PEM) to serve HTTPS with.", rich_help_panel=_NETWORK, metavar="PATH"
        ),
    ] = None,
    ssl_keyfile: Annotated[
        str | None,
        typer.Option(
            help="Private key (PEM) of the certificate.", rich_help_panel=_NETWORK, metavar="PATH"
        ),
    ] = None,
    open_status_routes: Annotated[
        bool,
        typer.Option(
            "--open-status-routes",
            help="/ping, /ready and /version need no key, as /health.",
            rich_help_panel=_NETWORK,
        ),
    ] = False,
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests have after SIGTERM or SIGINT.",
            rich_help_panel=_NETWORK,
        ),
    ] = 5.0,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Names that requests may give; replies lead with the first. Takes several, and "
            "is repeatable. Default: the model as given.",
            rich_help_panel=_API,
            metavar="NAME...",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a Jinja template to use instead of the model's.", rich_help_panel=_API
        ),
    ] = None,
    pin_prefix: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with a prefix whose KV cache is computed at start and kept: text, or "
            "(.json) messages for the chat template; repeatable.",
            rich_help_panel=_API,
        ),
    ] = None,
    return_tokens_as_token_ids: Annotated[
        bool,
        typer.Option(
            "--return-tokens-as-token-ids",
            help="Write tokens of log-probabilities as token_id:N.",
            rich_help_panel=_API,
        ),
    ] = False,
    enable_force_include_usage: Annotated[
        bool,
        typer.Option(
            "--enable-force-include-usage",
            help="Every stream reports usage, in each chunk and at its end.",
            rich_help_panel=_API,
        ),
    ] = False,
    enable_per_request_metrics: Annotated[
        bool,
        typer.Option(
            "--enable-per-request-metrics",
            help="Replies of one prompt and one choice carry their times.",
            rich_help_panel=_API,
        ),
    ] = False,
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        typer.Option(
            "--enable-tokenizer-info-endpoint",
            help="/tokenizer_info answers.",
            rich_help_panel=_API,
        ),
    ] = False,
    vllm_metrics: Annotated[
        bool,
        typer.Option(
            "--vllm-metrics/--no-vllm-metrics",
            help="Expose metrics under vllm: as well as vmserve:.",
            rich_help_panel=_API,
        ),
    ] = True,
    enable_server_load_tracking: Annotated[
        bool,
        typer.Option(
            "--enable-server-load-tracking",
            help="Accepted; /load always counts.",
            rich_help_panel=_API,
        ),
    ] = False,
    enable_prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-tokens-details",
            help="Accepted; usage always has them.",
            rich_help_panel=_API,
        ),
    ] = False,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="Accepted; it is always on.",
            rich_help_panel=_API,
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help=f"How the model writes calls of tools: {', '.join(sorted(PARSERS))}. Default: as "
            "its chat template tells. Without effect where that shows no tools.",
            rich_help_panel=_API,
            metavar="NAME",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="How the model marks its thoughts, which answers then have as reasoning_content: "
            f"{', '.join(REASONING_PARSERS)}. auto: as its chat template tells.",
            rich_help_panel=_API,
            metavar="NAME",
        ),
    ] = "auto",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenTelemetry collector (OTLP over HTTP), which gets a span per "
            "request; needs vmserve[otel].",
            rich_help_panel=_PROCESSES,
            metavar="URL",
        ),
    ] = None,
    max_queued_requests: Annotated[
        int,
        typer.Option(
            help="Requests that may wait before others get a 429.", rich_help_panel=_LIMITS
        ),
    ] = 1024,
    max_queued_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens that waiting requests may ask for before others get a 429.",
            rich_help_panel=_LIMITS,
        ),
    ] = 8_000_000,
    max_key_sequences: Annotated[
        int | None,
        typer.Option(
            help="Sequences (choices of all prompts) of one key that run at once; its further "
            "requests wait. Default: no limit.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    max_key_requests: Annotated[
        int | None,
        typer.Option(
            help="Prompts of one key that wait or run before others of it get a 429. Default: no "
            "limit.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    key_tokens_per_minute: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompts and answers that one key may use in a minute before it gets a "
            "429. Default: no limit.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            help="Connections open at once; further ones wait until one ends. Default: as many as "
            "the limit of open files leaves room for, 16384 at most.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            help="Connections open at once from one address, but loopback; further ones get 429. "
            "Default: a quarter of --max-connections.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    in_process_engine: Annotated[
        bool,
        typer.Option(
            "--in-process-engine",
            help="Run the engine in the server's own process, to debug it; it is not supervised.",
            rich_help_panel=_PROCESSES,
        ),
    ] = False,
    engine_restarts: Annotated[
        int,
        typer.Option(
            help="How often within an hour an engine that has died is started again. Requests that "
            "it had fail.",
            rich_help_panel=_PROCESSES,
        ),
    ] = 0,
    engine_hang_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without a word after which an engine hangs, and is killed: no step may "
            "take longer.",
            rich_help_panel=_PROCESSES,
        ),
    ] = 300.0,
    engine_death_linger: Annotated[
        float,
        typer.Option(
            help="Seconds that a server without an engine answers 503 before it ends.",
            rich_help_panel=_PROCESSES,
        ),
    ] = 10.0,
    log_format: Annotated[
        str, typer.Option(help="text, or json: an object per line.", rich_help_panel=_PROCESSES)
    ] = "text",
    write_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a client that does not read is cut off.",
            rich_help_panel=_LIMITS,
        ),
    ] = WRITE_STALL_SECONDS,
    **engine_options: Any,
) -> None:
    """Serve a model over HTTP, with the OpenAI API."""
    if log_format not in LOG_FORMATS:
        raise ConfigurationError(f"log_format: {log_format!r} is not one of text, json")
    configure_logging(logging.INFO, log_format)
    options = dict(engine_options)
    options["model"] = _one_model(model_argument, options.get("model"))
    config = ServerConfig(
        served_model_names=tuple(served_model_name or [options["model"] or EMBEDDED_NAME]),
        host=host,
        port=port,
        uds=uds,
        api_keys=_api_keys("api_key", api_key or []),
        admin_api_key=_admin_key(admin_api_key),
        named_keys=() if api_key_file is None else read_key_file(api_key_file),
        share_prefix_cache_across_keys=share_prefix_cache_across_keys,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        root_path=root_path.rstrip("/"),
        open_status_routes=open_status_routes,
        allowed_origins=tuple(each.lower().rstrip("/") for each in allowed_origin or ()),
        allowed_hosts=tuple(each.lower() for each in allowed_host or ()),
        chat_template=_read_template(chat_template),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        force_include_usage=enable_force_include_usage,
        per_request_metrics=enable_per_request_metrics,
        vllm_metrics=vllm_metrics,
        shutdown_timeout=shutdown_timeout,
        engine_death_linger=engine_death_linger,
        write_timeout=write_timeout,
        otlp_traces_endpoint=otlp_traces_endpoint,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        max_key_sequences=max_key_sequences,
        max_key_requests=max_key_requests,
        key_tokens_per_minute=key_tokens_per_minute,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
    )
    supervision = Supervision(
        restarts=engine_restarts, hang_timeout=engine_hang_timeout, log_format=log_format
    )
    _run(
        config,
        options,
        pin_prefix or [],
        show_tokenizer=enable_tokenizer_info_endpoint,
        supervision=None if in_process_engine else supervision,
    )


def _run(
    config: ServerConfig,
    engine_options: dict[str, Any],
    pinned: list[Path],
    *,
    show_tokenizer: bool,
    supervision: Supervision | None,
) -> None:
    """``supervision`` None: the engine runs in this process.

    Raises :class:`~vmserve.errors.VmserveError` for what keeps the server from starting, and for
    an engine that has died.
    """
    check_certificate(config)
    raise_descriptor_limit()
    ConnectionLimits.of(config)
    texts = {path: _read_text(path, "pin_prefix") for path in pinned}
    if config.otlp_traces_endpoint is not None:
        from vmserve.server.tracing import check_tracing  # noqa: PLC0415 - seldom asked for

        check_tracing(config.otlp_traces_endpoint)
    with _stoppable_start(), bind(config) as listener:
        if config.uds is None and not (config.keys or is_loopback(config.host)):
            logger.warning(
                "listening on %s without an API key: whoever reaches it can use it (--api-key)",
                config.host,
            )
        logger.info(
            "loading %s",
            "the embedded model"
            if is_embedded(engine_options["model"])
            else engine_options["model"],
        )
        began = time.monotonic()
        engine = _start_engine(engine_options, supervision)
        resolved = engine.resolved
        logger.info(
            "loaded in %.1f s; reserved: KV cache of up to %s, context of %d tokens, "
            "%d sequences at once",
            time.monotonic() - began,
            format_size(resolved.kv_limit_bytes),
            resolved.max_model_len,
            resolved.max_num_seqs,
        )
        try:
            check_template(engine.tokenizer, config.chat_template)
            prefixes = {
                path: _prefix_ids(path, text, engine, config.chat_template)
                for path, text in texts.items()
            }
            if show_tokenizer:
                from vmserve.server.tokenization import tokenizer_info  # noqa: PLC0415 - as below

                info = tokenizer_info(engine.tokenizer.hf)
                config = dataclasses.replace(config, tokenizer_info=info)
        except BaseException:
            asyncio.run(engine.shutdown())
            raise
        # What is loaded stays: left to the collector, it would be walked through again and
        # again while serving, and once more at exit.
        gc.collect()
        gc.freeze()
        asyncio.run(_serve(engine, config, listener, prefixes))
    logger.info("stopped")


def _start_engine(
    options: dict[str, Any], supervision: Supervision | None
) -> AsyncLLM | ProcessLLM:
    if supervision is None:
        # Only now: the server's own process has no use for an engine.
        from vmserve.client.async_llm import AsyncLLM  # noqa: PLC0415

        return AsyncLLM(**options, progress=_report_phases())
    return ProcessLLM(
        **options,
        progress=_report_phases(),
        supervision=supervision,
        meanwhile=_import_server,
    )


def _import_server() -> None:
    """What serves is imported while the engine's process starts."""
    import_quickly("vmserve.server.run")


async def _serve(
    engine: AsyncLLM | ProcessLLM,
    config: ServerConfig,
    listener: socket.socket,
    prefixes: dict[Path, list[int]],
) -> None:
    from vmserve.server.app import create_app  # noqa: PLC0415 - see _import_server
    from vmserve.server.run import serve, stop_on_signals  # noqa: PLC0415

    stop = asyncio.Event()
    names = ", ".join(config.served_model_names)
    url = url_of(listener, tls=config.ssl_certfile is not None)
    page = "in a browser: figures and a chat; " if config.uds is None else ""
    app = create_app(engine, config)
    with stop_on_signals(stop):
        try:
            await _pin(engine, app.state.context.keys, prefixes)
        except BaseException:
            await engine.shutdown()
            raise
        await serve(
            engine,
            config,
            listener,
            stop,
            lambda: logger.info("ready: serving %s at %s (%sCtrl-C stops)", names, url, page),
            app=app,
        )


async def _pin(
    engine: AsyncLLM | ProcessLLM, keys: KeyRing, prefixes: dict[Path, list[int]]
) -> None:
    """Pin each prefix once for everybody who shares no other's."""
    callers = {caller.isolation: caller for caller in keys.callers}
    for path, token_ids in prefixes.items():
        for caller in callers.values():
            pin = await engine.pin_prefix(
                token_ids, cache_salt=caller.cache_salt(""), isolation=caller.isolation
            )
            whom = f" for {caller.isolation}" if caller.isolation else ""
            logger.info(
                "pinned %d of the %d tokens of %s%s", pin.num_tokens, len(token_ids), path, whom
            )


def check_template(tokenizer: Tokenizer, chat_template: str | None) -> None:
    """Render the shortest chat there is, so that a template that cannot be used is known now.

    Raises :class:`~vmserve.errors.ChatTemplateError` for a text of ours that is no template; of
    a model's own one the log warns, as completions work without.
    """
    if not (chat_template or tokenizer.chat_template_text):
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], chat_template=chat_template
        )
    except ChatTemplateError as error:
        if chat_template is not None:
            raise
        logger.warning("chats will be refused with 400: %s", error)
    except InvalidRequestError as error:  # it may have reasons to refuse this message
        logger.warning("a chat of one user's message will be refused: %s", error)


def _prefix_ids(
    path: Path, text: str, engine: AsyncLLM | ProcessLLM, chat_template: str | None
) -> list[int]:
    """The tokens of a prefix: a text, or messages (JSON) as the chat template writes them."""
    if path.suffix != ".json":
        return engine.tokenizer.encode(text)
    try:
        messages = json.loads(text)
        _, token_ids = engine.tokenizer.apply_chat_template(
            messages, chat_template=chat_template, add_generation_prompt=False
        )
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"pin_prefix: {path} is not a list of messages: {error}"
        ) from error
    return token_ids


@contextlib.contextmanager
def _stoppable_start() -> Iterator[None]:
    """A signal while the model is loading ends the process without a traceback."""

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
    """A progress function that logs each phase once, and how long the one before it took."""
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


def _one_model(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise ConfigurationError(f"two models are given, {argument} and --model {option}")
    return argument if argument is not None else option


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


def _read_template(path: Path | None) -> str | None:
    return None if path is None else _read_text(path, "chat_template")


def _read_text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{option}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{option}: {path} is not UTF-8 text") from error
