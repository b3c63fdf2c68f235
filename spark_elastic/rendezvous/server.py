"""The rendezvous server of a job: takes the driver's decisions in, and posts what workers and slots send.

The driver's calls come from its loop thread and return at once; all state belongs to the HTTP server's thread.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous.http1 import HttpRequest, Response
from spark_elastic.rendezvous.http_server import (
    AnswerBody,
    Bind,
    HttpServer,
    format_address,
    listen,
    listen_on_loopback,
)
from spark_elastic.rendezvous.routes import Dispatcher, Routes, ServerCallbacks
from spark_elastic.rendezvous.server_state import ServerState
from spark_elastic.rendezvous.status_app import StatusApp

log = logging.getLogger("spark_elastic.rendezvous")

MIN_KEY_BYTES = 16


@dataclass(eq=False, repr=False)
class RendezvousServer:
    """The driver's server. Its methods may be called from any thread and return at once."""

    key: bytes  # the job's secret
    attempt: int  # of the run; requests of another attempt are answered as stale (R10, fence)
    callbacks: ServerCallbacks
    clock: Clock
    bind: Bind | None = None  # None: any port of localhost
    status_app: StatusApp | None = None  # serves the status page, on localhost too; None: no page

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_BYTES:
            raise InvalidInput(
                f"The job's key has {len(self.key)} bytes; it needs {MIN_KEY_BYTES} random ones at least."
            )
        self._bind = self.bind or Bind()
        if self._bind.advertise is None and _is_wildcard(self._bind.host):
            raise InvalidInput(
                f"The driver binds every interface ({self._bind.host}) and cannot tell which address executors "
                "reach: set advertise_address or spark.driver.host."
            )
        self._state = ServerState(self.attempt)
        routes = Routes(self._state, self.callbacks, self.clock)
        self._dispatcher = Dispatcher(self.key, self.attempt, routes.handlers())
        self._http_server: HttpServer | None = None
        self.address = ""  # what clients dial: "host:port", or "[host]:port" for IPv6

    def start(self) -> None:
        """Bind and serve; `InvalidInput`: the address cannot be bound."""
        listener = listen(self._bind)
        self.address = format_address(self._bind, listener)
        certificate = self._bind.certificate
        tls = certificate.context if certificate else None
        loopback = listen_on_loopback(listener) if self.status_app is not None else None
        self._http_server = HttpServer(self._answer, listener, tls=tls, loopback=loopback)
        self._http_server.start()

    def close(self) -> None:
        """Answer every open request with the end, and stop; the port is free afterwards."""
        if self._http_server is not None:
            self.end("the driver has closed")
            self._http_server.close()

    def __enter__(self) -> RendezvousServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def certificate(self) -> str | None:
        """What clients must see, PEM; None where the server speaks plain HTTP."""
        return self._bind.certificate.public if self._bind.certificate else None

    @property
    def url(self) -> str:
        return f"{'https' if self._bind.certificate else 'http'}://{self.address}"

    def publish(self, world: World) -> None:
        """Answer the requests of its members for it, now and later, and open its exchange."""
        self._submit(lambda: self._state.publish(world))

    def abort(self, fence: Fence, reason: str) -> None:
        """That generation is over: wake its watchers and close its exchange."""
        self._submit(lambda: self._state.abort(fence, reason))

    def announce(self, version: MembershipVersion) -> None:
        self._submit(lambda: self._state.announce(version))

    def stop_worker(self, worker: WorkerId, reason: str, kill: bool = False) -> None:
        self._submit(lambda: self._state.stop_worker(worker, reason, kill))

    def release_slot(self, slot: SlotId, reason: str) -> None:
        self._submit(lambda: self._state.release_slot(slot, reason))

    def end(self, reason: str) -> None:
        """The job is over: every open and later request is answered with the end."""
        self._submit(lambda: self._state.end(reason))

    def _answer(self, request: HttpRequest) -> Response | AnswerBody:
        if self.status_app is not None and self.status_app.handles(request):
            return self.status_app.answer(request)
        return self._dispatcher(request)

    def _submit(self, call: Callable[[], None]) -> None:
        if self._http_server is None:
            raise RuntimeError("start() the rendezvous server first")
        self._http_server.submit(call)


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
