"""A slot as a process of its own: `python -m spark_elastic.local.slot`, started by `LocalLauncher`.

The order and the program come on standard input; why the slot ended goes to standard output. Main thread: the slot's
agent.
"""

from __future__ import annotations

import signal
import sys

from spark_elastic.clock import SystemClock
from spark_elastic.errors import ElasticError
from spark_elastic.local.order import SlotOrder
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.entry import die_with_parent
from spark_elastic.worker.forking import kept
from spark_elastic.worker.slot_agent import SlotAgent, SlotPlan


def main() -> None:
    order = SlotOrder.from_json(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    # A death signal follows the spawning thread; the launcher's thread outlives its slot.
    die_with_parent(order.parent)
    # Ctrl-C reaches all processes of a terminal, and the driver ends the job; those that this one starts inherit it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clock = SystemClock()
    plan = SlotPlan(
        order.slot,
        order.job,
        order.host,
        {},
        payload,
        order.header,
        order.settings.driver_timeout,
        spare_after=order.settings.spare_after,
    )
    key = bytes.fromhex(order.key)
    with RendezvousClient(order.address, key, order.attempt, clock, certificate=order.certificate) as client:
        try:
            reason = SlotAgent(plan, client, clock).run()
        except ElasticError as error:
            reason = str(error)
        finally:
            kept.close()
    sys.stdout.write(reason)


if __name__ == "__main__":
    main()
