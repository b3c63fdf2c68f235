"""R23: what a host keeps of a run while none of its processes lives, who may read it, and when it is gone."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.errors import StoreError
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position, SlotId, SlotIdentity, SlotSpec
from spark_elastic.runs import kept_commits
from spark_elastic.runs.kept_commits import CommitKeeper, KeptCommits
from spark_elastic.runs.snapshot import ArrayRef, SnapshotBuffer, SnapshotBuilder
from spark_elastic.worker.slot_agent import SlotAgent
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, start_driver
from tests.patience import until

pytestmark = [pytest.mark.timeout(60)]

FOREVER = 600.0
OWNER = """
import sys, numpy as np
from spark_elastic.protocol.types import Fence, Phase, Position
from spark_elastic.runs.kept_commits import CommitKeeper
from spark_elastic.runs.snapshot import SnapshotBuffer

key, attempt, timeout = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
keeper = CommitKeeper(key, attempt, timeout)
keeper.begin_world(Fence(attempt, 1), keeps=True)
buffer = SnapshotBuffer(keeper)
for line in sys.stdin:
    step, size = map(int, line.split())
    weights = np.full(size, float(step))
    buffer.begin(Position(0, Phase.TRAIN, step), lambda builder: {"w": builder.add_array(weights), "step": step})
    buffer.wait()
    print(step, flush=True)
"""


class Owner:
    """A training process, as far as its commits go."""

    def __init__(self, key: bytes, attempt: int = 1, timeout: float = FOREVER) -> None:
        command = [sys.executable, "-c", OWNER, key.hex(), str(attempt), str(timeout)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(command, text=True, **pipes)

    def commit(self, step: int, size: int = 1000) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{step} {size}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{step}\n"

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def key() -> Iterator[bytes]:
    made = secrets.token_bytes(32)
    yield made
    KeptCommits(made).drop(1_000_000)
    until(lambda: not KeptCommits(made).list_keepers())


@pytest.fixture
def keeper(key: bytes) -> Iterator[CommitKeeper]:
    """Of this process."""
    made = CommitKeeper(key, 1, FOREVER)
    made.begin_world(Fence(1, 1), keeps=True)
    yield made
    made.close()


def read_step(found: Checkpoint | None, key: bytes) -> tuple[int, int]:
    """(the step of the commit that is read, the length of its array)"""
    assert found is not None
    snapshot = KeptCommits(key).read(found)
    weights = snapshot.values["w"].of(snapshot.memory)
    assert set(weights) == {float(snapshot.position.step)}
    assert snapshot.values["step"] == snapshot.position.step
    return snapshot.position.step, len(weights)


def test_r23_the_newest_commit_outlives_its_process_and_later_drivers_find_it(key: bytes) -> None:
    kept = KeptCommits(key)
    with Owner(key) as first:
        for step, size in ((1, 1000), (2, 1000), (3, 3000), (4, 3000)):
            first.commit(step, size)
    found = kept.find_newest()
    assert found is not None
    assert (found.fence, found.position) == (Fence(1, 1), Position(0, Phase.TRAIN, 4))
    assert read_step(found, key) == (4, 3000)
    assert KeptCommits(secrets.token_bytes(32)).find_newest() is None
    assert len(kept.list_keepers()) == 1
    with Owner(key, attempt=2) as second:
        second.commit(1)
        newest = kept.find_newest()
        assert newest is not None
        assert newest.fence.attempt == 2
        until(lambda: len(kept.list_keepers()) == 1)  # the older attempt's is dropped
        kept.drop(2)
        assert kept.find_newest() is not None, "its process lives"
    with pytest.raises(StoreError, match="is gone"):
        kept.read(found)
    kept.drop(1)
    assert read_step(kept.find_newest(), key) == (1, 1000), "a zombie of the first attempt drops nothing"
    kept.drop(2)
    until(lambda: not kept.list_keepers())


def test_r23_a_zombie_changes_nothing_once_a_later_attempt_keeps_commits(key: bytes) -> None:
    kept = KeptCommits(key)
    with Owner(key) as zombie:
        zombie.commit(7)
        os.kill(zombie.process.pid, signal.SIGSTOP)
        with Owner(key, attempt=2) as second:
            second.commit(8)
            os.kill(zombie.process.pid, signal.SIGCONT)
            zombie.commit(99)
            zombie.commit(100, size=5000)  # for which it needs its keeper, which is gone
            assert read_step(kept.find_newest(), key) == (8, 1000)
        assert read_step(kept.find_newest(), key) == (8, 1000)


def test_r23_nothing_stays_after_orphan_timeout(key: bytes) -> None:
    with Owner(key, timeout=0.2) as owner:
        owner.commit(1)
        assert KeptCommits(key).find_newest() is not None
    until(lambda: not KeptCommits(key).list_keepers())


def test_r23_a_commit_whose_arrays_changed_before_the_next_step_is_not_kept(
    key: bytes, keeper: CommitKeeper
) -> None:
    weights, buffer = np.full(1 << 17, 1.0), SnapshotBuffer(keeper)  # small ones are copied at once

    def commit(step: int) -> None:
        def capture(builder: SnapshotBuilder) -> dict[str, Any]:
            extent = builder.add(weights.view(np.uint8), change_counter=int)
            return {"w": ArrayRef(extent, weights.dtype.str, weights.shape), "step": step}

        buffer.begin(Position(0, Phase.TRAIN, step), capture)

    commit(1)
    buffer.wait()
    weights += 1.0
    commit(2)
    weights += 1.0
    with pytest.warns(RuntimeWarning, match="does not count"):
        buffer.wait()
    assert read_step(KeptCommits(key).find_newest(), key) == (1, 1 << 17)


@pytest.mark.parametrize(
    ("offset", "left"),
    [(100, 4), (kept_commits.ARRAYS + 800, None), (kept_commits.ARRAYS + 8000 + 64 + 3, None)],
    ids=["header", "arrays", "values"],
)
def test_r23_what_is_torn_is_unread(key: bytes, keeper: CommitKeeper, offset: int, left: int | None) -> None:
    """A header that is torn leaves the commit before it; what a checksum finds is refused."""
    buffer, weights = SnapshotBuffer(keeper), np.ones(1000)
    for step in (4, 5):
        weights[:] = step
        position = Position(0, Phase.TRAIN, step)
        buffer.begin(position, lambda b, step=step: {"w": b.add_array(weights), "step": step})
    for segment in keeper._segments[-1:] if left else keeper._segments:
        byte = os.pread(segment.fd, 1, offset)
        os.pwrite(segment.fd, bytes([byte[0] ^ 1]), offset)
    found = KeptCommits(key).find_newest()
    if left is not None:
        assert read_step(found, key)[0] == left
        return
    assert found is not None
    with pytest.raises(StoreError, match="is not what was kept"):
        KeptCommits(key).read(found)


def test_r23_a_commit_that_does_not_fit_is_not_kept_and_one_sentence_says_so(
    key: bytes, keeper: CommitKeeper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept_commits, "measure_available_memory", lambda: (4 << 20, 8 << 20))
    buffer, weights = SnapshotBuffer(keeper), np.ones(1 << 18)
    for generation in (1, 2):
        keeper.begin_world(Fence(1, generation), keeps=True)
        buffer.begin(Position(0, Phase.TRAIN, generation), lambda builder: {"w": builder.add_array(weights)})
    assert capsys.readouterr().err == (
        "the state of each step is not kept in this host's memory, so after a loss of the driver the run continues at "
        "its newest checkpoint: two copies of its 2 MiB do not fit into half of the free memory\n"
    )
    assert not KeptCommits(key).list_keepers()


def test_r23_what_others_offer_under_the_runs_name_is_refused(key: bytes) -> None:
    """A process that knows the socket's name, and not the key."""
    stranger = CommitKeeper(secrets.token_bytes(32), 1, FOREVER)
    stranger.kept.prefix = KeptCommits(key).prefix
    stranger.begin_world(Fence(9, 1), keeps=True)
    SnapshotBuffer(stranger).begin(Position(0, Phase.TRAIN, 9), lambda builder: builder.add_array(np.ones(9)))
    stranger.close()
    assert KeptCommits(key).list_keepers()
    assert KeptCommits(key).find_newest() is None


