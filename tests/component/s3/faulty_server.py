"""An S3 server that fails: an HTTP proxy before moto's server, which injects faults by a seeded generator.

Each request is answered by a thread of its own, as `http.server` does it. Faults that answer with a body cut, slow or
reset take effect on requests that have one; those of writes come before or after the server has done the write.
"""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit

from tests.component.s3.catalog_server import ThreadedServer

THROTTLED = "503 SlowDown"
RESET = "connection reset before the answer"
LOST = "connection reset after the request was done"
CUT = "answer cut, with the full length in its header"
RESET_BODY = "connection reset in the middle of the answer"
SLOW = "a byte at a time"
SILENT = "no answer"
FAULTS = (THROTTLED, RESET, LOST, CUT, RESET_BODY, SLOW, SILENT)

_ERROR = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{}</Code><Message>{}</Message></Error>"
_HOP = {"connection", "transfer-encoding", "content-length", "date", "server", "keep-alive"}


class FaultyServer(ThreadedServer):
    """The proxy."""

    def __init__(self, endpoint: str, seed: int) -> None:
        super().__init__(_Proxy)
        self.origin = urlsplit(endpoint).netloc
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._at_once = 0
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """No faults from now on, and nothing counted."""
        self.rates: Mapping[str, float] = {}  # fault -> its probability; may be changed at any time
        # The session token that is valid, or those and when each ends; others are refused as expired. None: all are.
        self.token: str | None = None
        self.ends: Mapping[str, float] | None = None
        self.expired = 0  # requests that were refused as expired
        self.away = False  # whether nobody answers
        self.injected: Counter[str] = Counter()  # how often each fault was injected
        self.requests = self.most_at_once = 0  # requests that came, and the most that were answered at once
        self._random = random.Random(seed)

    def stop(self) -> None:
        """Also ends the answers under way."""
        self.stopped.set()
        super().stop()

    def draw_fault(self) -> str | None:
        """The fault of the next request, counted."""
        with self._lock:
            self.requests += 1
            if self.away:
                return RESET
            drawn = self._random.random()
            for fault, rate in self.rates.items():
                if drawn < rate:
                    self.injected[fault] += 1
                    return fault
                drawn -= rate
        return None

    def enter(self, by: int) -> None:
        """Counts an answer that begins (1) or ends (-1)."""
        with self._lock:
            self._at_once += by
            self.most_at_once = max(self.most_at_once, self._at_once)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what this server is for."""


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def _answer(self) -> None:
        self.server.enter(1)
        try:
            self._answer_once()
        finally:
            self.server.enter(-1)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer

    def _answer_once(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token, ends = self.server.token, self.server.ends
        sent = self.headers.get("x-amz-security-token")
        is_over = ends is not None and time.time() >= ends.get(sent or "", 0.0)
        if is_over or (token is not None and sent != token):
            self.server.expired += 1
            self._refuse(403, "ExpiredToken", "The provided token has expired.")
            return
        fault = self.server.draw_fault()
        if fault == THROTTLED:
            self._refuse(503, "SlowDown", "Please reduce your request rate.")
        elif fault == RESET:
            self._reset()
        elif fault == SILENT:
            self._stall()
        else:
            self._forward(body, fault)

    def _forward(self, body: bytes, fault: str | None) -> None:
        origin = http.client.HTTPConnection(self.server.origin, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
            origin.request(self.command, self.path, body, headers)
            answer = origin.getresponse()
            content = answer.read()
        finally:
            origin.close()
        if fault == LOST:
            self._reset()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self._send(content, fault)

    def _send(self, content: bytes, fault: str | None) -> None:
        half = len(content) // 2
        if fault in (CUT, RESET_BODY) and content:
            self.wfile.write(content[:half])
            self.wfile.flush()
            if fault == CUT:
                self.close_connection = True
            else:
                self._reset()
        elif fault == SLOW:
            for place in range(len(content)):
                self.wfile.write(content[place : place + 1])
                if self.server.stopped.wait(0.25):
                    break
        else:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str, message: str) -> None:
        content = _ERROR.format(code, message).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _stall(self) -> None:
        """Say nothing until the client goes away."""
        self.connection.settimeout(0.2)
        while not self.server.stopped.is_set():
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""
