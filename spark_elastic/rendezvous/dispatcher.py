"""Admits requests with a valid signature, size and form, and passes them to their handlers.

The checks run in order of their cost, so that unauthenticated requests are cheap: credentials of a known session (401,
before any byte of the body is read), size (413), signature and replay (401), form and version (400). A 401 has no
content. Runs in the server's event loop thread; it does not know what requests mean.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol.messages import ANOTHER_RELEASE, DriverRequest
from spark_elastic.rendezvous import auth, codec, http1
from spark_elastic.rendezvous.connections import AnswerBody
from spark_elastic.rendezvous.http1 import Response
from spark_elastic.rendezvous.long_polls import LongPoll
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES, MAX_POLL_SECONDS, VERSION, path_of

log = logging.getLogger("spark_elastic.rendezvous")

Handler = Callable[[Any], object]  # given a message: the reply, or the long poll that waits for it


class Dispatcher:
    """The application of the rendezvous server."""

    def __init__(
        self, key: bytes, attempt: int, handlers: Mapping[type[DriverRequest[Any]], Handler]
    ) -> None:
        self._key = key
        self._attempt = attempt
        self._handlers = {path_of(cls): (cls, handler) for cls, handler in handlers.items()}
        self._sessions = auth.Sessions()
        self._last_replies: dict[type, tuple[object, bytes]] = {}  # the newest reply of each kind

    def __call__(self, request: http1.Request) -> Response | AnswerBody:
        """Looks at the head."""
        credentials = auth.parse_credentials(request.fields.get("authorization", ""))
        if credentials is None or request.method != "POST" or request.query:
            return Response(401, is_last=True)
        is_hello = request.path == auth.HELLO
        if credentials.count if is_hello else not self._sessions.is_known(credentials.session):
            return Response(401, is_last=True)
        if request.length > (0 if is_hello else MAX_BODY_BYTES):
            return Response(413, is_last=True)
        return partial(self._answer, request.path, credentials)

    def _answer(self, path: str, credentials: auth.Credentials, body: bytes) -> Response | LongPoll:
        if not auth.request_is_genuine(self._key, path, credentials, body):
            return Response(401, is_last=True)
        if path == auth.HELLO:
            # It may be a replay: the connection counts as unauthenticated until a request in that session.
            session = self._sessions.open(credentials.session)
            return self._sign(credentials, 200, _encode_text("session", session), is_authenticated=False)
        if not self._sessions.use(credentials):
            return Response(401, is_last=True)
        reply = self._respond(path, credentials, lambda: self._handle(path, body))
        assert reply is not None
        if isinstance(reply, LongPoll):
            reply.respond = partial(self._respond, path, credentials)
        return reply

    def _handle(self, path: str, body: bytes) -> object:
        """The reply to a genuine request, or the poll that waits for it."""
        envelope = codec.loads(body)
        self._check_envelope(envelope)
        broken: Any = codec.read_as(tuple[str, ...], envelope.get("broken", []), "broken")
        self._sessions.end(broken)
        if path not in self._handlers:
            raise codec.MalformedMessage("the driver knows no such request")
        cls, handler = self._handlers[path]
        hold = _read_hold(envelope)
        reply = handler(codec.read(cls, envelope.get("message")))
        if isinstance(reply, LongPoll):
            reply.hold = hold
        return reply

    def _respond(
        self, path: str, credentials: auth.Credentials, compute: Callable[[], object]
    ) -> Response | LongPoll | None:
        """What `compute` gives, signed, or the error that it raises; only defects of ours end in 500. A long poll, or
        None of one that goes on waiting, stays what it is."""
        try:
            reply = compute()
            if reply is None or isinstance(reply, LongPoll):
                return reply
            status, text = 200, self._encode(reply)
        except StaleGeneration as error:
            status, text = 200, _encode_text("stale", str(error))
        except (codec.MalformedMessage, InvalidInput) as error:
            status, text = 400, _encode_text("error", f"Request {path} was refused: {error}.")
        except Exception as error:
            log.exception("answering %s failed", path)
            status, text = 500, _encode_text("error", f"The driver failed to answer {path}: {error!r}.")
        return self._sign(credentials, status, text)

    def _sign(
        self, credentials: auth.Credentials, status: int, text: bytes, is_authenticated: bool = True
    ) -> Response:
        signature = auth.sign_reply(self._key, credentials, status, text)
        return Response(status, text, ((auth.REPLY_HEADER, signature),), is_authenticated)

    def _encode(self, reply: object) -> bytes:
        """The same reply to many (the end of a world, say) is put into words once."""
        last, text = self._last_replies.get(type(reply), (None, b""))
        if reply != last:
            text = codec.compress(_encode_text("reply", reply))
            self._last_replies[type(reply)] = reply, text
        return text

    def _check_envelope(self, envelope: dict[str, Any]) -> None:
        version, attempt = envelope.get("v"), envelope.get("attempt")
        if version != VERSION:
            raise codec.MalformedMessage(
                f"it speaks version {version!r} and the driver speaks {VERSION}: {ANOTHER_RELEASE} on all hosts"
            )
        if type(attempt) is not int:
            raise codec.MalformedMessage("attempt must be int")
        if attempt != self._attempt:
            raise StaleGeneration(
                f"this driver holds attempt {self._attempt} of the run, and the request is of attempt {attempt}"
            )


def _read_hold(envelope: dict[str, Any]) -> float:
    hold = envelope.get("hold", MAX_POLL_SECONDS)
    if type(hold) not in (int, float):
        raise codec.MalformedMessage("hold must be a number of seconds")
    return min(MAX_POLL_SECONDS, max(0.0, float(hold)))


def _encode_text(kind: str, value: object) -> bytes:
    return codec.dumps({"v": VERSION, kind: value})
