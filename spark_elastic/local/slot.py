"""A slot as a process of its own: `python -m spark_elastic.local.slot`, started by `LocalLauncher`.

Standard input brings a line with what the slot is, then the pickled program. The reason why the slot ended goes to
standard output. The slot's agent runs in the main thread.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

from spark_elastic.clock import SystemClock
from spark_elastic.errors import ElasticError
from spark_elastic.protocol.slot_spec import SlotIdentity, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.entry import die_with_parent
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.slot_agent import SlotAgent


@dataclass(frozen=True)
class LocalSlot:
    """What the launcher tells a slot's process."""

    spec: SlotSpec
    identity: SlotIdentity
    # Process id of the launcher.
    parent: int

    def to_line(self) -> bytes:
        return codec.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> LocalSlot:
        return codec.read(cls, codec.loads(line))


def main() -> None:
    slot = LocalSlot.from_line(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    # The death signal follows the thread that started this process: the launcher's, which lives as long as its slot.
    die_with_parent(slot.parent)
    # Ctrl-C reaches all processes of a terminal, but the driver ends the job. Child processes inherit this setting.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec, clock = slot.spec, SystemClock()
    with RendezvousClient(
        spec.address, spec.key, spec.attempt, clock, certificate=spec.certificate
    ) as client:
        try:
            reason = SlotAgent(spec, slot.identity, payload, client, clock).run()
        except ElasticError as error:
            reason = str(error)
        finally:
            fork_server_cache.close()
    sys.stdout.write(reason)


if __name__ == "__main__":
    main()
