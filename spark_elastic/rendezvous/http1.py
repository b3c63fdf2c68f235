"""HTTP/1.1 messages as text, read strictly: what is not plainly well formed is refused.

It speaks what the job's client, browsers and scrapers need: bodies have a content-length, so there is neither chunked
transfer nor an upgrade, and nothing that two readers could understand differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD_BYTES = 16384
END_OF_HEAD = b"\r\n\r\n"

_REQUEST_LINE = re.compile(r"([A-Z]{1,16}) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(r"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")

Fields = dict[str, str]  # values by name in lower case


class MalformedHead(ValueError):
    """Not what HTTP/1.1 speaks here."""


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    query: str  # behind the question mark; "" if there is none
    fields: Fields
    length: int  # bytes of the body
    is_last: bool  # the client wants the connection closed behind the answer
    is_encrypted: bool = False  # it came through TLS; the connection knows


@dataclass(slots=True)
class Response:
    status: int
    body: bytes = b""
    fields: tuple[tuple[str, str], ...] = ()
    is_authenticated: bool = False  # the request was its sender's own, who proved a key or a token
    is_last: bool = False  # the connection closes behind it

    def encode(self, with_body: bool = True) -> bytes:
        """The text that travels, in one piece: a second system call would be a third of an answer's cost."""
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.fields]
        lines.append(f"content-length: {len(self.body)}")
        if self.is_last:
            lines.append("connection: close")
        head = "\r\n".join(lines).encode("latin-1") + END_OF_HEAD
        return head + self.body if with_body else head


def encode_request(path: str, host: str, fields: Iterable[tuple[str, str]], body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields]
    return "\r\n".join(lines).encode("latin-1") + END_OF_HEAD + body


def parse_request(head: bytes) -> HttpRequest:
    """The request whose head is `head`, without the empty line; raises `MalformedHead`."""
    line, *lines = head.decode("latin-1").split("\r\n")
    parts = _REQUEST_LINE.fullmatch(line)
    if parts is None:
        raise MalformedHead("its first line is not that of a request")
    fields = _parse_fields(lines)
    method, target, minor = parts.groups()
    path, _, query = target.partition("?")
    if minor == "1" and "host" not in fields:
        raise MalformedHead("it names no host")
    is_last = minor == "0" or "close" in fields.get("connection", "").lower()
    return HttpRequest(method, path, query, fields, _read_length(fields), is_last)


def parse_response(head: bytes) -> tuple[int, Fields, int]:
    """Status, fields and number of bytes of the body; raises `MalformedHead`."""
    line, *lines = head.decode("latin-1").split("\r\n")
    parts = _STATUS_LINE.fullmatch(line)
    if parts is None:
        raise MalformedHead("its first line is not that of an answer")
    fields = _parse_fields(lines)
    return int(parts[1]), fields, _read_length(fields)


def _parse_fields(lines: list[str]) -> Fields:
    fields: Fields = {}
    for line in lines:
        parts = _FIELD.fullmatch(line)
        if parts is None:
            raise MalformedHead("a line of its head is not a field")
        name, value = parts[1].lower(), parts[2].rstrip(" \t")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value  # twice is none for a length
    return fields


def _read_length(fields: Fields) -> int:
    text = fields.get("content-length", "0")
    if "transfer-encoding" in fields or not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise MalformedHead("the length of its body is not given by one content-length")
    return int(text)
