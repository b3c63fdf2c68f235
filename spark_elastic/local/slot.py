"""A slot as a process of its own: `python -m spark_elastic.local.slot`, started by `LocalLauncher`.

The order and the program come on standard input. Main thread: the slot's agent.
"""

from __future__ import annotations

import json
import os
import sys

from spark_elastic.clock import SystemClock
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.entry import Header, die_with_parent
from spark_elastic.worker.slot_agent import SlotAgent, SlotPlan

ADDRESS = "127.0.0.1"  # all hosts are this machine, whatever their names


def main() -> None:
    order = json.loads(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    # A death signal follows the spawning thread; the launcher's thread outlives its slot.
    die_with_parent(order["parent"])
    key, attempt, clock = order["key"], order["attempt"], SystemClock()
    slot = f"{order['job']}-0"

    def header(status_fd: int, payload_bytes: int) -> Header:
        return Header(
            parent=os.getpid(),
            address=order["address"],
            key=key,
            attempt=attempt,
            slot=slot,
            bind=ADDRESS,
            port_range=None,
            preload=tuple(order["preload"]),
            collective_timeout=order["collective_timeout"],
            driver_timeout=order["driver_timeout"],
            payload_bytes=payload_bytes,
            status_fd=status_fd,
            certificate=order["certificate"],
        )

    plan = SlotPlan(
        slot,
        order["job"],
        order["host"],
        {},
        payload,
        header,
        order["driver_timeout"],
        spare_after=order["spare_after"],
    )
    secret = bytes.fromhex(key)
    with RendezvousClient(
        order["address"], secret, attempt, clock, certificate=order["certificate"]
    ) as client:
        SlotAgent(plan, client, clock).run()


if __name__ == "__main__":
    main()
