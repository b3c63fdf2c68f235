"""Which group gradients travel in, and what the slot sees of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from elastic_collectives.fakes import FakeFabric
from spark_elastic.clock import SystemClock
from spark_elastic.ops.process_sets import ProcessSet
from spark_elastic.torch.rounds import group_for
from spark_elastic.worker.context import current, set_current
from spark_elastic.worker.stack_dump import Sampler, Window
from tests.unit.ops.workers import become, per_thread
from tests.unit.worker.patience import until

CLOCK = SystemClock()


def test_who_waits_for_gradients_of_a_process_set_is_seen_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    per_thread(monkeypatch)
    fabric, window = FakeFabric(3), Window()
    sampler = Sampler(window.activity, window.stacks, CLOCK)
    sampler.start()
    seen = threading.Event()

    def reduce(rank: int) -> float:
        become(fabric.group(rank))
        here = current()
        assert here is not None
        if rank == 0:
            set_current(replace(here, watched=sampler.watched))
        else:
            assert seen.wait(45)
        group, array = group_for(ProcessSet([0, 1])), np.ones(1)
        assert group is not None
        group.allreduce(array)
        return float(array[0])

    try:
        with ThreadPoolExecutor(2) as pool:
            sums = [pool.submit(reduce, rank) for rank in (0, 1)]
            try:
                assert until(lambda: window.look(CLOCK.now()).waits)
            finally:
                seen.set()
            assert [each.result() for each in sums] == [2.0, 2.0]
        assert not window.look(CLOCK.now()).waits
    finally:
        sampler.close()
        window.close()
