"""Who may ask, and from where: the key, pages of other sites, names that lead here by a trick.

A browser sends what any page tells it to, also to a server on the loopback. Such a request carries the page's origin,
and is refused unless that origin was allowed. A page whose own name was made to lead to the loopback (DNS rebinding)
shows by the Host it asks for: a server bound to the loopback alone answers to an address and to localhost.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.server.errors import ApiError
from runtime.server.protocol import HEAD_BYTES
from runtime.server.responses import error_response

OPEN = ("/", "/health")
"""What needs no key; /health tells less without one."""


def is_loopback(host: str) -> bool:
    """Whether an address or name means this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Lets requests through to the app, or refuses them."""

    def __init__(self, app: ASGIApp, api_key: str | None, origins: Sequence[str], loopback: bool) -> None:
        self._app, self._api_key = app, api_key
        self._origins, self._loopback = frozenset(origins), loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["authorized"] = self._has_key(headers)
        error = self._foreign(headers)
        line = len(scope["raw_path"]) + len(scope["query_string"])
        if line + sum(len(name) + len(value) + 4 for name, value in headers.raw) > HEAD_BYTES:
            error = ApiError(431, f"request line and headers are longer than {HEAD_BYTES:,} bytes")
        if error is None and scope["path"] not in OPEN and scope["method"] != "OPTIONS" and not scope["authorized"]:
            error = ApiError(
                401,
                "this server needs its key: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                kind="authentication_error",
            )
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        if self._api_key is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
        return scheme.lower() == "bearer" and same

    def _foreign(self, headers: Headers) -> ApiError | None:
        """Refused: what another site's page sends, and what asks for a name that is not this machine's."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and origin not in self._origins and origin.partition("://")[2] != host:
            return ApiError(403, f"pages of {origin} may not use this server", code="foreign_origin")
        if self._loopback and not _is_own_name(host):
            message = f"this server answers to localhost and to addresses, not to {host or 'no name at all'}"
            return ApiError(403, message, code="host")
        return None


def _is_own_name(host: str) -> bool:
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name.lower() == "localhost"
    return True
