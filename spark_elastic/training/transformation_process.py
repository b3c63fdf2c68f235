"""A process that applies the user's `transformation_fn`, and the training process's end of it.

`python -m spark_elastic.training.transformation_process DESCRIPTOR PARENT FILES`: requests and answers are pickles in
shared memory without a name, whose descriptors cross a socket: nothing stays after any death. The process ends with the
socket, and the kernel kills it with the training process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

import cloudpickle

from spark_elastic.errors import add_note
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.imports import import_followers

_PLACE = struct.Struct("!QQ")  # where the pickle of a message begins and ends in its memory
_ALIGNMENT = 64  # of arrays in shared memory
_PR_SET_PDEATHSIG = 1
_END_WAIT = 5.0  # seconds between the end of the socket and that of the process

Columns = dict[str, Any]
Answer = tuple[Columns | None, bytes | None, str]  # columns; or error and its traceback


class TransformationProcess:
    """The training process's end. One thread at a time."""

    def __init__(self, own: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._socket, self._process = own, process

    @classmethod
    def spawn(cls, transformation: bytes) -> TransformationProcess:
        """From the main thread, with which it ends. transformation: a pickled `BatchTransformation`."""
        own, theirs = socket.socketpair()
        files = get_process_context().files
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path if folder)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid()), files],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=dict(os.environ, PYTHONPATH=path),
            )
        _send(own, transformation)
        return cls(own, process)

    def apply(self, batch: Any) -> Columns:
        """As `BatchTransformation.apply`. Raises RuntimeError if the process has died."""
        try:
            _send(self._socket, batch)
            answer: Answer = _receive(self._socket)
        except (EOFError, OSError):
            raise RuntimeError(
                f"a process of transformation_fn has ended with exit code {self._process.wait(_END_WAIT)} (a negative "
                "one is a signal): if the kernel killed it for its memory, use fewer transformation_workers."
            ) from None
        columns, error, text = answer
        if columns is None:
            raised = _restore_error(error, text)
            add_note(raised, f"in a process of transformation_fn:\n{text}")
            raise raised
        return columns

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()


def main() -> None:
    descriptor, parent, files = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    if os.getppid() != parent:
        return
    get_process_context().files = files
    import_followers()
    with socket.socket(fileno=descriptor) as channel:
        with suppress(EOFError, OSError):  # the training process is gone, or wants no more
            _answer_requests(channel)


def _answer_requests(channel: socket.socket) -> None:
    pickled, transformation = _receive(channel), None
    while True:
        request = _receive(channel)
        try:
            if transformation is None:
                transformation = cloudpickle.loads(pickled)
            answer: Answer = transformation.apply(request), None, ""
        except Exception as error:
            answer = None, None, traceback.format_exc()
            with suppress(Exception):  # it may hold something that cannot be pickled
                answer = None, cloudpickle.dumps(error), answer[2]
        del request  # its memory
        _send(channel, answer)


# ---- errors and messages between the two


def _restore_error(error: bytes | None, text: str) -> Exception:
    """The error itself, if it came through pickle; else one that has its last line."""
    with suppress(Exception):  # its constructor may take other arguments than it passed on
        restored = pickle.loads(error or b"")
        if isinstance(restored, Exception):
            return restored
    return RuntimeError(text.strip().rpartition("\n")[2])


def _send(channel: socket.socket, thing: Any) -> None:
    """Send anything that pickles. Its arrays lie in the memory as they are, in front of the pickle."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    memory = os.memfd_create("transformation")
    try:
        spans = []
        with open(memory, "wb", closefd=False) as file:
            for buffer in buffers:
                start = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                file.write(buffer.raw())
                spans.append((start, file.tell()))
            begin = file.tell()
            file.write(pickle.dumps((pickled, spans)))
            place = _PLACE.pack(begin, file.tell())
        socket.send_fds(channel, [place], [memory])
    finally:
        os.close(memory)


def _receive(channel: socket.socket) -> Any:
    """What the other end sent; arrays are views of the memory. Raises EOFError: the other end is gone."""
    head, descriptors, _, _ = socket.recv_fds(channel, _PLACE.size, 1)
    if len(head) < _PLACE.size:
        raise EOFError
    try:
        view = memoryview(mmap.mmap(descriptors[0], 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    finally:
        os.close(descriptors[0])
    begin, past = _PLACE.unpack(head)
    pickled, spans = pickle.loads(view[begin:past])
    return pickle.loads(pickled, buffers=[view[start:end] for start, end in spans])


if __name__ == "__main__":
    main()
