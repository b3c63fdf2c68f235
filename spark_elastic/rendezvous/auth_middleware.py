"""ASGI application that admits requests with a valid signature, size and form.

The checks run in order of their cost, so that unauthenticated requests are cheap: credentials of a known session (401,
before any byte of the body is read), size (413), time to send the body (408), signature and replay (401), form and
version (400). A 401 has no content. Runs in the server's event loop thread; it does not know what requests mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol.messages import ANOTHER_RELEASE, Request
from spark_elastic.rendezvous import auth, codec
from spark_elastic.rendezvous.http_server import mark_authenticated, was_reset
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES, MAX_POLL_SECONDS, VERSION, path_of

log = logging.getLogger("spark_elastic.rendezvous")


class PeerDisconnected(Exception):
    """The connection broke while its request was open."""

    def __init__(self, reset: bool = False) -> None:
        """
        Args:
            reset: the network broke it, not the end of its process; see `http_server.was_reset`.
        """
        super().__init__(reset)
        self.reset = reset


class HttpRefusal(Exception):
    """Answer with `status` and no content."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Call:
    """An authenticated request."""

    message: Any  # a Request
    scope: Scope  # ASGI's, of the request
    receive: Receive  # ASGI's; after the body only a broken connection comes
    hold: float  # seconds for which the client allows a long poll, at most MAX_POLL_SECONDS

    async def wait_disconnected(self) -> None:
        """Returns when the connection breaks."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def get_disconnect_error(self) -> PeerDisconnected:
        """What there is to raise once it has."""
        return PeerDisconnected(was_reset(self.scope))


Handler = Callable[[Call], Awaitable[object]]


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request."""

    body: int = MAX_BODY_BYTES  # bytes of the body
    body_seconds: float = 10.0  # seconds in which the body must arrive


class AuthMiddleware:
    """ASGI application that authenticates requests and passes them to their handlers."""

    def __init__(
        self,
        key: bytes,
        attempt: int,
        handlers: Mapping[type[Request[Any]], Handler],
        limits: RequestLimits | None = None,
    ) -> None:
        self._key = key
        self._attempt = attempt
        self._handlers = {path_of(cls): (cls, handler) for cls, handler in handlers.items()}
        self._limits = limits or RequestLimits()
        self._sessions = auth.Sessions()
        self._last_replies: dict[type, tuple[object, bytes]] = {}  # the newest reply of each kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            credentials = self._read_credentials(scope)
            body = await self._read_body(scope, receive)
            if not auth.request_is_genuine(self._key, scope["path"], credentials, body):
                raise HttpRefusal(401)
            if scope["path"] == auth.HELLO:
                # It may be a replay: the connection counts as unauthenticated until a request in that session.
                status, text = 200, _encode_text("session", self._sessions.open(credentials.session))
            elif not self._sessions.use(credentials):
                raise HttpRefusal(401)
            else:
                mark_authenticated(scope)
                status, text = await self._answer(scope, body, receive)
        except HttpRefusal as refused:
            await _send(send, refused.status, b"", [(b"connection", b"close")])
            return
        except (PeerDisconnected, asyncio.CancelledError):
            return  # the connection broke, or the closing event loop cancels the request: no answer can be sent
        signature = auth.sign_reply(self._key, credentials, status, text).encode()
        await _send(send, status, text, [(auth.REPLY_HEADER.encode(), signature)])

    def _read_credentials(self, scope: Scope) -> auth.Credentials:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        values = [value for name, value in headers if name == b"authorization"]
        credentials = auth.parse_credentials(values[0].decode("latin-1")) if len(values) == 1 else None
        if credentials is None or scope["method"] != "POST" or scope["query_string"]:
            raise HttpRefusal(401)
        path: str = scope["path"]
        if path == auth.HELLO:
            if credentials.count:
                raise HttpRefusal(401)
        elif path not in self._handlers or not self._sessions.is_known(credentials.session):
            raise HttpRefusal(401)
        return credentials

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        limit = 0 if scope["path"] == auth.HELLO else self._limits.body
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise HttpRefusal(413)
        try:
            return await asyncio.wait_for(_collect_body(receive, limit), self._limits.body_seconds)
        except asyncio.TimeoutError:  # the TimeoutError of Python 3.11 and newer
            raise HttpRefusal(408) from None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive) -> tuple[int, bytes]:
        """Status and reply to a genuine request; only defects of ours end in 500."""
        path: str = scope["path"]
        cls, handler = self._handlers[path]
        try:
            envelope = codec.loads(body)
            if (stale := self._find_stale_reason(envelope)) is not None:
                return 200, _encode_text("stale", stale)
            message = codec.read(cls, envelope.get("message"))
            call = Call(message, scope, receive, self._read_hold(envelope))
            return 200, self._encode(await handler(call))
        except StaleGeneration as stale_error:
            return 200, _encode_text("stale", str(stale_error))
        except (codec.MalformedMessage, InvalidInput) as error:
            return 400, _encode_text("error", f"Request {path} was refused: {error}.")
        except PeerDisconnected:
            raise
        except Exception as error:
            log.exception("answering %s failed", path)
            return 500, _encode_text("error", f"The driver failed to answer {path}: {error!r}.")

    def _encode(self, reply: object) -> bytes:
        """The same reply to many (a new world to its members) is put into words once."""
        last, text = self._last_replies.get(type(reply), (None, b""))
        if reply is not last:
            text = codec.compress(_encode_text("reply", reply))
            self._last_replies[type(reply)] = reply, text
        return text

    def _read_hold(self, envelope: dict[str, Any]) -> float:
        asked = envelope.get("hold", MAX_POLL_SECONDS)
        if type(asked) not in (int, float):
            raise codec.MalformedMessage("hold must be a number of seconds")
        return min(MAX_POLL_SECONDS, max(0.0, float(asked)))

    def _find_stale_reason(self, envelope: dict[str, Any]) -> str | None:
        version, attempt = envelope.get("v"), envelope.get("attempt")
        if version != VERSION:
            raise codec.MalformedMessage(
                f"it speaks version {version!r} and the driver speaks {VERSION}: {ANOTHER_RELEASE} on all hosts"
            )
        if type(attempt) is not int:
            raise codec.MalformedMessage("attempt must be int")
        if attempt == self._attempt:
            return None
        return (
            f"this driver holds attempt {self._attempt} of the run, and the request is of attempt {attempt}"
        )


async def _collect_body(receive: Receive, limit: int) -> bytes:
    """A request's body.

    Raises:
        HttpRefusal: it is longer than limit.
        PeerDisconnected: the peer went away.
    """
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise PeerDisconnected
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise HttpRefusal(413)
        if not message.get("more_body"):
            return b"".join(parts)


def _encode_text(kind: str, value: object) -> bytes:
    return codec.dumps({"v": VERSION, kind: value})


async def _send(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    start: Message = {"type": "http.response.start", "status": status, "headers": [length, *headers]}
    await send(start)
    await send({"type": "http.response.body", "body": body})
