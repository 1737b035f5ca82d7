"""Options of the HTTP server, as opposed to those of the engine behind it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vmserve.errors import ConfigurationError
from vmserve.server.auth import ApiKey, KeyLimits
from vmserve.server.limits import WRITE_STALL_SECONDS
from vmserve.tools.reasoning import REASONING_PARSERS
from vmserve.tools.registry import check_parser

__all__ = ["ServerConfig", "is_loopback"]

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\sA-Z/*]+")
_HOST: Final = re.compile(r"\*|[^\sA-Z/:*\[\]]+")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What ``vmserve serve`` was asked for; names are those of the command line.

    ``served_model_names`` are the names that requests may give; replies lead with the first.
    ``max_queued_requests`` and ``max_queued_tokens`` bound what waits for the engine, before
    requests are answered with 429; ``max_key_sequences``, ``max_key_requests`` and
    ``key_tokens_per_minute`` bound each tenant. ``shutdown_timeout`` is in seconds, as is
    ``engine_death_linger``, for which a server without an engine answers 503 before it ends.
    ``write_timeout``: seconds that a client may leave a full buffer unread.
    ``tokenizer_info``: what ``/tokenizer_info`` answers, if anything.
    ``otlp_traces_endpoint``: the URL that spans are sent to, if any.
    ``allowed_origins`` and ``allowed_hosts``, in lower case: empty for what
    :class:`~vmserve.server.origins.OriginPolicy` derives. ``max_connections`` and
    ``max_connections_per_address``: None for what
    :class:`~vmserve.server.listen.ConnectionLimits` derives.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    named_keys: tuple[ApiKey, ...] = ()
    admin_api_key: str | None = None
    share_prefix_cache_across_keys: bool = False
    root_path: str = ""
    open_status_routes: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str = "auto"
    return_tokens_as_token_ids: bool = False
    force_include_usage: bool = False
    per_request_metrics: bool = False
    tokenizer_info: Mapping[str, Any] | None = None
    vllm_metrics: bool = True
    shutdown_timeout: float = 5.0
    engine_death_linger: float = 10.0
    write_timeout: float = WRITE_STALL_SECONDS
    otlp_traces_endpoint: str | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 8_000_000
    max_key_sequences: int | None = None
    max_key_requests: int | None = None
    key_tokens_per_minute: int | None = None
    max_connections: int | None = None
    max_connections_per_address: int | None = None

    def __post_init__(self) -> None:
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
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port: {self.port} is not between 0 and 65535")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigurationError(
                f"root_path: {self.root_path!r} must start with a slash and not end with one"
            )
        for name in ("shutdown_timeout", "engine_death_linger", "write_timeout"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise ConfigurationError(
                    f"{name}: {getattr(self, name)} is not between 0 and 86400 seconds"
                )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigurationError(
                "ssl_certfile and ssl_keyfile go together: a certificate, and its private key"
            )
        for name in (
            "max_queued_requests",
            "max_queued_tokens",
            "max_key_sequences",
            "max_key_requests",
            "key_tokens_per_minute",
            "max_connections",
            "max_connections_per_address",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}: {value} is below the least, 1")

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All keys; those without a name are called key-0, key-1, ..."""
        plain = (ApiKey.of(f"key-{i}", key) for i, key in enumerate(self.api_keys))
        return (*plain, *self.named_keys)

    @property
    def key_limits(self) -> KeyLimits:
        """Of each tenant, where its key says nothing else."""
        return KeyLimits(self.max_key_sequences, self.max_key_requests, self.key_tokens_per_minute)

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
