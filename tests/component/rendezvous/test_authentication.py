"""P6 (key holders only): a peer without the job's key, or with malformed requests, gets nothing; the job continues."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.protocol.messages import Acknowledged, Heartbeat
from spark_elastic.rendezvous import auth, http1
from spark_elastic.rendezvous.addresses import Bind, listen
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.http_server import ConnectionLimits, HttpServer
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES, REQUESTS, VERSION, WatchSlot, path_of
from spark_elastic.rendezvous.server import Dispatcher
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, PATIENCE, Driver, RawClient, parse, read_all

BEAT = json.dumps({"v": VERSION, "attempt": ATTEMPT, "message": {"slot": "1-0", "state": ""}})

PATH = path_of(Heartbeat)


@pytest.fixture
def raw_client(driver: Driver) -> Iterator[RawClient]:
    """After the test a real slot is still answered, and no request of this client became an event."""
    yield RawClient(driver.port)
    assert driver.events.empty()
    assert driver.client().ask(Heartbeat("9-0")).heartbeat_interval
    assert driver.await_event(Heartbeat).slot == "9-0"


def test_no_path_answers_an_unsigned_request(raw_client: RawClient) -> None:
    for path in (auth.HELLO, "/", "/docs", "/rendezvous", *(path_of(request) for request in REQUESTS)):
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            assert raw_client.request(path, BEAT.encode(), None, method) == (401, b""), (method, path)


def test_a_forged_signature_is_refused(raw_client: RawClient) -> None:
    body, session = BEAT.encode(), raw_client.session()
    good = raw_client.sign(PATH, body, session)
    forged = [
        RawClient(raw_client._port, b"guess").sign(PATH, body, session),
        good[:-1] + ("0" if good[-1] != "0" else "1"),
        good.replace("Elastic", "Basic"),
        f"Elastic {session}.5",
        f"Elastic {session}.-5.{'0' * auth.SIGNATURE_DIGITS}",
        f"Elastic {session}.²5.{'0' * auth.SIGNATURE_DIGITS}",
        f"Elastic {session}.1e3.{'0' * auth.SIGNATURE_DIGITS}",
        f"Elastic {session}.{'1' * 16}.{'0' * auth.SIGNATURE_DIGITS}",
        raw_client.sign("/rendezvous/WorkerExited", body, session),
        raw_client.sign(PATH, body + b" ", session),
        raw_client.sign(PATH, body, auth.create_id()),
    ]
    for header in forged:
        assert raw_client.request(PATH, body, header) == (401, b""), header
    header = raw_client.sign(PATH, body, session)
    assert raw_client.request(PATH + "?slot=2", body, header)[0] == 401
    assert raw_client.request(PATH, body, header, "PUT")[0] == 401


def test_a_recorded_request_cannot_be_played_again(driver: Driver) -> None:
    thief = RawClient(driver.port)
    body, session = BEAT.encode(), thief.session()
    recorded = [thief.sign(PATH, body, session, count) for count in (1, 2, 3)]
    for header in recorded:
        assert thief.request(PATH, body, header)[0] == 200
        driver.await_event(Heartbeat)
    for header in reversed(recorded):
        assert thief.request(PATH, body, header) == (401, b"")
    assert driver.events.empty()


def test_an_honest_client_whose_session_was_forgotten_says_hello_again(driver: Driver) -> None:
    client = driver.client()
    client.ask(Heartbeat("1-0"))
    forgotten = auth.Sessions()
    driver.call_in_loop(lambda: setattr(driver.server._dispatcher, "_sessions", forgotten))
    client.ask(Heartbeat("1-0"))
    assert [driver.await_event(Heartbeat).slot for _ in range(2)] == ["1-0"] * 2


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(raw_client: RawClient) -> None:
    header, more = raw_client.sign(PATH, b""), {"content-length": str(MAX_BODY_BYTES + 1)}
    status, body = raw_client.request(PATH, b"", header, more=more)
    assert (status, body) == (413, b"")
    # Without the key not even the size is looked at.
    status, _ = raw_client.request(PATH, b"", None, more=more)
    assert status == 401


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[]", "the body is not a JSON object"),
        (b"{" * 100_000, "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"slot": NaN}', "the body is not JSON"),
        (b'{"slot": 5}', "Heartbeat.slot must be str, not int"),
        (b"{}", "Heartbeat lacks slot"),
        (b'{"slot": "1-0", "more": 1}', "Heartbeat has no field 'more'"),
        (BEAT.replace(f'"attempt": {ATTEMPT}', '"attempt": true').encode(), "attempt must be int"),
        (BEAT.replace("{", '{"hold": "long", ', 1).encode(), "hold must be a number of seconds"),
        (BEAT.replace(f'"v": {VERSION}', '"v": 99').encode(), f"version 99 and the driver speaks {VERSION}"),
    ],
    ids=lambda text: repr(text[:48]),
)
def test_a_garbled_body_gets_a_sentence(raw_client: RawClient, body: bytes, why: str) -> None:
    if body.startswith((b'{"slot', b"{}")):
        body = b'{"v": %d, "attempt": %d, "message": %s}' % (VERSION, ATTEMPT, body)
    status, answer = raw_client.request(PATH, body, raw_client.sign(PATH, body))
    assert status == 400
    error = json.loads(answer)["error"]
    assert error.startswith(f"Request {PATH} was refused: ")
    assert why in error


@contextmanager
def serve(limits: ConnectionLimits, certificate: auth.Certificate | None = None) -> Iterator[int]:
    """The port of a server of its own."""
    dispatcher = Dispatcher(KEY, ATTEMPT, {Heartbeat: lambda message: Acknowledged()})
    listener = listen(Bind())
    serving = HttpServer(dispatcher, listener, limits, certificate and certificate.context)
    serving.start()
    try:
        yield listener.getsockname()[1]
    finally:
        serving.close()


@pytest.fixture
def impatient() -> Iterator[int]:
    with serve(ConnectionLimits(head_seconds=0.1, body_seconds=0.1)) as port:
        yield port


WHOLE = b"POST /rendezvous/Heartbeat HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("said", "status"), [(b"", 0), (WHOLE[:20], 0), (WHOLE, 0), (WHOLE + b"\r\nPOST", 401)]
)
def test_a_connection_without_a_request_head_is_closed_after_its_deadline(
    impatient: int, said: bytes, status: int
) -> None:
    """Without a deadline the read would last until the test's own timeout."""
    assert parse(RawClient(impatient).send(said)) == (status, b"")


