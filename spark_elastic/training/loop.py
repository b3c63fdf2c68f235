"""What the estimators' workers run: epochs over a materialised data set, step by step, from any position on.

A `worker.program.Program`, shipped by cloudpickle with the user's model inside its trainer. Knows no Spark and no
framework. All methods are called from the worker's main thread.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.data.loader import StepRows
from spark_elastic.protocol.types import Checkpoint, Phase, Position, World, is_job_end
from spark_elastic.training import evaluation
from spark_elastic.training.checkpointing import Checkpointing, restore
from spark_elastic.training.evaluation import Evaluation, no_sums
from spark_elastic.training.ledger import FileLedger, Ledger, NullLedger
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.step_summary import StepDecision
from spark_elastic.training.trainer import ModelTrainer
from spark_elastic.worker.program import CHANGE, Completed, Outcome, Stopped, WorkerHandle


class TrainingLoop:
    """What a worker of an estimator runs."""

    def __init__(self, spec: TrainSpec, trainer: ModelTrainer) -> None:
        self._spec = spec
        self._trainer = trainer
        self._begun = False
        self._restored: tuple[Checkpoint, ...] = ()  # candidates that were read, but not handed on yet
        self._checkpointing: Checkpointing | None = None

    def prepare(self) -> None:
        spec = self._spec
        self._clock = SystemClock()
        self._ledger: Ledger = NullLedger() if spec.ledger is None else FileLedger(spec.ledger, self._clock)
        extras: dict[str, Any] = {
            "history": [],
            "validation": no_sums(),
            "pending": None,
            "stopped": None,
            "warned": False,
        }
        self._trainer.prepare({**extras, **evaluation.begun()}, self._ledger)
        self._state, self._callbacks = self._trainer.state, self._trainer.callbacks
        self._reader, self._loader = spec.open_reader(spec.rows)
        self._evaluation: Evaluation | None = None
        if spec.validation is not None:
            self._evaluation = Evaluation(spec, spec.validation, self._trainer, self._sealed)

    def position(self) -> Position | None:
        return self._state.position if self._begun else None

    def sync(self, world: World, group: Group) -> Position:
        assert world.source is not None
        self._mark("formed", group)
        self._callbacks.on_fit_begin(group)
        if world.resume and group.rank == world.source:
            self._restore(world.resume)
        position = self._state.sync(group, world.source, world.receivers)
        self._begun, self._restored = True, ()
        self._mark("synced", group)
        return position

    def _restore(self, candidates: tuple[Checkpoint, ...]) -> None:
        """Load the newest whole checkpoint, once. The ranks that wait may give this world up meanwhile; if the next one
        read it again, a checkpoint that takes longer than `collective_timeout` to read would never be used."""
        assert self._spec.checkpoints is not None
        if candidates != self._restored:
            restore(self._spec.store, self._spec.checkpoints.run_id, candidates, self._state)
            self._restored = candidates

    def run(self, world: World, group: Group, handle: WorkerHandle) -> Outcome:
        self._begun = True
        self._mark("runs", group)
        self._warn(group)
        self._callbacks.on_world_begin(group)
        if group.rank == 0 and self._spec.checkpoints is not None and self._checkpointing is None:
            tell = handle.report_checkpoint
            self._checkpointing = Checkpointing(self._spec.store, self._spec.checkpoints, self._clock, tell)
        try:
            return self._epochs(world, group, handle)
        except CollectiveError:
            self._mark("broke", group)
            if self._checkpointing is not None:
                self._checkpointing.unsealed()
            raise

    def _epochs(self, world: World, group: Group, handle: WorkerHandle) -> Outcome:
        version = world.version
        while self._unfinished():
            if self._state.position.phase is Phase.TRAIN:
                version = self._train(world, group, handle)
                if self._state.position.phase is Phase.TRAIN:
                    return Stopped(CHANGE)
            if self._state.position.phase is Phase.VALIDATE:
                assert self._evaluation is not None
                if not self._evaluation.run(world, group, handle):
                    return Stopped(CHANGE)
            self._close_epoch(world, group, handle)
            # What came with an epoch's last step, which may be its only one.
            if version > world.version and self._unfinished():
                self._stops(world, version)
                return Stopped(CHANGE)
        return Completed(self._finish(group))

    def _unfinished(self) -> bool:
        """Whether there is something left to do. A training that a callback ended still closes its epoch."""
        here, stopped = self._state.position, self._state.extras["stopped"] is not None
        return here.epoch < self._spec.config.epochs and not (stopped and here.phase is Phase.TRAIN)

    def close(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.close()
        self._trainer.close()
        self._reader.close()
        if self._evaluation is not None:
            self._evaluation.close()
        self._ledger.close()

    def _train(self, world: World, group: Group, handle: WorkerHandle) -> int:
        """Train until the epoch's end or a boundary at which all stop. Returns the newest membership version."""
        here, version = self._state.position, world.version
        handle.report_position(here)
        self._callbacks.on_epoch_begin(here.epoch)
        with self._loader.steps(here.epoch, here.step, group.rank, group.size) as steps:
            for rows in steps:
                if rows.step == here.step:
                    self._mark("read", group)
                began = self._clock.now()

                def account(decision: StepDecision, began: float = began) -> Position:
                    return self._account(decision, group.size, self._clock.now() - began)

                self._callbacks.on_step_begin(rows.epoch, rows.step)
                with self._located(rows):
                    heard = handle.membership_version()
                    decision = self._trainer.train_step(group, rows, heard, account, self._show_step)
                handle.report_position(self._state.position)
                self._keep(world, applied=True)
                self._report(group, handle, decision.loss / (decision.denominator or 1.0), decision.rows)
                version = decision.version
                if self._state.position.phase is not Phase.TRAIN:
                    break
                if version > world.version:
                    self._stops(world, version)
                    break
        return version

    @contextmanager
    def _located(self, rows: StepRows) -> Iterator[None]:
        """R13: an exception of user code says at which rows of which row groups it was raised."""
        try:
            yield
        except CollectiveError:
            raise
        except Exception as error:
            groups = np.searchsorted(self._spec.plan.group_offsets, rows.row_ids, side="right") - 1
            error.add_note(
                f"in step {rows.step} of epoch {rows.epoch}, on a share of {len(rows)} rows: {_some(rows.row_ids)} of "
                f"row groups {_some(np.unique(groups))}"
            )
            raise

    def _account(self, decision: StepDecision, size: int, seconds: float) -> Position:
        """Add a step to the epoch's sums, which are part of the state. Returns the position after the step."""
        sums, here = self._state.extras, self._state.position
        evaluation.add_step(sums, decision, here.step + 1, size, seconds)
        self._callbacks.on_step_applied()
        loss = decision.loss / (decision.denominator or 1.0)
        sums["pending"] = {"epoch": here.epoch, "step": here.step, "loss": loss, "rows": decision.rows}
        if decision.ends:
            sums["stopped"] = "a callback ended the training"
        elif here.step + 1 < self._spec.plan.steps:
            return Position(here.epoch, here.phase, here.step + 1)
        return Position(here.epoch, Phase.CLOSE if self._evaluation is None else Phase.VALIDATE, 0)

    def _show_step(self) -> None:
        """The newest step is sealed: callbacks may see it (R1)."""
        logs, self._state.extras["pending"] = self._state.extras["pending"], None
        if logs is not None:
            self._callbacks.on_step_finalized(logs)

    def _sealed(self, world: World, version: int = 0) -> None:
        """An exchange that applies no step is complete. version: the newest membership version that came with it."""
        self._keep(world, applied=False)
        self._show_step()
        self._stops(world, version)

    def _stops(self, world: World, version: int) -> None:
        """If this boundary is the job's last, make it durable before anybody leaves."""
        if self._checkpointing is not None and version > world.version and is_job_end(version):
            self._checkpointing.finish(world.fence, self._state)

    def _keep(self, world: World, applied: bool) -> None:
        """An exchange is complete, so the step before it is sealed. applied: its own step was applied."""
        if self._checkpointing is not None:
            self._checkpointing.sealed(world.fence)
            if applied:
                self._checkpointing.applied(self._state)

    def _close_epoch(self, world: World, group: Group, handle: WorkerHandle) -> None:
        """R1: the barrier seals the epoch's last step; then it enters the history, the same on all ranks."""
        group.barrier()
        self._sealed(world)
        state, entry = self._state, self._epoch_entry()
        decided = self._callbacks.on_epoch_end(group, entry)
        state.extras["stopped"] = state.extras["stopped"] or decided
        state.extras["history"].append(evaluation.recorded(entry))
        self._report(group, handle, entry["loss"], entry["rows"] // entry["steps"])
        state.extras.update(evaluation.begun(), validation=no_sums())
        self._trainer.reset_metrics()
        state.position = Position(state.position.epoch + 1, Phase.TRAIN, 0)
        handle.report_position(state.position)

    def _epoch_entry(self) -> dict[str, Any]:
        sums = self._state.extras
        planned = self._spec.plan.rows_before(sums["steps"])
        entry = evaluation.entry(sums, self._state.position.epoch, planned) | self._trainer.epoch_metrics()
        if self._evaluation is not None:
            for name, value in self._evaluation.numbers().items():
                entry.setdefault(name, value)  # a model may say its own val_loss
        return entry

    def _warn(self, group: Group) -> None:
        """R9: warn once per training, at its first world of several workers. That it was said is part of the state."""
        if group.size > 1 and not self._state.extras["warned"]:
            self._state.extras["warned"] = True
            sentence = self._trainer.describe_world_dependence()
            if sentence is not None and group.rank == 0:
                warnings.warn(sentence, UserWarning, stacklevel=2)

    def _mark(self, event: str, group: Group) -> None:
        self._ledger.mark(event, group.fence, self._state.position)

    def _report(self, group: Group, handle: WorkerHandle, loss: float, rows: int) -> None:
        """loss: of the newest step; at an epoch's end its mean. rows: of a step. With them go the figures
        that only a closed epoch has, those of the last one: losses of validation, metrics, learning rate."""
        here, epochs = self._state.position, self._state.extras["history"]
        handle.report_metrics(
            {
                **(evaluation.figures(epochs[-1]) if epochs else {}),
                "epoch": here.epoch,
                "epochs": self._spec.config.epochs,
                "step": here.step if here.phase is Phase.TRAIN else self._spec.plan.steps,
                "steps": self._spec.plan.steps,
                "loss": loss,
                "rows": rows,
                "world": group.size,
                "checkpoint_seconds": self._checkpointing.seconds if self._checkpointing is not None else 0.0,
            }
        )

    def _finish(self, group: Group) -> str:
        """R15: rank 0 writes the final model; whoever is rank 0 when it is asked for holds the same one."""
        self._callbacks.on_fit_end(self._state.extras["history"])
        digest, written = self._state.digest(), ""
        if group.rank == 0:
            weights = self._trainer.export_weights()
            self._spec.store.write_verified(self._spec.result, weights)
            written = hashlib.sha256(weights).hexdigest()
        return json.dumps(
            {
                "history": self._state.extras["history"],
                "model": self._spec.result,
                "sha256": written,
                "digest": digest,
                "rank": group.rank,
            }
        )


def _some(numbers: npt.NDArray[np.int64], most: int = 8) -> str:
    """For sentences: all of a few numbers, some of many."""
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
