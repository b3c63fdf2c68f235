"""The rendezvous server of a job: takes the driver's decisions in, and posts what slots and workers send.

The driver's calls come from its loop thread and return at once; all state belongs to the HTTP server's thread, in which
requests are handled. Checks of a request run in order of their cost: credentials of a known session (401 without
content, before any byte of the body is read), size (413), signature and replay (401), form and version (400). What must
wait is a long poll.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol import events, messages
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous import auth, codec
from spark_elastic.rendezvous import messages as wire
from spark_elastic.rendezvous.addresses import Bind, format_address, listen, listen_on_loopback
from spark_elastic.rendezvous.http1 import HttpRequest, Response
from spark_elastic.rendezvous.http_server import AfterPass, AnswerBody, HttpServer, LongPoll, Subject, Wait
from spark_elastic.rendezvous.server_state import ServerState, name_generation_scope
from spark_elastic.rendezvous.status_app import StatusApp

log = logging.getLogger("spark_elastic.rendezvous")

MIN_KEY_BYTES = 16
ACKNOWLEDGED = messages.Acknowledged()

Handler = Callable[[Any], object]  # given a message: the reply, or the long poll that waits for it
Handlers = Mapping[type[messages.DriverRequest[Any]], Handler]
Peer = tuple[SlotId, WorkerId | None]
PeerRequest: TypeAlias = messages.SlotRequest[Any] | messages.WorkerRequest[Any]
NextWorldRequest: TypeAlias = messages.RequestNextWorld | messages.WorkerDone


class ConnectionTracker:
    """Which slots and workers have a long poll open. A peer is lost when its last one breaks, until its next request:
    one that dials again before the server sees the end of the old connection is not lost in between."""

    def __init__(self, post: Callable[[DriverEvent], None], clock: Clock) -> None:
        self._post, self._clock = post, clock
        self._open: Counter[Peer] = Counter()
        self.slot_count = 0  # slots that have a long poll open
        self._lost: set[Peer] = set()

    def mark_connected(self, peer: Peer) -> None:
        if peer in self._lost:
            self._lost.discard(peer)
            self._post(events.ConnectionBack(self._clock.now(), *peer))

    def open_poll(self, peer: Peer) -> None:
        self._count(peer, 1)

    def close_poll(self, peer: Peer, reset: bool | None) -> None:
        """reset: None unless its connection broke; then, whether the network reset it."""
        if not self._count(peer, -1) and reset is not None:
            self._lost.add(peer)
            self._post(events.ConnectionLost(self._clock.now(), *peer, reset=reset))

    def _count(self, peer: Peer, change: int) -> int:
        """Returns how many long polls the peer has open now."""
        before = self._open[peer]
        now = self._open[peer] = before + change
        if not now:
            del self._open[peer]
        if peer[1] is None:
            self.slot_count += bool(now) - bool(before)
        return now


@dataclass(frozen=True)
class ServerCallbacks:
    """What the server calls for events, output and decisions. No callable may block."""

    post: Callable[[DriverEvent], None]  # takes the driver's events, in the loop's thread
    on_logs: Callable[[wire.LogLines], None]  # takes workers' output
    admit: Callable[[dict[str, Any]], str | None] = lambda facts: None  # the refusal, by facts
    on_report: Callable[[wire.Report], None] = lambda report: None  # takes workers' progress
    heartbeat_interval: Callable[[int], float] = lambda slots: 1.0  # seconds, by number of slots
    wake: Callable[[], None] = lambda: None  # called after posts, once for all requests that came at a time


class Routes:
    def __init__(self, state: ServerState, callbacks: ServerCallbacks, clock: Clock) -> None:
        self._state = state
        self._callbacks = callbacks
        self._clock = clock
        self._connections = ConnectionTracker(self._post, clock)
        self._waking = AfterPass(callbacks.wake)
        end = self._end_poll
        self._for_world = Wait(Subject.WORLD, self._find_next_world, end)
        self._for_update = Wait(Subject.UPDATE, self._find_update, end)
        self._for_commands = Wait(Subject.COMMANDS, self._find_commands, end)
        self._for_addresses = Wait(Subject.VALUES, self._find_known_addresses, end)
        self._for_values = Wait(Subject.VALUES, self._find_values)

    def handlers(self) -> Handlers:
        own: Handlers = {
            messages.RegisterSlot: self._register,
            messages.Heartbeat: self._heartbeat,
            messages.RequestNextWorld: self._next_world,
            messages.WorkerDone: self._next_world,
            wire.LogLines: self._logs,
            wire.WatchSlot: lambda watch: self._find_or_wait(self._for_commands, watch.slot, watch),
            wire.WatchWorker: lambda watch: self._find_or_wait(self._for_update, watch.worker, watch),
            wire.Report: self._report,
            wire.FindAddresses: self._find_addresses,
            wire.SetValues: self._set,
            wire.GetValues: self._get,
            wire.ListKeys: lambda asked: wire.Keys(self._state.values.list_keys(asked.scope, asked.prefix)),
            wire.CompareAndSet: self._compare_and_set,
        }
        return {request: own.get(request, self._acknowledge) for request in wire.REQUESTS}

    # ---- messages for the driver machine

    def _acknowledge(self, message: messages.DriverMessage) -> messages.Acknowledged:
        if isinstance(message, messages.WorldFormed):
            self._refuse_stale(message.fence)
        self._receive(message)
        return ACKNOWLEDGED

    def _register(self, message: messages.RegisterSlot) -> messages.Admission:
        unfit = message.unfit or self._callbacks.admit(message.facts) or ""
        self._receive(dataclasses.replace(message, unfit=unfit))
        refusal = self._state.ended or unfit
        return messages.Admission(not refusal, refusal, self._compute_interval())

    def _heartbeat(self, message: messages.Heartbeat) -> messages.HeartbeatReply:
        self._receive(message)
        return messages.HeartbeatReply(self._compute_interval())

    def _compute_interval(self) -> float:
        return self._callbacks.heartbeat_interval(self._connections.slot_count)

    def _next_world(self, message: NextWorldRequest) -> object:
        """Answers with the next world or the end; posts the message unless the answer is there already."""
        self._connections.mark_connected(_sender(message))
        self._state.set_address(message.worker, message.address)
        reply = self._find_next_world(message, False)
        if reply is not None:
            return reply
        if isinstance(message, messages.RequestNextWorld):
            message = self._name_suspects(message)
        self._receive(message)
        return self._wait(self._for_world, message.worker, message)

    def _find_next_world(self, message: NextWorldRequest, is_last: bool) -> messages.NextWorld | None:
        stop = self._state.get_stop_reason(message.worker)
        if stop is not None:
            return messages.NextWorld(stop=stop)
        found = self._state.find_next_world(message.worker, message.fence)
        return messages.NextWorld() if found is None and is_last else found

    def _name_suspects(self, message: messages.RequestNextWorld) -> messages.RequestNextWorld:
        world = self._state.find_world(message.fence) if message.suspected_ranks and message.fence else None
        members = () if world is None else world.members
        ranks = [rank for rank in message.suspected_ranks if 0 <= rank < len(members)]
        suspects = tuple(members[rank].worker for rank in ranks)
        return dataclasses.replace(message, suspects=(*message.suspects, *suspects)) if suspects else message

    def _receive(self, message: messages.DriverMessage) -> None:
        self._connections.mark_connected(_sender(message))
        self._post(events.Received(self._clock.now(), message))

    def _post(self, event: DriverEvent) -> None:
        """The driver has the event. Its thread is woken after the requests that are here: it would take the interpreter
        from this one, which has answers to send."""
        self._callbacks.post(event)
        self._waking.request()

    # ---- messages that the server answers by itself

    def _logs(self, message: wire.LogLines) -> messages.Acknowledged:
        self._callbacks.on_logs(message)
        return ACKNOWLEDGED

    def _find_commands(self, message: wire.WatchSlot, is_last: bool) -> wire.SlotCommands | None:
        now = self._state.get_commands(message.slot, message.seen)
        return now if is_last or now.workers_to_stop or now.release is not None else None

    def _find_update(self, message: wire.WatchWorker, is_last: bool) -> wire.WorkerUpdate | None:
        now = self._state.get_update(message.worker)
        known = message.version, message.ended_fence, None
        return now if is_last or (now.version, now.ended_fence, now.stop) != known else None

    def _report(self, message: wire.Report) -> messages.Acknowledged:
        self._callbacks.on_report(dataclasses.replace(message, numbers=codec.decode_numbers(message.numbers)))
        return ACKNOWLEDGED

    def _find_addresses(self, message: wire.FindAddresses) -> object:
        self._refuse_stale(message.fence)
        world = self._state.find_world(message.fence)
        if world is None or world.member(message.worker) is None:
            raise StaleGeneration(f"{message.worker} is no member of that world")
        if not all(0 <= rank < world.size for rank in message.ranks):
            raise InvalidInput(f"ranks must be in [0, {world.size})")
        return self._find_or_wait(
            self._for_addresses, name_generation_scope(message.fence.generation), message
        )

    def _find_known_addresses(self, message: wire.FindAddresses, is_last: bool) -> wire.Addresses | None:
        self._refuse_stale(message.fence)
        now = self._state.find_addresses(message.ranks)
        return wire.Addresses(now) if is_last or all(now) else None

    def _refuse_stale(self, fence: Fence) -> None:
        reason = self._state.get_end_reason(fence)
        if reason is not None:
            raise StaleGeneration(reason)

    # ---- the key-value store

    def _set(self, message: wire.SetValues) -> wire.Values:
        for key, value in zip(message.keys, message.values, strict=False):
            self._state.values.set(message.scope, key, value)
        self._state.waiters.wake((Subject.VALUES, message.scope))
        return wire.Values()

    def _get(self, message: wire.GetValues) -> object:
        reply: object = self._find_values(message, False)
        if reply is None:
            reply = LongPoll(self._for_values, message.scope, message, self._state.waiters)
        return reply

    def _find_values(self, message: wire.GetValues, is_last: bool) -> wire.Values | None:
        now = self._state.values.get(message.scope, message.keys)
        return wire.Values(now) if is_last or not message.wait or None not in now else None

    def _compare_and_set(self, message: wire.CompareAndSet) -> wire.Comparison:
        reply = self._state.values.compare_and_set(message)
        self._state.waiters.wake((Subject.VALUES, message.scope))
        return reply

    # ---- waiting

    def _find_or_wait(self, wait: Wait, name: str, message: PeerRequest) -> object:
        """The reply, or the poll that waits for it; its sender is lost if the connection breaks meanwhile."""
        self._connections.mark_connected(_sender(message))
        reply = wait.find_reply(message, False)
        return self._wait(wait, name, message) if reply is None else reply

    def _wait(self, wait: Wait, name: str, message: PeerRequest) -> LongPoll:
        self._connections.open_poll(_sender(message))
        return LongPoll(wait, name, message, self._state.waiters)

    def _end_poll(self, message: PeerRequest, reset: bool | None) -> None:
        self._connections.close_poll(_sender(message), reset)


def _sender(message: PeerRequest) -> Peer:
    return message.slot, message.worker if isinstance(message, messages.WorkerRequest) else None


class Dispatcher:
    def __init__(self, key: bytes, attempt: int, handlers: Handlers) -> None:
        self._key = key
        self._attempt = attempt
        self._handlers = {wire.path_of(cls): (cls, handler) for cls, handler in handlers.items()}
        self._sessions = auth.Sessions()
        self._encoded: tuple[object, bytes] = None, b""  # the newest reply and its text
        self._respond_later = self._answer_poll  # bound once, for all that wait

    def __call__(self, request: HttpRequest) -> Response | AnswerBody:
        credentials = auth.parse_credentials(request.fields.get("authorization", ""))
        if credentials is None or request.method != "POST" or request.query:
            return Response(401, is_last=True)
        is_hello = request.path == auth.HELLO
        if credentials.count if is_hello else not self._sessions.is_known(credentials.session):
            return Response(401, is_last=True)
        if request.length > (0 if is_hello else wire.MAX_BODY_BYTES):
            return Response(413, is_last=True)
        return partial(self._answer, request.path, credentials)

    def _answer(self, path: str, credentials: auth.Credentials, body: bytes) -> Response | LongPoll:
        if not auth.request_is_genuine(self._key, path, credentials, body):
            return Response(401, is_last=True)
        if path == auth.HELLO:
            session = self._sessions.open(credentials.session)  # unauthenticated: it may be a replay
            return self._sign(credentials, 200, codec.dumps({"session": session}), is_authenticated=False)
        if not self._sessions.use(credentials):
            return Response(401, is_last=True)
        reply = self._respond(path, credentials, lambda: self._handle(path, body))
        assert reply is not None
        if isinstance(reply, LongPoll):
            reply.credentials, reply.respond = credentials, self._respond_later
        return reply

    def _answer_poll(self, poll: LongPoll, is_last: bool) -> Response | None:
        assert isinstance(poll.credentials, auth.Credentials)
        find_reply = partial(poll.wait.find_reply, poll.message, is_last)
        response = self._respond(wire.path_of(type(poll.message)), poll.credentials, find_reply)
        return response if isinstance(response, Response) else None

    def _handle(self, path: str, body: bytes) -> object:
        envelope = codec.loads(body)
        self._check_envelope(envelope)
        if "broken" in envelope:
            broken: Any = codec.read_as(tuple[str, ...], envelope["broken"], "broken")
            self._sessions.end(broken)
        if path not in self._handlers:
            raise codec.MalformedMessage("the driver knows no such request")
        cls, handler = self._handlers[path]
        hold = envelope.get("hold", wire.MAX_POLL_SECONDS)
        if type(hold) not in (int, float):
            raise codec.MalformedMessage("hold must be a number of seconds")
        reply = handler(codec.read(cls, envelope.get("message")))
        if isinstance(reply, LongPoll):
            reply.hold = min(wire.MAX_POLL_SECONDS, max(0.0, float(hold)))
        return reply

    def _respond(
        self, path: str, credentials: auth.Credentials, compute: Callable[[], object]
    ) -> Response | LongPoll | None:
        """What `compute` gives, signed, or the error that it raises. A long poll, or None, stays as it is."""
        try:
            reply = compute()
            if reply is None or isinstance(reply, LongPoll):
                return reply
            status, text = 200, self._encode_reply(reply)
        except StaleGeneration as error:
            status, text = 200, codec.dumps({"stale": str(error)})
        except (codec.MalformedMessage, InvalidInput) as error:
            status, text = 400, codec.dumps({"error": f"Request {path} was refused: {error}."})
        except Exception as error:
            log.exception("answering %s failed", path)
            status, text = 500, codec.dumps({"error": f"The driver failed to answer {path}: {error!r}."})
        return self._sign(credentials, status, text)

    def _encode_reply(self, reply: object) -> bytes:
        """As a row. Many workers get the same one after the other: it is encoded once."""
        if self._encoded[0] is not reply:
            self._encoded = reply, codec.dumps(reply, as_rows=True)
        return self._encoded[1]

    def _sign(
        self, credentials: auth.Credentials, status: int, text: bytes, is_authenticated: bool = True
    ) -> Response:
        signature = auth.sign_reply(self._key, credentials, status, text)
        return Response(status, text, ((auth.REPLY_HEADER, signature),), is_authenticated)

    def _check_envelope(self, envelope: dict[str, Any]) -> None:
        version, attempt = envelope.get("v"), envelope.get("attempt")
        if version != wire.VERSION:
            both = f"it speaks version {version!r} and the driver speaks {wire.VERSION}"
            raise codec.MalformedMessage(f"{both}: {messages.ANOTHER_RELEASE} on all hosts")
        if type(attempt) is not int:
            raise codec.MalformedMessage("attempt must be int")
        if attempt != self._attempt:
            raise StaleGeneration(
                f"this driver holds attempt {self._attempt} of the run, and the request is of attempt {attempt}"
            )


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
        self._state = ServerState()
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
        assert self._http_server is not None
        self._http_server.drain()  # of several requests in a row, the later ones came after these calls
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
