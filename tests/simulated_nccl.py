"""A backend of torch.distributed that is as nasty as NCCL, for tensors of the CPU: `import` it, and ask for "simnccl".

- Collectives run in a thread, one after the other; until one is complete its result holds garbage.
- A peer's death is silent: what waits for it waits until `abort`.
- `shutdown` never returns once a peer is gone; only `abort` ends a communicator.
- Building takes BUILD_SECONDS, and needs every rank.
- If there is a file LATE_ERROR, "RANK NUMBER", that collective of that rank never completes, once, and the rank hears
  of it at its next call.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

NAME = "simnccl"
BUILD_SECONDS = "SIMULATED_NCCL_BUILD_SECONDS"
BUILDS = "the simulated NCCL builds a communicator"  # a line of each rank's
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


# From the values of all ranks, by rank, to a rank's result.
Compute = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


class SimulatedNccl:
    """One communicator of one rank. Rank 0 tells all what each sent to it."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._rank, self._size = rank, size
        self._aborted = threading.Event()
        self._queue: queue.SimpleQueue[tuple[torch.Tensor, Any, Compute, Work]] = queue.SimpleQueue()
        self._launched = 0
        self._fails_late = self._read_late_error()
        self._peers = self._connect(store)
        threading.Thread(target=self._run, name="simulated-nccl", daemon=True).start()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Work:
        reduce = _get_reduction(options)
        return self._launch(tensors[0], tensors[0], reduce)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._launch(tensors[0], tensors[0], lambda all_ranks: all_ranks[options.rootRank])

    def _allgather_base(self, out: torch.Tensor, tensor: torch.Tensor, options: Any) -> Work:
        return self._launch(out, tensor, lambda all_ranks: all_ranks)

    def _reduce_scatter_base(self, out: torch.Tensor, tensor: torch.Tensor, options: Any) -> Work:
        reduce, size = _get_reduction(options), self._size
        return self._launch(out, tensor, lambda all_ranks: np.split(reduce(all_ranks), size)[self._rank])

    def _launch(self, out: torch.Tensor, tensor: torch.Tensor, compute: Compute) -> Work:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if 0 <= self._fails_late < self._launched:
            os.unlink(os.environ[LATE_ERROR])
            raise RuntimeError("NCCL remote error, of a collective before")
        work, values = Work(), tensor.detach().to(torch.float64).reshape(-1).numpy().copy()
        out.data.fill_(float("nan") if out.is_floating_point() else 99)  # nobody may look at it now
        self._queue.put((out, values, compute, work))
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
            port = int(store.get("port"))
            self._take_time()
            peer = socket.create_connection(("127.0.0.1", port))
            peer.sendall(self._rank.to_bytes(4, "little"))
            return {0: peer}
        peers = {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("port", str(server.getsockname()[1]))
            self._take_time()
            while len(peers) < self._size - 1:
                peer, _ = server.accept()
                peers[int.from_bytes(_receive(peer, 4), "little")] = peer
        return peers

    def _take_time(self) -> None:
        sys.stderr.write(f"{BUILDS}\n")
        time.sleep(float(os.environ.get(BUILD_SECONDS, "0")))

    def _run(self) -> None:
        number = 0
        while not self._aborted.is_set():
            try:
                out, values, compute, work = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                if number == self._fails_late:
                    self._aborted.wait()
                    raise OSError("late")
                result = torch.from_numpy(np.ascontiguousarray(compute(self._gather(values))))
                out.data.copy_(result.view(out.shape))
            except OSError:  # a peer is gone: NCCL says nothing
                self._aborted.wait()
                work.error = RuntimeError("NCCL communicator was aborted")
            work.done.set()
            number += 1

    def _gather(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        all_ranks = np.empty((self._size, len(values)))
        if self._rank != 0:
            self._peers[0].sendall(values.tobytes())
            all_ranks[:] = np.frombuffer(_receive(self._peers[0], all_ranks.nbytes)).reshape(all_ranks.shape)
            return all_ranks
        all_ranks[0] = values
        for rank in sorted(self._peers):
            all_ranks[rank] = np.frombuffer(_receive(self._peers[rank], values.nbytes))
        for peer in self._peers.values():
            peer.sendall(all_ranks.tobytes())
        return all_ranks


def _get_reduction(options: Any) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]:
    name = "SUM" if options is None else options.reduceOp.__getstate__()[0].name
    reduce = {"SUM": np.sum, "AVG": np.mean, "PRODUCT": np.prod, "MIN": np.min, "MAX": np.max}[name]
    return lambda all_ranks: reduce(all_ranks, axis=0)


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
