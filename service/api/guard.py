"""Who may talk to the API: everything is refused that is not let in here.

A job is code, so whoever can submit one owns the workers. With a token, every request carries it. Without
one the service listens on loopback only, and refuses what a web page could make a visitor's browser send:
requests for another host name (DNS rebinding) and requests from another origin.
"""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.problems import Problem
from service.settings import is_loopback

OPEN = frozenset({"/healthz", "/readyz", "/"})
"""Paths that need no token: health, and the page (which holds no data and asks for the token)."""

HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


class Guard:
    """ASGI middleware: checks host, origin and token; adds security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *HEADERS.items()]
            await send(message)

        problem = self._problem(scope["path"], Headers(scope=scope))
        if problem is not None:
            await problem.response(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)

    def _problem(self, path: str, headers: Headers) -> Problem | None:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return Problem(403, "cross_origin", f"requests from pages of {origin[:80]} are refused")
        if self._token is None:
            if not is_loopback(_name(host)):
                return Problem(
                    403, "foreign_host", f"this service is not {host}; without a token it answers to localhost only"
                )
            return None
        if path in OPEN or path.startswith("/static/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self._token.encode()):
            return None
        return Problem(
            401,
            "unauthorized",
            "this service needs its token: send the header 'Authorization: Bearer TOKEN' (command line: set SFM_TOKEN)",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _name(host: str) -> str:
    """The name in a Host header, without its port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
