"""The status page over real sockets: beside the workers' gate, and behind a proxy that puts a prefix before it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.monitoring.job_history import JobHistory
from spark_elastic.monitoring.status import build_status_pages
from spark_elastic.rendezvous.http_server import Bind
from spark_elastic.rendezvous.routes import ServerCallbacks
from spark_elastic.rendezvous.server import RendezvousServer
from spark_elastic.rendezvous.status_app import StatusApp

PREFIX = "/driver-proxy/4040"
ELSEWHERE = "127.0.0.2"  # for an address of this machine that localhost is not


@contextmanager
def serve(bind: Bind | None = None) -> Iterator[tuple[RendezvousServer, StatusApp]]:
    clock = SystemClock()
    status_app = StatusApp(build_status_pages(JobHistory(clock), "job"), clock)
    recipients = ServerCallbacks(lambda event: None, lambda lines: None)
    with RendezvousServer(bytes(32), 1, recipients, clock, bind, status_app) as server:
        yield server, status_app


@contextmanager
def proxy(address: str) -> Iterator[str]:
    """Passes GET below PREFIX on to the server, without it, as the proxies of notebooks and clusters do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(PREFIX + "/"):
                self.send_error(404)
                return
            passed = {k: v for k, v in self.headers.items() if k.lower() in ("cookie", "x-status-token")}
            answer = httpx.get(f"http://{address}{self.path.removeprefix(PREFIX)}", headers=passed)
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}"
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def test_page_data_and_metrics_behind_a_path_prefix() -> None:
    with (
        serve() as (server, status_app),
        proxy(server.address) as prefix,
        httpx.Client(follow_redirects=True) as visitor,
    ):
        short = visitor.get(f"{prefix}/status?token={status_app.token}")
        assert str(short.url).startswith(f"{prefix}/status/?")
        assert "<h2>Workers</h2>" in short.text
        # As the page's script asks: by a relative address, with the cookie alone.
        data = visitor.get(urljoin(str(short.url), "data"))
        assert data.json()["name"] == "job"
        assert "spark_elastic_world_size" in visitor.get(urljoin(str(short.url), "metrics")).text
        assert httpx.get(f"{prefix}/status/data").status_code == 401


def test_the_token_of_the_status_page_does_not_admit_to_the_rendezvous() -> None:
    with serve() as (server, status_app):
        headers = {"x-status-token": status_app.token, "authorization": f"Bearer {status_app.token}"}
        for path in ("/rendezvous/hello", "/rendezvous/Report", "/status/data"):
            assert httpx.post(f"http://{server.address}{path}", headers=headers).status_code == 401
        assert httpx.get(f"http://{server.address}/rendezvous/hello", headers=headers).status_code == 401


@pytest.mark.parametrize("size", [20_000, 60_000])
def test_oversized_requests_are_refused_and_the_next_one_answered(size: int) -> None:
    with serve() as (server, status_app):
        try:
            answer = httpx.get(f"http://{server.address}/status/", params={"token": "x" * size})
            assert answer.status_code in (400, 401, 414, 431)
        except httpx.HTTPError:
            pass  # cut off while still sending
        assert httpx.get(status_app.url(server.url)).status_code == 200


def test_without_a_status_app_there_is_no_page() -> None:
    recipients = ServerCallbacks(lambda event: None, lambda lines: None)
    with RendezvousServer(bytes(32), 1, recipients, SystemClock()) as server:
        assert httpx.get(f"http://{server.address}/status/").status_code == 401


def on_localhost(server: RendezvousServer) -> str:
    return server.address.replace(ELSEWHERE, "127.0.0.1")


def test_a_proxy_on_localhost_reaches_the_page_and_nothing_else() -> None:
    with serve(Bind(ELSEWHERE)) as (server, status_app), proxy(on_localhost(server)) as prefix:
        page = httpx.get(f"{prefix}/status/?token={status_app.token}")
        assert "<h2>Workers</h2>" in page.text
        assert httpx.get(f"{prefix}/status/data").status_code == 401
        assert httpx.post(f"http://{on_localhost(server)}/rendezvous/hello").status_code == 401


def test_a_port_that_another_process_uses_on_localhost_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        with serve(Bind(ELSEWHERE, port)) as (server, status_app):
            assert httpx.get(status_app.url(server.url)).status_code == 200


def test_without_pages_nothing_listens_on_localhost() -> None:
    recipients = ServerCallbacks(lambda event: None, lambda lines: None)
    with RendezvousServer(bytes(32), 1, recipients, SystemClock(), Bind(ELSEWHERE)) as server:
        host, port = on_localhost(server).split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)


def test_a_failure_of_the_page_on_localhost_does_not_disturb_the_rendezvous(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve(Bind(ELSEWHERE)) as (server, status_app):
        assert server._http_server is not None
        beside = server._http_server._loopback
        assert beside is not None
        beside.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 20
        while server._http_server._loopback is not None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        again = httpx.Client(transport=httpx.HTTPTransport(retries=5))
        assert again.get(status_app.url(server.url)).status_code == 200
        again.close()
    assert "starts again on the same port" in caplog.text
