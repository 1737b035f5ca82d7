"""Options of the HTTP server, as opposed to those of the engine behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from vmserve.errors import ConfigurationError
from vmserve.options import Bounds, Option, check_options, rules
from vmserve.server.auth import ApiKey, KeyLimits, KeyRing
from vmserve.server.limits import WRITE_STALL_SECONDS
from vmserve.tools.reasoning import REASONING_PARSERS
from vmserve.tools.registry import PARSERS, check_parser

__all__ = ["ServerConfig"]

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/*]+")
_HOST: Final = re.compile(r"\*|[^\sA-Z/:*\[\]]+")


#: Groups of the server's options.
NETWORK: Final = "Network"
API: Final = "HTTP API"
LIMITS: Final = "Limits"
PROCESSES: Final = "Processes"

_SECONDS: Final = Bounds(0, 86_400)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server; names are those of the command line.

    ``tokenizer_info``: the reply of ``/tokenizer_info``, if there is one. ``allowed_origins`` and
    ``allowed_hosts`` are in lower case; :class:`~vmserve.server.access.origins.OriginPolicy` fills
    them in if they are empty, :class:`~vmserve.server.net.listen.ConnectionLimits` the limits of
    connections that are None.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    host: Annotated[str, Option("Address to listen on.", NETWORK)] = "127.0.0.1"
    port: Annotated[
        int,
        Option("Port to listen on; 0 picks a free one.", NETWORK, Bounds(0, 65535), unit=""),
    ] = 8000
    uds: Annotated[
        str | None,
        Option("Path of a Unix socket to listen on instead.", NETWORK, metavar="PATH"),
    ] = None
    root_path: Annotated[
        str, Option("Prefix under which every route answers as well, e.g. /llm.", NETWORK)
    ] = ""
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            "Origin (scheme://host[:port], or *) whose pages may call the server; repeatable.",
            NETWORK,
            default="all with keys; without keys the server's own and those on loopback",
            flags=("--allowed-origin", "--allowed-origins"),
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "Host name (or *) that a server without keys on loopback answers to, besides "
            "localhost and addresses; repeatable. If given, it applies to every server.",
            NETWORK,
            flags=("--allowed-host",),
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            "Key that requests must carry; repeatable. Also VMSERVE_API_KEY.",
            NETWORK,
            flags=("--api-key",),
        ),
    ] = ()
    named_keys: Annotated[
        tuple[ApiKey, ...],
        Option(
            "File with lines name:key or name:sha256:DIGEST; sequences=N, requests=N and "
            "tokens-per-minute=N may follow the name. Each name is a tenant, and tenants "
            "share nothing of the KV cache.",
            NETWORK,
            flags=("--api-key-file",),
            parse_as=Path,
        ),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        Option(
            "Key of the routes that change how the server runs: the KV cache's memory, clearing "
            "the prefix cache.",
            NETWORK,
            default="VMSERVE_ADMIN_API_KEY, or no such routes",
        ),
    ] = None
    share_prefix_cache_across_keys: Annotated[
        bool,
        Option(
            "Share cached prefixes between all keys; response times then tell of other keys' "
            "prompts.",
            NETWORK,
        ),
    ] = False
    ssl_certfile: Annotated[
        str | None, Option("Certificate (PEM) to serve HTTPS with.", NETWORK, metavar="PATH")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Option("Private key (PEM) of the certificate.", NETWORK, metavar="PATH")
    ] = None
    open_status_routes: Annotated[
        bool,
        Option("Answer /ping, /ready and /version without a key, like /health and /live.", NETWORK),
    ] = False
    shutdown_timeout: Annotated[
        float,
        Option(
            "Seconds that running requests get after SIGTERM or SIGINT.",
            NETWORK,
            _SECONDS,
            unit="seconds",
        ),
    ] = 5.0
    served_model_names: Annotated[
        tuple[str, ...],
        Option(
            "Names that requests may give; replies use the first. Takes several, and is "
            "repeatable.",
            API,
            default="the model as given",
            flags=("--served-model-name",),
            metavar="NAME...",
        ),
    ]
    chat_template: Annotated[
        str | None,
        Option(
            "File with a Jinja template to use instead of the model's.",
            API,
            parse_as=Path,
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool, Option("Write tokens of log-probabilities as token_id:N.", API)
    ] = False
    force_include_usage: Annotated[
        bool,
        Option(
            "Report usage in each chunk and at the end of every stream.",
            API,
            flags=("--enable-force-include-usage",),
        ),
    ] = False
    per_request_metrics: Annotated[
        bool,
        Option(
            "Add timings to replies to one prompt with one choice.",
            API,
            flags=("--enable-per-request-metrics",),
        ),
    ] = False
    tokenizer_info: Mapping[str, Any] | None = None
    vllm_metrics: Annotated[
        bool, Option("Expose metrics under vllm: as well as vmserve:.", API, negatable=True)
    ] = True
    tool_call_parser: Annotated[
        str | None,
        Option(
            f"How the model writes tool calls: {', '.join(sorted(PARSERS))}. No effect if its chat "
            "template shows no tools.",
            API,
            default="as the chat template says",
            metavar="NAME",
        ),
    ] = None
    reasoning_parser: Annotated[
        str,
        Option(
            "How the model marks its reasoning, which replies return as reasoning_content: "
            f"{', '.join(REASONING_PARSERS)}. auto: as the chat template says.",
            API,
            metavar="NAME",
        ),
    ] = "auto"
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span per request;"
            " needs vmserve[otel].",
            PROCESSES,
            metavar="URL",
        ),
    ] = None
    max_queued_requests: Annotated[
        int | None,
        Option(
            "Most requests that may wait; further ones get a 429. So many, and as many as all "
            "engines run at once, may wait to be read.",
            LIMITS,
            Bounds(1),
            default="1024, or twice as many as all engines run at once (--max-num-seqs)",
        ),
    ] = None
    max_queued_tokens: Annotated[
        int | None,
        Option(
            "Most tokens that waiting requests may ask for; further requests get a 429.",
            LIMITS,
            Bounds(1),
            default="8000000, and more as the default of --max-queued-requests is above 1024",
        ),
    ] = None
    max_key_sequences: Annotated[
        int | None,
        Option(
            "Most sequences (choices of all prompts) of one key that run at once; its other "
            "requests wait.",
            LIMITS,
            Bounds(1),
            default="no limit",
        ),
    ] = None
    max_key_requests: Annotated[
        int | None,
        Option(
            "Most prompts of one key that wait or run; further ones get a 429.",
            LIMITS,
            Bounds(1),
            default="no limit",
        ),
    ] = None
    key_tokens_per_minute: Annotated[
        int | None,
        Option(
            "Most tokens of prompts and answers that one key may use per minute; then it gets"
            " a 429.",
            LIMITS,
            Bounds(1),
            default="no limit",
        ),
    ] = None
    max_connections: Annotated[
        int | None,
        Option(
            "Most open connections; further ones wait until one closes.",
            LIMITS,
            Bounds(1),
            default="as many as the limit of open files leaves room for, 16384 at most",
        ),
    ] = None
    max_connections_per_address: Annotated[
        int | None,
        Option(
            "Most open connections from one address other than loopback; further ones get a 429.",
            LIMITS,
            Bounds(1),
            default="a quarter of --max-connections",
        ),
    ] = None
    engine_death_linger: Annotated[
        float,
        Option(
            "Seconds for which a server whose engine died answers 503 before it exits.",
            PROCESSES,
            _SECONDS,
            unit="seconds",
        ),
    ] = 10.0
    idle_unload: Annotated[
        float | None,
        Option(
            "Seconds without a request after which a model's engine is ended, and its memory is "
            "given back. The next request starts it again.",
            PROCESSES,
            Bounds(0, 86_400, open_low=True),
            default="never",
            metavar="SECONDS",
            unit="seconds",
        ),
    ] = None
    write_timeout: Annotated[
        float,
        Option(
            "Seconds after which a client that does not read is disconnected.",
            LIMITS,
            _SECONDS,
            unit="seconds",
        ),
    ] = WRITE_STALL_SECONDS
    #: Secret from which tenants' salts are derived; empty: made anew by each process.
    tenant_secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.served_model_names or not all(self.served_model_names):
            raise ConfigurationError(
                "served_model_name: give at least one name, none of them empty"
            )
        for name, keys in (("api_key", self.api_keys), ("admin_api_key", (self.admin_api_key,))):
            if "" in keys:
                raise ConfigurationError(f"{name}: an empty key would protect nothing; give a text")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigurationError(
                    f"allowed_origin: {origin!r} is not scheme://host[:port] in lower case and "
                    "without a path, as browsers send it, nor * for all"
                )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigurationError(
                    f"allowed_host: {host!r} is not a host name in lower case without a port, "
                    "nor * for all"
                )
        check_parser(self.tool_call_parser)
        if self.reasoning_parser not in REASONING_PARSERS:
            raise ConfigurationError(
                f"reasoning_parser: there is no {self.reasoning_parser!r}; there are "
                f"{', '.join(REASONING_PARSERS)}"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(
                f"root_path: {self.root_path!r} must start with a slash and not end with one"
            )
        rules.check({"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile})

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys; those without a name are named key-0, key-1, ..."""
        plain = (ApiKey.of(f"key-{i}", key) for i, key in enumerate(self.api_keys))
        return (*plain, *self.named_keys)

    def key_ring(self) -> KeyRing:
        """A ring of these keys; another one has other salts."""
        return KeyRing(
            self.keys,
            share_prefix_cache=self.share_prefix_cache_across_keys,
            secret=self.tenant_secret,
        )

    @property
    def key_limits(self) -> KeyLimits:
        """Default limits of each tenant; those of a key override them."""
        return KeyLimits(self.max_key_sequences, self.max_key_requests, self.key_tokens_per_minute)

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
