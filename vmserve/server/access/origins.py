"""Which web pages may call the server, and by which names it may be called.

A browser sends requests of every page that its user visits, to loopback too. They are known by
their Origin, unless a name of the page's site has been made to resolve to our address (DNS
rebinding): then the Host is foreign.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vmserve.server.config import ServerConfig
from vmserve.server.errors import ApiError
from vmserve.system.hosts import is_loopback

__all__ = ["Cors", "OriginPolicy"]

#: The host of a Host header or an origin: a name or an IPv4 address, or an IPv6 address.
_AUTHORITY: Final = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]/@:]+))(?::\d*)?")
_MOST_SHOWN: Final = 200


class OriginPolicy:
    """``ServerConfig.allowed_origins`` and ``allowed_hosts``, and what they mean where not given.

    With keys: any page, as it must have a key, under any name. Without: pages of loopback and of
    the server itself; where it listens on loopback, under its own names and addresses only.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.allowed_origins)
        self.allows_all_origins = "*" in self._origins or bool(
            config.keys and not config.allowed_origins
        )
        self._allows_loopback = not config.keys
        self._hosts = frozenset(config.allowed_hosts)
        is_reachable = config.uds is not None or not is_loopback(config.host)
        self._allows_all_hosts = "*" in self._hosts or bool(
            (config.keys or is_reachable) and not config.allowed_hosts
        )
        self._own_host = config.host.lower()

    def check(self, scope: Scope) -> None:
        """Raises :class:`ApiError` 403 for a page or a name that is not allowed."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._allows_host(host):
            name = _host_of(host) or host
            raise ApiError(
                403,
                f"This server does not answer to the name {_shown(name)}: call it by localhost or "
                f"its address, or start it with --allowed-host {_shown(name)}, or with --api-key.",
            )
        if origin is not None and not self.allows_origin(origin) and not _is_same(origin, host):
            raise ApiError(
                403,
                f"Pages of {_shown(origin)} may not call this server: start it with "
                f"--allowed-origin {_shown(origin)}, or with --api-key.",
            )

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of another site than the server's own may call it."""
        origin = origin.lower()
        if self.allows_all_origins or origin in self._origins:
            return True
        scheme, _, authority = origin.partition("://")
        name = _host_of(authority)
        return (
            self._allows_loopback
            and scheme in ("http", "https")
            and name is not None
            and _is_local(name)
        )

    def _allows_host(self, host: str) -> bool:
        if self._allows_all_hosts:
            return True
        name = _host_of(host)
        return name is not None and (
            _is_address(name)  # which no foreign name server can make ours
            or _is_local(name)
            or name == self._own_host
            or name in self._hosts
        )


class Cors(CORSMiddleware):
    """CORS for pages that are allowed; the others are left to :meth:`OriginPolicy.check`."""

    def __init__(self, app: ASGIApp, *, policy: OriginPolicy) -> None:
        super().__init__(
            app,
            allow_origins=["*"] if policy.allows_all_origins else [],
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-vmserve-unenforced"],
        )
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None or self.is_allowed_origin(origin):
            await super().__call__(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def is_allowed_origin(self, origin: str) -> bool:
        return self._policy.allows_origin(origin)


def _host_of(authority: str) -> str | None:
    """The host without port and brackets, or None for what is no host."""
    match = _AUTHORITY.fullmatch(authority.lower())
    return (match["v6"] or match["name"].rstrip(".")) if match else None


def _is_local(name: str) -> bool:
    return is_loopback(name) or name.endswith(".localhost")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same(origin: str, host: str) -> bool:
    """Whether the page came from the server itself, be it through a proxy that ends TLS."""
    return bool(host) and origin.lower().partition("://")[2] == host.lower()


def _shown(text: str) -> str:
    return ascii(text[:_MOST_SHOWN])[1:-1]
