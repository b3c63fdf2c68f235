"""A catalog that speaks the published APIs of Iceberg REST and Unity Catalog, and vends keys that end soon.

It answers in threads of `http.server`. The keys that it has vended are in `ends`, by which an S3 server can heed them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-token-that-no-log-shows"
SECRET = "a-vended-secret-that-no-log-shows"
UNITY = "/api/2.1/unity-catalog"
REST = "/v1"


class ThreadedServer(ThreadingHTTPServer):
    """`start` and `stop` belong to one thread; the attributes may be read and set by any."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answers: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name=type(self).__name__)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class CatalogServer(ThreadedServer):
    def __init__(self, endpoint: str) -> None:
        super().__init__(_Answers)
        self.endpoint = endpoint  # of S3, which Iceberg's catalogs name
        # Seconds for which keys are valid, and whether the answer says so.
        self.seconds, self.says_when = 3600.0, True
        self.token = TOKEN  # that is taken
        self.status: int | None = None  # of each answer, instead
        # Name -> TableInfo of Unity Catalog, or metadata's place and content of Iceberg.
        self.unity: dict[str, dict[str, Any]] = {}
        self.iceberg: dict[str, tuple[str, dict[str, Any]]] = {}
        self.views: set[str] = set()
        self.config: dict[str, str] = {}  # of each table of Iceberg, instead of keys
        self.ends: dict[str, float] = {}  # session token -> when it ends
        self.requests: Counter[str] = Counter()

    def vend(self) -> tuple[str, float]:
        """A session token, and when it ends."""
        token, end = f"session-{len(self.ends)}-{SECRET}", time.time() + self.seconds
        self.ends[token] = end
        return token, end


class _Answers(BaseHTTPRequestHandler):
    server: CatalogServer

    def _answer(self) -> None:
        method, length = self.command, int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        path = self.path.partition("?")[0]
        self.server.requests[f"{method} {path}"] += 1
        sent = self.headers.get("Authorization")
        if self.server.status is not None:
            self._send(self.server.status, _fail("ServiceUnavailable", "busy", self.server.status))
        elif sent != f"Bearer {self.server.token}":
            self._send(401, _fail("NotAuthorizedException", f"no such token: {sent}", 401))
        elif path.startswith(UNITY):
            self._send(*self._answer_unity(method, path.removeprefix(UNITY), body))
        else:
            self._send(*self._answer_iceberg(path.removeprefix(REST)))

    do_GET = do_HEAD = do_POST = _answer

    def _answer_unity(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method == "GET":
            name = path.removeprefix("/tables/")
            if name in self.server.unity:
                return 200, self.server.unity[name]
            return 404, {"error_code": "TABLE_DOES_NOT_EXIST", "message": f"Table '{name}' does not exist."}
        assert (path, body["operation"]) == ("/temporary-table-credentials", "READ")
        assert body["table_id"] in {each["table_id"] for each in self.server.unity.values()}
        token, end = self.server.vend()
        keys = {"access_key_id": "vended", "secret_access_key": SECRET, "session_token": token}
        when = {"expiration_time": int(end * 1000)} if self.server.says_when else {}
        return 200, {"aws_temp_credentials": keys, **when}

    def _answer_iceberg(self, path: str) -> tuple[int, Any]:
        if path == "/config":
            return 200, {"defaults": {}, "overrides": {}}
        _, space, kind, name = path.removeprefix("/").split("/")
        full = f"{space}.{name}"
        if kind == "views" and full in self.server.views:
            return 204, None
        if kind != "tables" or full not in self.server.iceberg:
            return 404, _fail("NoSuchTableException", f"Table does not exist: {full}", 404)
        place, metadata = self.server.iceberg[full]
        answer = {"metadata-location": place, "metadata": metadata, "config": self.server.config}
        if not self.server.config and self.headers.get("X-Iceberg-Access-Delegation") == "vended-credentials":
            token, end = self.server.vend()
            config = {
                "s3.access-key-id": "vended",
                "s3.secret-access-key": SECRET,
                "s3.session-token": token,
                "s3.endpoint": self.server.endpoint,
                "client.region": "us-east-1",
            }
            if self.server.says_when:
                config["s3.session-token-expires-at-ms"] = str(int(end * 1000))
            answer["storage-credentials"] = [{"prefix": "s3://", "config": config}]
        return 200, answer

    def _send(self, status: int, answer: Any) -> None:
        content = b"" if answer is None or self.command == "HEAD" else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


def _fail(kind: str, message: str, status: int) -> dict[str, Any]:
    """An error as Iceberg's catalogs send it, with Unity Catalog's message beside."""
    return {"error": {"message": message, "type": kind, "code": status}, "message": message}
