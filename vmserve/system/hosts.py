"""Names and addresses of machines."""

from __future__ import annotations

import ipaddress
import logging

__all__ = ["is_loopback", "warn_of_loopback"]

logger = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_of_loopback(host: str, address: str, remedy: str) -> None:
    """Say so if ``host``, on whose ``address`` a server listens, is this machine's name and means
    loopback here alone: many systems have it as 127.0.1.1 in /etc/hosts."""
    if is_loopback(address) and not is_loopback(host):
        logger.warning(
            "%s is %s here, which other machines cannot reach: %s", host, address, remedy
        )