def test_r23_a_keeper_closes_what_strangers_send(key: bytes) -> None:
    """The read end of a pipe ends once nobody has the other one."""
    with Owner(key) as owner:
        owner.commit(1)
        (name,) = KeptCommits(key).list_keepers()
        for message in (b"d of nobody", b"d", b"d0", b"k", b"f", b"x" * 64, b"\0"):
            ours, theirs = os.pipe()
            with os.fdopen(ours) as pipe, socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"\0{name}")
                socket.send_fds(connection, [message], [theirs])
                os.close(theirs)
                assert select.select([pipe], [], [], 20.0)[0], f"what came with {message!r} is kept"
        assert read_step(KeptCommits(key).find_newest(), key) == (1, 1000)


@pytest.mark.native
@pytest.mark.parametrize(
    ("release", "stays"),
    [
        ("the job is over (success): all workers have returned", False),
        ("slot 4-0 was not needed for 60 s", True),
        ("the job is over (cancelled): run 'mine' was taken over by another driver (attempt 9)", True),
        ("the job is over (cancelled): slot job 4 was cancelled: the SparkContext was stopped", True),
    ],
    ids=["success", "given back", "taken over", "without Spark"],
)
def test_r23_slots_end_keepers_that_no_driver_will_ask_for(key: bytes, release: str, stays: bool) -> None:
    """A slot that is given back may be on the host that keeps the newest state of all."""
    with Owner(key) as owner:
        owner.commit(1)
    driver, clock = start_driver(), SystemClock()
    try:
        driver.server.end(release)
        spec = SlotSpec(address=driver.server.address, key=KEY, attempt=ATTEMPT, commit_key=key)
        identity = SlotIdentity(slot=SlotId("4-0"), host="host-4", address="127.0.0.1")
        with driver.client() as client:
            assert SlotAgent(spec, identity, b"", client, clock).run() == release
    finally:
        driver.close()
    if stays:
        assert read_step(KeptCommits(key).find_newest(), key) == (1, 1000)
    else:
        until(lambda: not KeptCommits(key).list_keepers())
