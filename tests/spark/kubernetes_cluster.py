"""A stand-in for a Kubernetes cluster: the part of its API that Spark's scheduler calls, and pods that are processes.

`KubernetesCluster` answers on loopback: pods, config maps and other objects of one namespace, with selectors of labels,
patches, watches over web sockets, and the rights of a Role. An executor's pod is the JVM that the entry point of
Spark's own image would start, at an address of its own on loopback. A pod that is deleted with a `preStop` hook gets
SIGPWR, as that hook sends it, and SIGKILL at the end of its period of grace.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import uuid
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyspark

from tests.spark.cluster import cluster_environment

Object = dict[str, Any]
HOME = Path(pyspark.__file__).parent
GRACE = 20.0  # seconds that a pod without a period of its own has to end
# The path of an object or of all objects of a kind.
_PATH = re.compile(r"/api/v1/namespaces/([\w-]+)/(\w+)(?:/([\w.-]+))?")
_KINDS = {"pods": "Pod", "configmaps": "ConfigMap", "persistentvolumeclaims": "PersistentVolumeClaim"}
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
_WEB_SOCKET = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


class KubernetesCluster:
    """`with KubernetesCluster(folder, rights) as cluster:`, whose API is at `cluster.url`."""

    def __init__(self, folder: Path, rights: Iterable[tuple[str, str]]) -> None:
        """folder: for the pods' logs and files. rights: (resource, verb) that requests may use."""
        self._folder = folder
        self._rights = frozenset(rights)
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str], Object] = {}  # by resource and name
        self._watches: list[tuple[str, str, queue.Queue[Object | None]]] = []  # resource, selector, events
        self._version = 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # of pods, by name
        self._threads: list[threading.Thread] = []  # one for each process, and one for each pod that ends
        self._sockets: set[socket.socket] = set()  # of the API's clients
        # What was asked for without the right to, as (resource, verb).
        self.forbidden: list[tuple[str, str]] = []
        self._is_closing = False

    def __enter__(self) -> KubernetesCluster:
        self._server = _Server(self, self._sockets)
        self._listener = threading.Thread(target=self._server.serve_forever, name="kubernetes-api")
        self._listener.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_closing = True
            for process in self._processes.values():
                process.kill()
            for _, _, events in self._watches:
                events.put(None)
        for thread in self._threads:
            thread.join()
        self._server.shutdown()
        for client in list(self._sockets):
            client.close() if client.fileno() < 0 else client.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._listener.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def running_pods(self) -> list[str]:
        """Names of the pods whose process runs, the oldest first."""
        with self._lock:
            return [name for name, process in self._processes.items() if process.poll() is None]

    def add(self, resource: str, name: str, labels: Mapping[str, str]) -> None:
        """An object that no process belongs to, such as the driver's own pod."""
        self.create(resource, {"metadata": {"name": name, "labels": dict(labels)}}, starts=False)

    def kill(self, pod: str) -> None:
        """SIGKILL to the pod's process, as for want of memory."""
        self._processes[pod].kill()

    # ---- what the API does

    def check_right(self, resource: str, verb: str) -> bool:
        allowed = (resource, verb) in self._rights
        if not allowed:
            self.forbidden.append((resource, verb))
        return allowed

    def create(self, resource: str, made: Object, *, starts: bool = True) -> Object:
        with self._lock:
            metadata = made["metadata"]
            metadata.setdefault("name", f"{metadata.get('generateName', 'made-')}{uuid.uuid4().hex[:6]}")
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
            made |= {"kind": _KINDS.get(resource, resource), "apiVersion": "v1"}
            if resource == "pods":
                made["status"] = {"phase": "Pending"}
            self._objects[resource, metadata["name"]] = made
            self._publish("ADDED", resource, made)
            if resource == "pods" and starts and not self._is_closing:
                self._start(made)
            return made

    def find(self, resource: str, selector: str) -> list[Object]:
        with self._lock:
            named = [made for (kind, _), made in self._objects.items() if kind == resource]
            return [made for made in named if matches(made, selector)]

    def get(self, resource: str, name: str) -> Object | None:
        return self._objects.get((resource, name))

    def patch(self, resource: str, name: str, change: Any) -> Object:
        with self._lock:
            made = self._objects[resource, name]
            merge(made, change)
            self._publish("MODIFIED", resource, made)
            return made

    def delete(self, resource: str, name: str) -> Object:
        with self._lock:
            made = self._objects[resource, name]
            process = self._processes.get(name) if resource == "pods" else None
            if process is None or process.poll() is not None:
                del self._objects[resource, name]
                self._publish("DELETED", resource, made)
            elif "deletionTimestamp" not in made["metadata"]:
                made["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                self._publish("MODIFIED", resource, made)
                self._run(lambda: self._end(made, process))
            return made

    def watch(self, resource: str, selector: str) -> queue.Queue[Object | None]:
        """The events of objects from now on; None: there will be no more."""
        with self._lock:
            events: queue.Queue[Object | None] = queue.Queue()
            self._watches.append((resource, selector, events))
            if self._is_closing:
                events.put(None)
            return events

    def _publish(self, event: str, resource: str, made: Object) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        copy = json.loads(json.dumps(made))
        for kind, selector, events in self._watches:
            if kind == resource and matches(made, selector):
                events.put({"type": event, "object": copy})

    # ---- pods

    def _start(self, pod: Object) -> None:
        """Start the process of an executor's pod, as the entry point of Spark's image does."""
        name, (container, *_) = pod["metadata"]["name"], pod["spec"]["containers"]
        assert container["args"] == ["executor"], container
        address = f"127.0.1.{len(self._processes) + 1}"
        fields = {"status.podIP": address, "metadata.name": name}
        variables = {}
        for each in container["env"]:
            source = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[each["name"]] = each.get("value", "") if source is None else fields[source]
        options = [value for key, value in variables.items() if key.startswith("SPARK_JAVA_OPT_")]
        memory = variables["SPARK_EXECUTOR_MEMORY"]
        folder = self._folder / name
        folder.mkdir()
        command = [shutil.which("java") or "java", *options, f"-Xms{memory}", f"-Xmx{memory}"]
        command += ["-cp", f"{HOME}/jars/*"]
        command += ["org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"]
        for option, variable in (
            ("driver-url", "DRIVER_URL"),
            ("executor-id", "EXECUTOR_ID"),
            ("cores", "EXECUTOR_CORES"),
            ("app-id", "APPLICATION_ID"),
            ("hostname", "EXECUTOR_POD_IP"),
            ("resourceProfileId", "RESOURCE_PROFILE_ID"),
            ("podName", "EXECUTOR_POD_NAME"),
        ):
            command += [f"--{option}", variables[f"SPARK_{variable}"]]
        own = {"SPARK_LOCAL_DIRS": str(folder), "SPARK_HOME": str(HOME), "SPARK_LOCAL_IP": address}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | cluster_environment(folder) | variables | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes[name] = process
        pod["status"] = {
            "phase": "Running",
            "podIP": address,
            "containerStatuses": [{"name": container["name"], "state": {"running": {}}}],
        }
        self._publish("MODIFIED", "pods", pod)
        self._run(lambda: self._await_end(pod, process))

    def _await_end(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        code = 128 - code if code < 0 else code
        with self._lock:
            (status,) = pod["status"]["containerStatuses"]
            status["state"] = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
            pod["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
            self._publish("MODIFIED", "pods", pod)

    def _end(self, pod: Object, process: subprocess.Popen[bytes]) -> None:
        (container, *_) = pod["spec"]["containers"]
        warned = "preStop" in container.get("lifecycle", {})
        process.send_signal(signal.SIGPWR if warned else signal.SIGTERM)
        try:
            process.wait(pod["spec"].get("terminationGracePeriodSeconds", GRACE))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.delete("pods", pod["metadata"]["name"])

    def _run(self, work: Any) -> None:
        thread = threading.Thread(target=work, name="kubernetes-pod")
        self._threads.append(thread)
        thread.start()


class _Server(ThreadingHTTPServer):
    """The API. A thread for each connection, which ends with it."""

    daemon_threads = False

    def __init__(self, cluster: KubernetesCluster, sockets: set[socket.socket]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = cluster
        self._sockets = sockets

    def process_request(self, request: Any, client_address: Any) -> None:
        self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._sockets.discard(request)
        super().shutdown_request(request)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def _answer(self) -> None:
        verb = _VERBS[self.command]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        split = urlsplit(self.path)
        found = _PATH.fullmatch(split.path)
        if found is None:
            self._refuse(404, self.path)
            return
        cluster, resource, name = self.server.cluster, found[2], found[3]
        asked = {key: values[0] for key, values in parse_qs(split.query).items()}
        selector = asked.get("labelSelector", "")
        if field := re.fullmatch(r"metadata\.name=([\w.-]+)", asked.get("fieldSelector", "")):
            name = field[1]
        if verb == "get" and asked.get("watch") == "true":
            verb = "watch"
        elif name is None:
            verb = {"get": "list", "delete": "deletecollection"}.get(verb, verb)
        if not cluster.check_right(resource, verb):
            self._refuse(403, f"{verb} {resource}")
        elif verb == "watch":
            self._watch(cluster.watch(resource, selector))
        elif verb == "create":
            self._send(201, cluster.create(resource, json.loads(body)))
        elif verb == "list":
            items = cluster.find(resource, selector)
            self._send(200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})
        elif verb == "deletecollection":
            for each in cluster.find(resource, selector):
                cluster.delete(resource, each["metadata"]["name"])
            self._send(200, {"kind": "Status", "status": "Success"})
        elif cluster.get(resource, name) is None:
            self._refuse(404, f"no {name}")
        elif verb == "get":
            self._send(200, cluster.get(resource, name))
        elif verb == "delete":
            self._send(200, cluster.delete(resource, name))
        else:
            self._send(200, cluster.patch(resource, name, json.loads(body)))

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _answer

    def _refuse(self, code: int, message: str) -> None:
        self._send(code, {"kind": "Status", "status": "Failure", "code": code, "message": message})

    def _send(self, code: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, events: queue.Queue[Object | None]) -> None:
        """Send events over a web socket until the client or the cluster is gone."""
        key = self.headers["Sec-WebSocket-Key"].encode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accepted = base64.b64encode(hashlib.sha1(key + _WEB_SOCKET).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accepted)
        self.end_headers()
        self.close_connection = True
        while (event := events.get()) is not None:
            text = json.dumps(event).encode()
            small = len(text) < 1 << 16
            size = struct.pack("!BH", 126, len(text)) if small else struct.pack("!BQ", 127, len(text))
            try:
                self.wfile.write(b"\x81" + (bytes([len(text)]) if len(text) < 126 else size) + text)
            except OSError:
                return  # the client is gone


def matches(made: Object, selector: str) -> bool:
    """Whether an object's labels are what a selector wants: a=b, a!=b, and a in (b, c), with commas between."""
    labels = made["metadata"].get("labels", {})
    for wish in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        if listed := re.fullmatch(r"(\S+) in \((.*)\)", wish.strip()):
            holds = labels.get(listed[1]) in re.split(r", *", listed[2])
        else:
            name, sign, value = re.split(r"(!=|==?)", wish.strip())
            holds = (labels.get(name) == value) != (sign == "!=")
        if not holds:
            return False
    return True


def merge(made: Object, change: Object) -> None:
    """Change an object as a merge patch says."""
    for name, value in change.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, dict) and isinstance(made.get(name), dict):
            merge(made[name], value)
        else:
            made[name] = value
