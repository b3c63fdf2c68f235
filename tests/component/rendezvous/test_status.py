"""The status page over real sockets: beside the workers' gate, and behind a proxy that puts a prefix before it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urljoin

import pytest

from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.rendezvous.server import RendezvousServer
from tests.component.rendezvous.driver_side import PATIENCE, Visitor, get, serve_pages
from tests.patience import until

PREFIX = "/driver-proxy/4040"
ELSEWHERE = "127.0.0.2"  # for an address of this machine that localhost is not


@contextmanager
def proxy(address: str) -> Iterator[str]:
    """Passes GET below PREFIX on to the server, without it, as the proxies of notebooks and clusters do."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(PREFIX + "/"):
                self.send_error(404)
                return
            passed = {k: v for k, v in self.headers.items() if k.lower() in ("cookie", "x-status-token")}
            beyond = http.client.HTTPConnection(address, timeout=PATIENCE)
            beyond.request("GET", self.path.removeprefix(PREFIX), headers=passed)
            answer = beyond.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.read())
            beyond.close()

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
    with serve_pages() as (server, status_app), proxy(server.address) as prefix:
        visitor = Visitor()
        short = visitor.get(f"{prefix}/status?token={status_app.token}")
        assert short.url.startswith(f"{prefix}/status/?")
        assert "<h2>Workers" in short.text
        # As the page's script asks: by a relative address, with the cookie alone.
        data = visitor.get(urljoin(short.url, "data"))
        assert json.loads(data.text)["name"] == "job"
        assert "spark_elastic_world_size" in visitor.get(urljoin(short.url, "metrics")).text
        assert get(f"{prefix}/status/data").status == 401


def test_the_token_of_the_status_page_does_not_admit_to_the_rendezvous() -> None:
    with serve_pages() as (server, status_app):
        headers = {"x-status-token": status_app.token, "authorization": f"Bearer {status_app.token}"}
        for path in ("/rendezvous/hello", "/rendezvous/Report", "/status/data"):
            assert get(f"http://{server.address}{path}", headers, "POST").status == 401
        assert get(f"http://{server.address}/rendezvous/hello", headers).status == 401


@pytest.mark.parametrize("size", [20_000, 60_000])
def test_oversized_requests_are_refused_and_the_next_one_answered(size: int) -> None:
    with serve_pages() as (server, status_app):
        try:
            assert get(f"http://{server.address}/status/?token={'x' * size}").status in (400, 401)
        except (OSError, http.client.HTTPException):
            pass  # cut off while still sending
        assert get(status_app.url(server.url)).status == 200


def on_localhost(server: RendezvousServer) -> str:
    return server.address.replace(ELSEWHERE, "127.0.0.1")


def test_a_proxy_on_localhost_reaches_the_page_and_nothing_else() -> None:
    with serve_pages(bind=Bind(ELSEWHERE)) as (server, status_app), proxy(on_localhost(server)) as prefix:
        page = get(f"{prefix}/status/?token={status_app.token}")
        assert "<h2>Workers" in page.text
        assert get(f"{prefix}/status/data").status == 401
        assert get(f"http://{on_localhost(server)}/rendezvous/hello", method="POST").status == 401


def test_a_port_that_another_process_uses_on_localhost_is_not_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        port = theirs.getsockname()[1]
        with serve_pages(bind=Bind(ELSEWHERE, port)) as (server, status_app):
            assert get(status_app.url(server.url)).status == 200


def test_without_pages_there_is_none_and_nothing_listens_on_localhost() -> None:
    with serve_pages(bind=Bind(ELSEWHERE), pages=False) as (server, _):
        assert get(f"http://{server.address}/status/").status == 401
        host, port = on_localhost(server).split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)


def test_a_failure_of_the_page_on_localhost_does_not_disturb_the_rendezvous(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serve_pages(bind=Bind(ELSEWHERE)) as (server, status_app):
        assert server._http_server is not None
        http_server, beside = server._http_server, server._http_server.loopback
        assert beside is not None
        beside.shutdown(socket.SHUT_RDWR)
        until(lambda: http_server.loopback is None)
        assert get(status_app.url(server.url)).status == 200
    assert "starts again on the same port" in caplog.text
