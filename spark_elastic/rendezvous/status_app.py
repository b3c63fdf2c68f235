"""ASGI application for the status page: read-only pages for holders of its own token.

The address in the job's log carries the token. The first visit sets a cookie, and the page removes the token from the
address. Where an iframe blocks cookies, the page's script sends the token as a header. The application accepts no POST,
reads no body, limits the rate of requests and renders each page at most twice a second. Runs in the server's event
loop thread.
"""

from __future__ import annotations

import hmac
import http.cookies
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from spark_elastic.clock import Clock
from spark_elastic.rendezvous.http_server import mark_authenticated

log = logging.getLogger("spark_elastic.rendezvous")

ROOT = "/status/"
METRICS = "/metrics"  # also where scrapers look by habit
RATE = 10.0  # requests a second
BURST = 40.0
PAGE_TTL = 0.5  # seconds for which a page is answered again as it is
TOKEN_HEADER = b"x-status-token"
UNAUTHORIZED_TEXT = b"Open the address that the job's log shows: it carries the token of this page.\n"

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Page:
    """One page."""

    kind: str  # its Content-Type
    render: Callable[[], bytes]  # called in the event loop's thread, so it must be quick
    policy: str = "default-src 'none'"  # its Content-Security-Policy


class StatusApp:
    """Serves `pages` by their path below `ROOT`; "" is the page that people open."""

    def __init__(self, pages: Mapping[str, Page], clock: Clock) -> None:
        self.token = secrets.token_urlsafe(24)
        self._token = self.token.encode()
        self._pages = {ROOT + name: page for name, page in pages.items()}
        if ROOT + "metrics" in self._pages:
            self._pages[METRICS] = self._pages[ROOT + "metrics"]
        self._clock = clock
        self._visitor_cookie = secrets.token_urlsafe(24).encode()
        # Cookies know no ports: several jobs on one host must not take each other's.
        self._cookie = f"spark_elastic_{secrets.token_hex(4)}"
        self._rendered: dict[str, tuple[float, bytes]] = {}
        self._allowance, self._counted = BURST, clock.now()

    def url(self, server: str) -> str:
        """What people open. server: its url."""
        return f"{server}{ROOT}?token={self.token}"

    def handles(self, scope: Scope) -> bool:
        """Whether a request is for the status page."""
        path: str = scope.get("path", "")
        return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and (
            path in (METRICS, ROOT.rstrip("/")) or path.startswith(ROOT)
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body, headers = self._answer(scope)
        plain = (
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        )
        await send({"type": "http.response.start", "status": status, "headers": [*plain, *headers]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> tuple[int, bytes, Headers]:
        text: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
        headers = dict(scope["headers"])
        query: bytes = scope["query_string"]
        path: str = scope["path"]
        if path == ROOT.rstrip("/"):
            return 307, b"", [(b"location", b"status/" + (b"?" + query if query else b""))]
        by_address = self._is_token(parse_qs(query.decode("latin-1")).get("token", [""])[0].encode())
        if not by_address and not self._is_known(headers):
            return 401, UNAUTHORIZED_TEXT, [*text, (b"connection", b"close")]
        mark_authenticated(scope)
        if not self._within_rate():
            return 429, b"Too many requests.\n", [*text, (b"retry-after", b"1")]
        page = self._pages.get(path)
        if page is None:
            return 404, b"There is no such page.\n", text
        try:
            body = self._render_page(path, page)
        except Exception:  # a page that fails must not hurt the job
            log.exception("the status page %s failed", path)
            return 500, b"The page could not be made; the driver's log says why.\n", text
        kind: Headers = [
            (b"content-type", page.kind.encode()),
            (b"content-security-policy", page.policy.encode()),
        ]
        if by_address:
            cookie = f"{self._cookie}={self._visitor_cookie.decode()}; HttpOnly; SameSite=Lax"
            if scope.get("scheme") == "https":
                cookie += "; Secure"
            kind.append((b"set-cookie", cookie.encode()))
        return 200, body, kind

    def _is_token(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)

    def _is_known(self, headers: Mapping[bytes, bytes]) -> bool:
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self._is_token(headers.get(TOKEN_HEADER, b"")) or self._is_token(bearer):
            return True
        try:
            cookies = http.cookies.SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except http.cookies.CookieError:
            return False
        morsel = cookies.get(self._cookie)
        return morsel is not None and hmac.compare_digest(
            morsel.value.encode("latin-1"), self._visitor_cookie
        )

    def _within_rate(self) -> bool:
        """Takes one from a token bucket that only holders of the token use."""
        now = self._clock.now()
        self._allowance = min(BURST, self._allowance + RATE * (now - self._counted))
        self._counted = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _render_page(self, path: str, page: Page) -> bytes:
        now = self._clock.now()
        at, body = self._rendered.get(path, (float("-inf"), b""))
        if now - at >= PAGE_TTL:
            body = page.render()
            self._rendered[path] = now, body
        return body


class App:
    """Passes requests for the status page to `status_app`, all others to the authenticating application."""

    def __init__(self, auth: ASGIApp, status_app: StatusApp | None) -> None:
        self._auth = auth
        self._status_app = status_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._status_app is not None and self._status_app.handles(scope):
            await self._status_app(scope, receive, send)
        else:
            await self._auth(scope, receive, send)
