"""The status page: read-only pages for holders of its own token.

The address in the job's log carries it. The first visit sets a cookie, and the page removes the token from the address;
where an iframe blocks cookies, its script sends it as a header. Each page is rendered at most twice a second, in the
event loop's thread.
"""

from __future__ import annotations

import hmac
import http.cookies
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from spark_elastic.clock import Clock
from spark_elastic.rendezvous.http1 import HttpRequest, Response

log = logging.getLogger("spark_elastic.rendezvous")

ROOT = "/status/"
METRICS = "/metrics"  # also where scrapers look by habit
PAGE_TTL = 0.5  # seconds for which a page is answered again as it is
TOKEN_HEADER = "x-status-token"
UNAUTHORIZED_TEXT = b"Open the address that the job's log shows: it carries the token of this page.\n"

Fields = tuple[tuple[str, str], ...]
TEXT: Fields = (("content-type", "text/plain; charset=utf-8"),)
ALWAYS: Fields = (
    ("cache-control", "no-store"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
)


@dataclass(frozen=True)
class Page:
    kind: str  # its Content-Type
    render: Callable[[], bytes]  # called in the event loop's thread, so it must be quick
    policy: str = "default-src 'none'"  # its Content-Security-Policy


class StatusApp:
    """Serves `pages` by their path below `ROOT`; "" is the page that people open."""

    def __init__(self, pages: Mapping[str, Page], clock: Clock) -> None:
        self.token = secrets.token_urlsafe(24)
        self._pages = {ROOT + name: page for name, page in pages.items()}
        if ROOT + "metrics" in self._pages:
            self._pages[METRICS] = self._pages[ROOT + "metrics"]
        self._clock = clock
        self._visitor_cookie = secrets.token_urlsafe(24)
        self._cookie = f"spark_elastic_{secrets.token_hex(4)}"  # those of other jobs on this host differ
        self._rendered: dict[str, tuple[float, bytes]] = {}

    def url(self, server: str) -> str:
        return f"{server}{ROOT}?token={self.token}"

    def handles(self, request: HttpRequest) -> bool:
        is_page = request.path in (METRICS, ROOT.rstrip("/")) or request.path.startswith(ROOT)
        return is_page and request.method in ("GET", "HEAD") and not request.length

    def answer(self, request: HttpRequest) -> Response:
        if request.path == ROOT.rstrip("/"):
            target = "status/" + (f"?{request.query}" if request.query else "")
            return Response(307, b"", (("location", target), *ALWAYS))
        by_address = self._is_token(parse_qs(request.query).get("token", [""])[0])
        if not by_address and not self._is_known(request.fields):
            return Response(401, UNAUTHORIZED_TEXT, TEXT + ALWAYS, is_last=True)
        status, body, fields = self._answer_visitor(request, by_address)
        return Response(status, body, fields + ALWAYS, is_authenticated=True)

    def _answer_visitor(self, request: HttpRequest, by_address: bool) -> tuple[int, bytes, Fields]:
        page = self._pages.get(request.path)
        if page is None:
            return 404, b"There is no such page.\n", TEXT
        try:
            body = self._render_page(request.path, page)
        except Exception:  # a page that fails must not hurt the job
            log.exception("the status page %s failed", request.path)
            return 500, b"The page could not be made; the driver's log says why.\n", TEXT
        fields: Fields = (("content-type", page.kind), ("content-security-policy", page.policy))
        if by_address:
            cookie = f"{self._cookie}={self._visitor_cookie}; HttpOnly; SameSite=Lax"
            fields += (("set-cookie", cookie + "; Secure" * request.is_encrypted),)
        return 200, body, fields

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())

    def _is_known(self, fields: Mapping[str, str]) -> bool:
        bearer = fields.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(fields.get(TOKEN_HEADER, "")) or self._is_token(bearer):
            return True
        try:
            cookies = http.cookies.SimpleCookie(fields.get("cookie", ""))
        except http.cookies.CookieError:
            return False
        value = cookies[self._cookie].value if self._cookie in cookies else ""
        return hmac.compare_digest(value.encode(), self._visitor_cookie.encode())

    def _render_page(self, path: str, page: Page) -> bytes:
        now = self._clock.now()
        at, body = self._rendered.get(path, (float("-inf"), b""))
        if now - at >= PAGE_TTL:
            body = page.render()
            self._rendered[path] = now, body
        return body
