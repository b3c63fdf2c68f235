"""Requests that nobody thought of, and what must be true of each answer: for tests, and for a fuzzer that is led by
coverage (`tests/faults/fuzz.py`), which brings the bytes that they are made of.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import socket
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeAlias, get_type_hints

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_elastic.protocol.messages import DriverRequest
from spark_elastic.protocol.types import Fence
from spark_elastic.rendezvous import auth, codec
from spark_elastic.rendezvous.messages import REQUESTS, VERSION, path_of
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, PATIENCE, read_all

Asks: TypeAlias = Callable[[], None]  # of hypothesis: sends `EXAMPLES` requests

EXAMPLES = 25
SHARED = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
KNOWN = st.sampled_from(["", "0-0", "0-0.1", "1-0", "generation/1", "x" * 600, "\ud800"])
NAMES = KNOWN | st.text(max_size=20)
NUMBERS = st.integers(-2, 8) | st.integers(-(2**70), 2**70)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def _generate_wire_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint as JSON: mostly what the wire takes."""
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if hint is Fence:
        return st.just({"attempt": ATTEMPT, "generation": 1})
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        names = [field.name for field in dataclasses.fields(hint)]
        return st.fixed_dictionaries({name: _generate_wire_values(hints[name]) for name in names})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from([member.value for member in hint])
    if origin is tuple:
        return st.lists(_generate_wire_values(arguments[0]), max_size=3)
    if type(None) in arguments:
        return st.none() | st.one_of(*(_generate_wire_values(a) for a in arguments if a is not type(None)))
    if origin is dict:
        return st.dictionaries(NAMES, JSON, max_size=4)
    kinds = {str: NAMES, int: NUMBERS, float: st.floats(0, 1e9), bool: st.booleans()}
    return kinds.get(hint, st.binary(max_size=40).map(codec.to_plain))


def _messages(request: type[DriverRequest[Any]]) -> st.SearchStrategy[Any]:
    """Well formed, with a field replaced by anything, or anything at all."""
    good = _generate_wire_values(request)
    fields = [field.name for field in dataclasses.fields(request)]  # type: ignore[arg-type]
    spoilt = st.builds(lambda m, name, value: m | {name: value}, good, st.sampled_from(fields), JSON)
    return good | spoilt | JSON


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes, str]:
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers.get(auth.REPLY_HEADER, "")


def with_key(asking: http.client.HTTPConnection, request_class: type[DriverRequest[Any]]) -> Asks:
    """Whoever has the key is answered, whatever it says."""
    path = path_of(request_class)
    hello = auth.sign_request(KEY, auth.HELLO, auth.create_id(), 0, b"")
    _, body, _ = _ask(asking, "POST", auth.HELLO, b"", {"authorization": hello.header()})
    session, count = str(json.loads(body)["session"]), itertools.count(1)

    @SHARED
    @given(_messages(request_class), st.just(VERSION) | JSON, st.just(ATTEMPT) | JSON, st.binary(max_size=9))
    def ask(message: Any, version: Any, attempt: Any, noise: bytes) -> None:
        envelope = {"v": version, "attempt": attempt, "hold": 0, "message": message}
        body = json.dumps(envelope).encode() + (noise if noise[:1] > b"\xd0" else b"")
        signed = auth.sign_request(KEY, path, session, next(count), body)
        status, answer, signature = _ask(asking, "POST", path, body, {"authorization": signed.header()})
        assert status in (200, 400), (status, answer)
        assert auth.reply_is_genuine(KEY, signed, status, answer, signature)

    return ask


def ask_without_key(asking: http.client.HTTPConnection) -> Asks:
    """Whoever lacks the key learns nothing."""
    paths = st.sampled_from([auth.HELLO, *(path_of(cls) for cls in REQUESTS)])
    session, signature = (
        st.text("0123456789abcdef", min_size=size, max_size=size) for size in (32, auth.SIGNATURE_DIGITS)
    )
    forged = st.builds("Elastic {}.{}.{}".format, session, st.integers(0, 9), signature)
    words = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=80)

    @SHARED
    @given(
        st.sampled_from(["POST", "GET", "PUT", "HEAD", "DELETE"]),
        paths | words.map(lambda w: "/" + w.encode("ascii", "ignore").decode().replace(" ", "")),
        forged | words,
        st.binary(max_size=50),
    )
    def ask(method: str, path: str, header: str, body: bytes) -> None:
        status, answer, signature = _ask(asking, method, path, body, {"authorization": header})
        assert status in (400, 401, 413)
        assert signature == ""
        assert status == 400 or answer == b""

    return ask


def of_noise(port: int) -> Asks:
    """What is no request is hung up on."""
    heads = st.sampled_from(
        [
            b"POST /rendezvous/Heartbeat HTTP/1.1\r\n",
            b"GET / HTTP/1.0\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"PRI * HTTP/2.0\r\n",
        ]
    )
    lines = st.sampled_from(
        [b"transfer-encoding: chunked\r\n", b"content-length: -1\r\n", b"content-length: " + b"9" * 5000 + b"\r\n",
         b"expect: 100-continue\r\n", b"host: x\r\n", b"upgrade: websocket\r\n", b"\r\n", b"0\r\n"]
    )  # fmt: skip

    @SHARED
    @given(st.lists(heads | lines | st.binary(max_size=30), max_size=8).map(b"".join))
    def send(noise: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
            try:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                answer = read_all(connection)
            except (ConnectionResetError, BrokenPipeError, OSError):
                return  # refused without reading what we sent
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 100"))

    return send


def for_pages(asking: http.client.HTTPConnection) -> Asks:
    """The status page is for its token alone."""
    signs = st.characters(min_codepoint=33, max_codepoint=255, exclude_categories=["Cc"])
    words = st.text(signs, max_size=60)

    @SHARED
    @given(
        st.sampled_from(["/status", "/status/", "/metrics", "/status/state", "/status/../rendezvous/hello"]),
        words,
        st.dictionaries(st.sampled_from(["cookie", "x-status-token", "authorization"]), words, max_size=3),
    )
    def ask(path: str, query: str, headers: dict[str, str]) -> None:
        asked = f"{path}?token={query.encode('ascii', 'ignore').decode()}"
        status, answer, _ = _ask(asking, "GET", asked, b"", headers)
        assert status in (307, 400, 401, 404)
        assert b"spark_elastic_" not in answer

    return ask
