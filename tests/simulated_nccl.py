"""A backend of torch.distributed that is as nasty as NCCL, for tensors of the CPU: `import` it, and ask for "simnccl".

- Sums run in a thread, one after the other; until one is complete its tensor holds garbage.
- A peer's death is silent: what waits for it waits until `abort`.
- `shutdown` never returns once a peer is gone; only `abort` ends a communicator.
- Building takes BUILD_SECONDS, and needs every rank.
- If there is a file LATE_ERROR, "RANK NUMBER", that sum of that rank never completes, once, and the rank hears of it
  at its next call.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

NAME = "simnccl"
BUILD_SECONDS = "SIMULATED_NCCL_BUILD_SECONDS"
LATE_ERROR = "SIMULATED_NCCL_LATE_ERROR"


class Work:
    """What a collective returns."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def wait(self) -> bool:
        """For ever, if a peer is gone."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        return True


class SimulatedNccl:
    """One communicator of one rank. Rank 0 adds up what the others send it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        time.sleep(float(os.environ.get(BUILD_SECONDS, "0")))
        self._rank, self._size = rank, size
        self._aborted = threading.Event()
        self._sums: queue.SimpleQueue[tuple[torch.Tensor, Any, Work]] = queue.SimpleQueue()
        self._launched = 0
        self._fails_late = self._read_late_error()
        self._peers = self._connect(store)
        threading.Thread(target=self._run, name="simulated-nccl", daemon=True).start()

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if 0 <= self._fails_late < self._launched:
            os.unlink(os.environ[LATE_ERROR])
            raise RuntimeError("NCCL remote error, of a sum before")
        (tensor,) = tensors
        work, values = Work(), tensor.detach().to(torch.float64).reshape(-1).numpy().copy()
        tensor.data.fill_(float("nan"))  # nobody may look at it now
        self._sums.put((tensor, values, work))
        self._launched += 1
        return work

    def abort(self) -> None:
        self._aborted.set()
        for peer in self._peers.values():
            peer.close()

    def shutdown(self) -> None:
        """As of a communicator that somebody else has aborted."""
        threading.Event().wait()

    def _read_late_error(self) -> int:
        path = os.environ.get(LATE_ERROR, "")
        if not os.path.exists(path):
            return -1
        with open(path) as file:
            rank, number = map(int, file.read().split())
        return number if rank == self._rank else -1

    def _connect(self, store: Any) -> dict[int, socket.socket]:
        if self._rank != 0:
            peer = socket.create_connection(("127.0.0.1", int(store.get("port"))))
            peer.sendall(self._rank.to_bytes(4, "little"))
            return {0: peer}
        peers = {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("port", str(server.getsockname()[1]))
            while len(peers) < self._size - 1:
                peer, _ = server.accept()
                peers[int.from_bytes(_receive(peer, 4), "little")] = peer
        return peers

    def _run(self) -> None:
        number = 0
        while not self._aborted.is_set():
            try:
                tensor, values, work = self._sums.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                if number == self._fails_late:
                    self._aborted.wait()
                    raise OSError("late")
                self._sum(values)
                tensor.data.copy_(torch.from_numpy(values).view(tensor.shape))
            except OSError:  # a peer is gone: NCCL says nothing
                self._aborted.wait()
                work.error = RuntimeError("NCCL communicator was aborted")
            work.done.set()
            number += 1

    def _sum(self, values: Any) -> None:
        if self._rank != 0:
            self._peers[0].sendall(values.tobytes())
            values[:] = np.frombuffer(_receive(self._peers[0], values.nbytes))
            return
        for rank in sorted(self._peers):
            values += np.frombuffer(_receive(self._peers[rank], values.nbytes))
        for peer in self._peers.values():
            peer.sendall(values.tobytes())


def _receive(peer: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = peer.recv(count - len(found))
        if not part:
            raise OSError("the peer is gone")
        found += part
    return found


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, SimulatedNccl, devices=["cpu"])
