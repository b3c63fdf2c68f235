"""A training process without a driver, started as a slot starts one."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import psutil

from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.worker.child import Child
from spark_elastic.worker.forking import ForkedProcess, ServedProcess


class PrintingProgram:
    """A program whose `prepare` prints what `tell` returns."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell

    def prepare(self) -> None:
        print(json.dumps(self._tell(), default=str))  # noqa: T201


class ForkedChild:
    """A child without a driver, which becomes warm and then waits for its activation."""

    def __init__(
        self,
        imports: tuple[str, ...] | None,
        tell: Callable[[], object],
        threads: int | None = None,
        forked: bool | None = None,
        gpus: tuple[str, ...] = (),
    ) -> None:
        """imports: None for a process that is to be spawned. gpus: of the slot. forked: whether the process turns out
        to be forked; by default if it is to be."""
        self._forked = imports is not None if forked is None else forked
        for module in (__name__, tell.__module__):
            cloudpickle.register_pickle_by_value(sys.modules[module])
        payload = cloudpickle.dumps(PrintingProgram(tell))
        self.lines: queue.Queue[str] = queue.Queue()
        self._warm: queue.Queue[None] = queue.Queue()
        self._ends: queue.Queue[int] = queue.Queue()

        start = {"imports": imports or (), "fork_workers": imports is not None, "cpus_per_worker": threads}
        spec = SlotSpec(address="127.0.0.1:1", key=b"\0", attempt=1, **start)
        self.child = Child.start(
            spec,
            SlotIdentity(slot=SlotId("1-0"), resources={"gpu": gpus} if gpus else {}),
            payload,
            lambda child, line: self.lines.put(line),
            lambda child: self._warm.put(None),
            lambda child, code: self._ends.put(code),
        )

    def __enter__(self) -> ForkedChild:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.close()

    def await_warm(self) -> psutil.Process:
        self._warm.get(timeout=60.0)
        made = self.child.process
        assert (isinstance(made, ForkedProcess) and isinstance(made._process, ServedProcess)) is self._forked
        return psutil.Process(self.child.pid)

    def read_message(self) -> Any:
        while not (line := self.lines.get(timeout=60.0)).startswith(("[", "{", '"', "null")):
            continue  # of a framework
        self.await_warm()
        return json.loads(line)

    def end(self) -> int:
        return self._ends.get(timeout=60.0)