def test_a_request_without_its_body_is_closed_after_its_deadline(impatient: int) -> None:
    raw_client = RawClient(impatient)
    header = raw_client.sign(PATH, b"")
    status, _ = raw_client.request(PATH, b"{", header, more={"content-length": "100"})
    assert status == 408
    assert raw_client.request("/", b"", None)[0] == 401


def test_requests_in_pieces_and_in_one_piece_are_answered_in_order(driver: Driver) -> None:
    raw_client = RawClient(driver.port)
    session, texts = raw_client.session(), []
    for _ in range(3):
        body = BEAT.encode()
        signed = [("authorization", raw_client.sign(PATH, body, session))]
        texts.append(http1.encode_request(PATH, "x", signed, body))
    end = b"GET / HTTP/1.0\r\n\r\n"
    answers = raw_client.send(b"".join(texts) + end)
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")] == [b"", b"200", b"200", b"200", b"401"]
    signed = [("authorization", raw_client.sign(PATH, body, session))]
    with socket.create_connection(("127.0.0.1", driver.port), timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in http1.encode_request(PATH, "x", signed, body):
            connection.sendall(bytes([byte]))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_sends_on_while_its_answer_is_awaited_is_hung_up_on(driver: Driver) -> None:
    body = json.dumps({"v": VERSION, "attempt": ATTEMPT, "hold": 20, "message": {"slot": "1-0"}}).encode()
    path, raw_client = path_of(WatchSlot), RawClient(driver.port)
    text = http1.encode_request(path, "x", [("authorization", raw_client.sign(path, body))], body)
    assert raw_client.send(text + bytes(20_000)) == b""


def test_a_server_that_can_open_no_more_files_serves_again_once_it_can(driver: Driver) -> None:
    driver.client().ask(Heartbeat("1-0"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as connection:
        connection.settimeout(PATIENCE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno() + 1, hard))
        try:
            connection.connect(("127.0.0.1", driver.port))
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            driver.call_in_loop(lambda: None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert parse(read_all(connection))[0] == 401


THREE_STRANGERS = ConnectionLimits(head_seconds=600.0, unauthenticated=3)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_unauthenticated_clients_cannot_take_all_connections(encrypted: bool) -> None:
    """With one more than there may be, the first is hung up on; whoever proved the key keeps its connection. Strangers
    that never begin to speak of TLS count as well."""
    certificate = auth.create_certificate() if encrypted else None
    with serve(THREE_STRANGERS, certificate) as port:
        keep_honest_connection(port, certificate)


def keep_honest_connection(port: int, certificate: auth.Certificate | None) -> None:
    honest = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    if certificate is not None:
        context = auth.create_pinned_context(certificate.public)
        honest = http.client.HTTPSConnection("127.0.0.1", port, timeout=PATIENCE, context=context)
    silent: list[socket.socket] = []
    count = itertools.count(1)
    session = auth.create_id()

    def ask(path: str, body: str, number: int) -> bytes:
        header = auth.sign_request(KEY, path, session, number, body.encode()).header()
        honest.request("POST", path, body, {"authorization": header})
        answer = honest.getresponse()
        assert answer.status == 200
        return answer.read()

    try:
        session = str(json.loads(ask(auth.HELLO, "", 0))["session"])
        ask(PATH, BEAT, next(count))
        kept = honest.sock
        silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(6)]
        for hung_up_on in silent[:3]:
            assert hung_up_on.recv(1) == b""
        ask(PATH, BEAT, next(count))
        assert honest.sock is kept
        for still_there in silent[3:]:
            if certificate is not None:
                still_there = auth.create_pinned_context(certificate.public).wrap_socket(still_there)
                silent.append(still_there)
            still_there.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert parse(read_all(still_there))[0] == 401
    finally:
        for connection in (honest, *silent):
            connection.close()


def test_replayed_hellos_hold_no_more_connections_than_silence_does() -> None:
    hello = auth.sign_request(KEY, auth.HELLO, auth.create_id(), 0, b"").header()
    replay = f"POST {auth.HELLO} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nauthorization: {hello}\r\n\r\n"
    thieves: list[socket.socket] = []
    with ExitStack() as stack:
        port = stack.enter_context(serve(THREE_STRANGERS))
        client = stack.enter_context(RendezvousClient(f"127.0.0.1:{port}", KEY, ATTEMPT, SystemClock()))
        client.ask(Heartbeat("1-0"))
        for _ in range(6):
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            thieves.append(stack.enter_context(connection))
            thieves[-1].sendall(replay.encode())
            assert thieves[-1].recv(65536).startswith(b"HTTP/1.1 200")
        for hung_up_on in thieves[:3]:
            assert read_all(hung_up_on) == b""
        client.ask(Heartbeat("1-0"))


def test_connections_whose_tls_handshake_fails_are_forgotten() -> None:
    """Else those who came later would be hung up on for their sake."""
    with serve(THREE_STRANGERS, auth.create_certificate()) as port:
        address = "127.0.0.1", port
        with socket.create_connection(address, timeout=PATIENCE) as first:
            for _ in range(6):
                with socket.create_connection(address, timeout=PATIENCE) as noisy:
                    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    read_all(noisy)
            first.setblocking(False)
            with pytest.raises(BlockingIOError):
                first.recv(1)


def test_unauthenticated_requests_cost_one_line_of_the_log(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither noise nor requests for WebSockets fill the driver's log, or advise anybody to install packages."""
    raw_client, upgrade = RawClient(driver.port), {"connection": "close, upgrade", "upgrade": "websocket"}
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            assert parse(raw_client.send(b"noise\r\n\r\n"))[0] == 400
            raw_client.request("/", b"", None, "GET", upgrade)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("The driver's server refused 1 request (the last one: Invalid HTTP")
    assert "pip install" not in caplog.text
