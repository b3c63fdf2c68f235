"""Keras training on real processes: P1 to P4 under kills, P7 when all are lost, callbacks told each thing once."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import pytest

from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component import column_kinds
from tests.component.injected_faults import kill
from tests.component.keras.job import (
    JOBS,
    CallbackCheck,
    Job,
    difference,
    six_inputs,
    train_elastic,
    train_plain,
    weights_of,
)
from tests.component.torch.job import ROWS, RUN, check_every_row_once, ledger_of, make_data
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [
    pytest.mark.native,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]


@pytest.mark.scenario("G1", "G2", "G3")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("rows of a step compared", marks=pytest.mark.ci),
        pytest.param("row weights", marks=pytest.mark.faults),
    ],
)
def test_p1_p2_p3_p4_hold_under_two_kills(tmp_path: Path, fault: Fault, name: str) -> None:
    """One slot in the first epoch, and rank 0's in the second."""
    killed: list[int] = []

    def add_noise(columns: dict[str, Any], rng: Any) -> dict[str, Any]:
        if rng is None:  # validation
            return columns
        return {**columns, "x": columns["x"] + rng.normal(scale=0.1, size=columns["x"].shape[1:])}

    def inject_fault(which: int, launcher: ProcessLauncher) -> None:
        killed.append(sorted(launcher.slots())[which])
        fault(kill, launcher, killed[-1])

    changes: Any = {"transformation": add_noise, "transformation_workers": 2}
    job = replace(JOBS[name], callbacks=(CallbackCheck(),), **changes)
    data, acts = (
        make_data(tmp_path),
        {"epoch 0": partial(inject_fault, 1), "epoch 1": partial(inject_fault, 0)},
    )
    result = train_elastic(job, *data, tmp_path, acts)
    check_every_row_once(tmp_path / "ledger", job.epochs)
    assert len(killed) == 2
    theirs, losses = train_plain(job, *data)
    assert difference(weights_of(data[0]), theirs) < 1e-9
    history = json.loads(result.results[0])["history"]
    assert [epoch["loss"] for epoch in history] == pytest.approx(losses, rel=1e-9)
    assert [epoch["val_rows"] for epoch in history] == [ROWS] * job.epochs


@pytest.mark.faults  # many processes import TensorFlow; tests/component/torch has it in each build
@pytest.mark.scenario("G5")
def test_p7_all_workers_are_lost_and_training_continues_at_its_step(tmp_path: Path, fault: Fault) -> None:
    killed: list[int] = []

    data = make_data(tmp_path)

    def inject_fault(launcher: ProcessLauncher) -> None:
        until(CheckpointStore(data[0], RUN).read_published)
        for slot in launcher.slots():
            killed.append(slot)
            fault(kill, launcher, slot)

    job = replace(JOBS["two outputs"], checkpoint_steps=3, callbacks=(CallbackCheck(),))
    result = train_elastic(job, *data, tmp_path, {"epoch 1": inject_fault})
    check_every_row_once(tmp_path / "ledger", job.epochs)
    assert len(killed) == 3
    assert [w for w in result.worlds if "memory has kept it" in w.reason], "nobody began from a kept commit"
    assert difference(weights_of(data[0]), train_plain(job, *data)[0]) < 1e-9


KINDS = Job(six_inputs, column_kinds.FEATURES, transformation=column_kinds.numbers, workers=2)


def test_a_transformation_of_images_is_tried_on_a_row_of_the_table(tmp_path: Path) -> None:
    column_kinds.write(tmp_path, "arrow")
    task = KINDS.task(*column_kinds.open_data(tmp_path))
    try:
        task.prepare()
        task.close()
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.faults  # of the kinds of columns; each build has Keras's promises above
def test_p1_p2_every_kind_of_column_under_a_kill(tmp_path: Path, fault: Fault) -> None:
    column_kinds.write(tmp_path, "arrow")
    data, job = column_kinds.open_data(tmp_path), replace(KINDS, callbacks=(CallbackCheck(),))
    strike = {"epoch 1": lambda launcher: fault(kill, launcher, min(launcher.slots()))}
    train_elastic(job, *data, tmp_path, strike)
    rows = range(column_kinds.ROWS)
    assert ledger_of(tmp_path / "ledger") == {(epoch, row): 1 for epoch in range(2) for row in rows}
    theirs, _ = train_plain(job, *data, column_kinds.read_table(*data))
    assert difference(weights_of(data[0]), theirs) < 1e-9
