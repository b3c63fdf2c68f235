"""The keeper: a process that holds the newest commits of a training process in memory after its end.

It runs from this file's text (`python -c`), since a package may be shipped in an archive, and imports nothing of it.
It leaves its parent, as Spark and clusters end a worker's processes together. It holds descriptors of anonymous
memory, and never looks inside. Standard input is a listening socket; each request of the same user is one message: "k"
from the training process brings the descriptors to hold, "f" is answered with them, and "dN" ends the keeper if its
attempt is below N, or is N and the training process has ended. Once that has been gone for `orphan_timeout`, counted
anew with each "f", the kernel's timer ends the keeper.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys

LOOK_EVERY = 0.5  # seconds between two looks at the training process
ANSWER_WITHIN = 5.0  # seconds that a peer gets for its message
MOST = 8  # descriptors in a message


def read_start(pid: int) -> str:
    """When the process began, which tells it from a later one of the same id; "": it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def find_peer(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other side, as the kernel says; for a client, of who began to listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def serve(attempt: int, owner: int, owner_start: str, orphan_timeout: float) -> None:
    """Serve until the end. owner: the training process's id."""
    listener = socket.socket(fileno=0)
    listener.settimeout(LOOK_EVERY)
    kept: list[int] = []
    orphaned = False
    while True:
        if not orphaned and read_start(owner) != owner_start:
            orphaned = True
            signal.setitimer(signal.ITIMER_REAL, orphan_timeout)
        received: list[int] = []
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(ANSWER_WITHIN)
                pid, uid = find_peer(connection)
                if uid != os.getuid():
                    continue
                message, received, _, _ = socket.recv_fds(connection, 64, MOST)
                letter = message[:1]
                if letter == b"k" and pid == owner:
                    kept, received = received, kept
                    connection.sendall(letter)
                elif letter == b"f":
                    if orphaned:
                        signal.setitimer(signal.ITIMER_REAL, orphan_timeout)
                    socket.send_fds(connection, [letter], kept)
                elif letter == b"d":
                    newer = int(message[1:])
                    if attempt < newer or (attempt == newer and read_start(owner) != owner_start):
                        return
        except (OSError, ValueError):
            continue  # nobody came, or with nonsense
        finally:
            for descriptor in received:
                os.close(descriptor)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
