"""Look at the server: does it answer, does it accept the key, what does it serve?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from vmserve.errors import ConfigurationError
from vmserve_bench.serve.client import error_text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServerInfo", "api_url", "look"]

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """``max_len``: tokens of prompt and answer, None where the server does not say."""

    model: str
    max_len: int | None
    version: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, "max_model_len": self.max_len, "version": self.version}


def api_url(text: str) -> str:
    """Normalize the address; it ends in ``/v1`` or another path. Raises ConfigurationError."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        usable = False
    if not usable:
        raise ConfigurationError(f"--base-url: {text!r} is no address: write http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(
            "--base-url: give an address without a user, a query or a fragment, and a key with "
            "--api-key"
        )
    path = parts.path.rstrip("/") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def look(base_url: str, model: str | None, headers: Mapping[str, str]) -> ServerInfo:
    """Asks ``/models`` and ``/version``. Raises ConfigurationError with what to do about it."""
    with httpx.Client(headers=dict(headers), timeout=_TIMEOUT_S) as client:
        try:
            response = client.get(f"{base_url}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigurationError(
                f"no server answers at {base_url} ({str(error) or type(error).__name__}): is it "
                "running, and is --base-url right?"
            ) from None
        status = response.status_code
        if status in (401, 403):
            raise ConfigurationError(
                f"{base_url} answers {status}, {error_text(response.text)!r}: "
                "give its key with --api-key or VMSERVE_API_KEY"
            )
        version = _version(client, base_url)
    models = _models(response)
    if model is None and not models:
        raise ConfigurationError(
            f"{base_url}/models answers {status} and names no model: give one with --model"
        )
    chosen = model or str(next(iter(models)))
    if models and chosen not in models:
        names = ", ".join([*models][:10])
        raise ConfigurationError(f"--model: {base_url} serves no {chosen!r} but {names}")
    max_len = models.get(chosen)
    return ServerInfo(chosen, max_len if isinstance(max_len, int) else None, version)


def _models(response: httpx.Response) -> dict[str, Any]:
    """Longest contexts by model; none if the server has no list, so the model must be named."""
    try:
        listed = response.json()["data"] if response.is_success else []
        return {str(one["id"]): one.get("max_model_len") for one in listed}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _version(client: httpx.Client, base_url: str) -> str | None:
    """Version by ``/version`` next to ``/v1``, if there is such a route."""
    try:
        told = client.get(base_url.removesuffix("/v1") + "/version")
        version = told.json().get("version") if told.is_success else None
    except (httpx.HTTPError, ValueError, AttributeError):
        return None
    return None if version is None else str(version)
