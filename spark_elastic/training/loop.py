"""What the estimators' workers run: epochs over a materialized data set, step by step, from any position on.

A `worker.program.Program`, shipped by cloudpickle with the user's model inside its trainer. Knows no Spark and no
framework. The worker's main thread calls everything here.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import Division
from spark_elastic.data.transformation import Transformation
from spark_elastic.errors import add_note
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import MembershipVersion, Phase, Position, WorldView
from spark_elastic.runs.checkpoint import Checkpointer, SnapshotReader
from spark_elastic.runs.ledger import Ledger
from spark_elastic.runs.snapshot import build_snapshot
from spark_elastic.training.progress import TrainingProgress, select_figures, to_json_values
from spark_elastic.training.row_balancer import STRAGGLER_GAIN, RowBalancer
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.step_commits import StepCommits
from spark_elastic.training.trainer import ModelTrainer, StepCall, StepDisputed, sync_state
from spark_elastic.training.transformation_pool import TransformationPool, bind_transformation
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.program import CHANGE, Completed, Outcome, Stopped, WorkerHandle, exit_forks


class TrainingLoop:
    def __init__(
        self,
        spec: TrainSpec,
        trainer: ModelTrainer,
        transformation: Transformation | None = None,
        shapes_nothing: bool = False,
    ) -> None:
        """transformation: the user's, of the columns of a step. shapes_nothing: as in `BatchTransformation`."""
        self._spec, self._trainer = spec, trainer
        self._transformation, self._shapes_nothing = transformation, shapes_nothing
        self._has_state = False  # whether it holds the state of a world; else its position counts for nothing
        self._checkpointer: Checkpointer | None = None  # of who is or was rank 0 of a job with checkpoints

    def prepare(self) -> None:
        spec = self._spec
        self._clock = SystemClock()
        settings = spec.config.transformation
        transformation = bind_transformation(spec.config, self._transformation, self._shapes_nothing)
        workers, kind = settings.transformation_workers, settings.transformation_pool
        self._transformations = TransformationPool(transformation, workers, kind)
        self._transformations.start()  # its processes import while the model is prepared
        self._ledger = Ledger(spec.store, spec.ledger)
        self._trainer.prepare(TrainingProgress(), self._ledger)
        self._state, self._callbacks = self._trainer.state, self._trainer.callbacks
        self._snapshot_reader: SnapshotReader | None = None
        keeper = None if spec.checkpoints is None else get_process_context().commit_keeper
        self._commits = StepCommits(keeper, self._clock)
        if spec.checkpoints is not None:
            run_id, codec = spec.checkpoints.run_id, self._state.codec
            kept = None if keeper is None else keeper.kept
            self._snapshot_reader = SnapshotReader(spec.store, run_id, codec, kept)
        self._reader, self._loader = spec.open_reader(spec.rows)
        self._validation = None if spec.validation is None else spec.open_reader(spec.validation)

    def position(self) -> Position | None:
        return self._state.position if self._has_state else None

    def sync(self, world: WorldView, group: Group) -> Position:
        assert world.source is not None
        self._mark("formed", group)
        self._commits.wait()  # the state that is being copied may be replaced
        self._trainer.move_to_device()
        self._callbacks.on_fit_begin(group)
        if world.resume and group.rank == world.source:
            assert self._snapshot_reader is not None
            snapshot = self._snapshot_reader.read(world.resume)
            if snapshot is not None:
                self._state.load(snapshot)
        position = sync_state(self._state, group, world.source, world.receives)
        self._has_state = True
        if self._snapshot_reader is not None:
            self._snapshot_reader.forget()
        self._mark("synced", group)
        return position

    def run(self, world: WorldView, group: Group, handle: WorkerHandle) -> Outcome:
        self._has_state = True
        self._trainer.move_to_device()
        self._mark("runs", group)
        self._warn_of_dependence(group)
        self._callbacks.on_world_begin(group)
        self._balancer, self._reported = self._make_balancer(group), False
        self._commits.begin_world(world)
        policy = self._spec.checkpoints
        if group.rank == 0 and policy is not None and self._checkpointer is None:
            codec, report = self._state.codec, handle.report_checkpoint
            self._checkpointer = Checkpointer(self._spec.store, policy, self._clock, codec, report)
        try:
            is_over = self._run_epochs(world, group, handle)
            self._commits.keep(self._state, at_once=True)
            return Completed(self._finish(group)) if is_over else Stopped(CHANGE)
        except CollectiveError:
            self._mark("broke", group)
            if self._checkpointer is not None:
                self._checkpointer.discard_pending()
            raise

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._trainer.close()
        self._transformations.close()
        self._loader.close()
        self._reader.close()
        if self._validation is not None:
            self._validation[0].close()
        self._ledger.close()

    def _run_epochs(self, world: WorldView, group: Group, handle: WorkerHandle) -> bool:
        """Whether no work is left; False: all stop here, since the membership changes."""
        version = world.version
        while self._has_work():
            if self._state.position.phase is Phase.TRAIN:
                version = self._train(world, group, handle)
                if self._state.position.phase is Phase.TRAIN:
                    return False
            if self._state.position.phase is Phase.VALIDATE and not self._validate(world, group, handle):
                return False
            self._close_epoch(world, group, handle)
            if version > world.version and self._has_work():  # it may have come with the last step
                self._write_checkpoint_if_job_ends(world, version)
                return False
        return True

    def _has_work(self) -> bool:
        """A training that a callback ended still closes its epoch."""
        position, reason = self._state.position, self._state.progress.stop_reason
        is_stopped = reason is not None and position.phase is Phase.TRAIN
        return position.epoch < self._spec.config.data.epochs and not is_stopped

    def _train(self, world: WorldView, group: Group, handle: WorkerHandle) -> MembershipVersion:
        """Train until the epoch's end or a boundary at which all stop. Returns the newest membership version."""
        position, version = self._state.position, world.version
        handle.report_position(position)
        self._callbacks.on_epoch_begin(position.epoch)
        while self._state.position.phase is Phase.TRAIN and version == world.version:
            version = max(version, self._take_steps(world, group, handle))
        return version

    def _take_steps(self, world: WorldView, group: Group, handle: WorkerHandle) -> MembershipVersion:
        """The same, and until another division of the rows."""
        position, version, balancer = self._state.position, world.version, self._balancer
        begin, epochs = (position.epoch, position.step), self._spec.config.data.epochs
        self._trainer.work.restart(counts_exchanges=balancer is not None)
        with (
            self._loader.steps(*begin, group.rank, group.size, self._division, epochs) as steps,
            exit_forks(),  # before the reader is closed, whose threads a forked process has not
            self._transformations.transform(steps, self._spec.plan, group, augments=True) as pending_steps,
        ):
            for pending in pending_steps:
                rows = pending.rows
                if rows.step == position.step:
                    self._mark("read", group)
                began = self._clock.now()

                def record_step(decision: StepDecision, began: float = began) -> Position:
                    return self._record_step(decision, group.size, self._clock.now() - began)

                self._callbacks.on_step_begin(rows.epoch, rows.step)
                finalize, get_next_rows = self._call_step_finalized, pending_steps.get_next_rows
                call = StepCall(group, handle.membership_version(), record_step, finalize, get_next_rows)
                try:
                    decision = self._take_step(pending.finish(), call)
                except Exception as error:
                    self._add_rows(error, rows)
                    raise
                handle.report_position(self._state.position)
                self._commits.keep(self._state)
                self._write_pending_and_build_next(world, applied=True)
                self._report(group, handle, decision.loss / (decision.denominator or 1.0), decision.rows)
                version = decision.version
                if self._state.position.phase is not Phase.TRAIN:
                    break
                if version > world.version:
                    self._write_checkpoint_if_job_ends(world, version)
                    break
                if balancer is not None and balancer.add(decision.seconds):
                    self._show_division(balancer.parts, group)
                    break
                self._report_straggler(group, handle)
        return version

    def _take_step(self, rows: StepRows, call: StepCall) -> StepDecision:
        """Again while ranks dispute its bits; one that is suspected twice raises, and the others go on without it."""
        rank, suspected = call.group.rank, False
        while True:
            try:
                return self._trainer.train_step(rows, call)
            except StepDisputed as dispute:
                if rank in dispute.suspects and suspected:
                    raise
                suspected = rank in dispute.suspects
                if rank == 0:
                    step = f"step {rows.step} of epoch {rows.epoch + 1}"
                    sys.stderr.write(f"{step} is taken again: {dispute}\n")

    @property
    def _division(self) -> Division | None:
        """How the ranks divide the rows of each step; None: equally."""
        return None if self._balancer is None else self._balancer.division

    def _make_balancer(self, group: Group) -> RowBalancer | None:
        """None: the ranks of this world divide all rows equally. Alike on all ranks."""
        plan = self._spec.plan
        parts = plan.shares or plan.base_rows
        if group.size == 1 or parts < group.size or not self._spec.config.world.balance_rows:
            return None
        return RowBalancer(parts, group.size, plan.shares)

    def _report_straggler(self, group: Group, handle: WorkerHandle) -> None:
        """Ask the driver to replace this worker, once the others would be quicker without it."""
        balancer, rank = self._balancer, group.rank
        if balancer is not None and balancer.straggler == rank and not self._reported:
            self._reported = True
            handle.report_straggler(
                f"without rank {rank} the others would finish the step at least {STRAGGLER_GAIN:.0%} sooner, although "
                f"it has only {balancer.parts[rank]} of its {sum(balancer.parts)} parts"
            )

    def _show_division(self, parts: Sequence[int], group: Group) -> None:
        if group.rank == 0:
            what = "virtual shares" if self._spec.plan.shares else "rows of a step"
            numbers = " : ".join(map(str, parts))
            sys.stderr.write(f"the workers, by rank, take {numbers} {what} from now on, by their speed\n")

    def _add_rows(self, error: Exception, rows: StepRows) -> None:
        if not isinstance(error, CollectiveError):
            groups = np.searchsorted(self._spec.plan.group_offsets, rows.row_ids, side="right") - 1
            text = f"{_format_some(rows.row_ids)} of row groups {_format_some(np.unique(groups))}"
            step = f"in step {rows.step} of epoch {rows.epoch + 1}, on this worker's {len(rows)} rows"
            add_note(error, f"{step}: {text}")

    def _record_step(self, decision: StepDecision, world_size: int, seconds: float) -> Position:
        """Add a step to the epoch's sums. Returns the position after the step. Part of the apply section."""
        progress, position = self._state.progress, self._state.position
        progress.epoch.add(decision, world_size, seconds)
        self._callbacks.on_step_applied()
        loss = decision.loss / (decision.denominator or 1.0)
        where = {"epoch": position.epoch, "step": position.step}
        progress.pending_logs = {**where, "loss": loss, "rows": decision.rows}
        if decision.stops:
            progress.stop_reason = "a callback ended the training"
        elif position.step + 1 < self._spec.plan.steps:
            return Position(position.epoch, position.phase, position.step + 1)
        return Position(position.epoch, Phase.CLOSE if self._validation is None else Phase.VALIDATE, 0)

    def _call_step_finalized(self) -> None:
        """Call the callbacks for the newest step, which is finalized now (R1, finalized steps)."""
        self._commits.wait()  # the next step is about to be applied
        progress = self._state.progress
        logs, progress.pending_logs = progress.pending_logs, None
        if logs is not None:
            self._callbacks.on_step_finalized(logs)

    def _on_finalized(self, world: WorldView, version: MembershipVersion) -> None:
        """An exchange that applies no step of training is complete, with this newest version."""
        self._write_pending_and_build_next(world, applied=False)
        self._call_step_finalized()
        self._commits.keep(self._state)
        self._write_checkpoint_if_job_ends(world, version)

    def _write_pending_and_build_next(self, world: WorldView, *, applied: bool) -> None:
        """An exchange is complete, by which a step was applied or not: the step before it is final."""
        checkpointer, state = self._checkpointer, self._state
        if checkpointer is None:
            return
        checkpointer.write_pending(world.fence)
        if applied and checkpointer.count_step():
            checkpointer.build_pending(lambda: build_snapshot(state.position, state.capture))

    def _write_checkpoint_if_job_ends(self, world: WorldView, version: MembershipVersion) -> None:
        """If this boundary is the job's last, write the state to the store before any worker leaves."""
        checkpointer, state = self._checkpointer, self._state
        if checkpointer is not None and version > world.version and version.job_ends:
            checkpointer.build_pending(lambda: build_snapshot(state.position, state.capture))
            checkpointer.write_pending(world.fence)
            checkpointer.flush()

    def _close_epoch(self, world: WorldView, group: Group, handle: WorkerHandle) -> None:
        """The barrier makes the last step final (R1, finalized steps); then all ranks add the epoch to the history."""
        group.barrier()
        self._on_finalized(world, world.version)
        state, entry = self._state, self._history_entry()
        stop_reason = self._callbacks.on_epoch_end(group, entry)
        progress = state.progress
        progress.stop_reason = progress.stop_reason or stop_reason
        progress.history.append(to_json_values(entry))
        self._report(group, handle, entry["loss"], entry["rows"] // entry["steps"])
        progress.begin_epoch()
        self._trainer.reset_metrics()
        state.position = Position(state.position.epoch + 1, Phase.TRAIN, 0)
        handle.report_position(state.position)
        self._commits.keep(self._state)

    def _history_entry(self) -> dict[str, Any]:
        sums = self._state.progress.epoch
        planned = self._spec.plan.count_rows_before(sums.steps)
        entry = sums.history_entry(self._state.position.epoch, planned)
        for name, value in self._trainer.epoch_metrics().items():
            if name not in entry or name == "loss":  # a LightningModule may log a number of any name
                entry[name] = value
        if self._validation is not None:
            sums = self._state.progress.validation
            loss = {} if math.isnan(sums.divisor) else {"val_loss": sums.mean_loss()}
            for name, value in {**loss, "val_rows": sums.rows}.items():
                entry.setdefault(name, value)  # a model may compute its own val_loss
        return entry

    def _validate(self, world: WorldView, group: Group, handle: WorkerHandle) -> bool:
        """Take the steps of validation that are left. False: all stopped at a boundary; no drain waits for the end."""
        assert self._validation is not None
        assert self._spec.validation is not None
        plan, position, (_, loader) = self._spec.validation.plan, self._state.position, self._validation

        def record_step(decision: StepDecision) -> Position:
            self._state.progress.validation.add(decision, group.size, 0.0)
            step = self._state.position.step + 1
            following = Position(position.epoch, position.phase, step)
            return following if step < plan.steps else Position(position.epoch, Phase.CLOSE, 0)

        with (
            self._trainer.validation_mode(),
            loader.steps(0, position.step, group.rank, group.size, self._division) as steps,
            exit_forks(),
            self._transformations.transform(steps, plan, group, augments=False) as pending_steps,
        ):
            for pending in pending_steps:
                version, get_next_rows = handle.membership_version(), pending_steps.get_next_rows
                call = StepCall(group, version, record_step, get_next_rows=get_next_rows)
                decision = self._trainer.validation_step(pending.finish(), call)
                handle.report_position(self._state.position)
                self._on_finalized(world, decision.version)
                if decision.version > world.version:
                    return False
        return True

    def _warn_of_dependence(self, group: Group) -> None:
        """Warn once per training, in its first world of several workers (R9, scope of P2)."""
        progress = self._state.progress
        if group.size > 1 and not progress.has_warned:
            progress.has_warned = True
            sentence = self._trainer.describe_world_dependence()
            if sentence is not None and group.rank == 0:
                warnings.warn(sentence, UserWarning, stacklevel=2)

    def _mark(self, event: str, group: Group) -> None:
        self._ledger.mark(event, group.fence, self._state.position)

    def _report(self, group: Group, handle: WorkerHandle, loss: float, rows: int) -> None:
        """Report progress, with the figures of the last closed epoch. rows: of one step."""
        position, history = self._state.position, self._state.progress.history
        checkpointer, bulk = self._checkpointer, self._trainer.bulk_seconds
        handle.report_metrics(
            {
                **(select_figures(history[-1]) if history else {}),
                "epoch": position.epoch,
                "epochs": self._spec.config.data.epochs,
                "closed": len(history),
                "step": position.step if position.phase is Phase.TRAIN else self._spec.plan.steps,
                "steps": self._spec.plan.steps,
                "loss": loss,
                "rows": rows,
                "world": group.size,
                "checkpoint_seconds": 0.0 if checkpointer is None else checkpointer.stall_seconds,
                **({} if bulk is None else {"bulk_seconds": bulk, "bulk_generation": group.fence[1]}),
            }
        )

    def _finish(self, group: Group) -> str:
        """Rank 0 writes the final model (R15, end). A later rank 0 holds the same model and would write it again."""
        history = self._state.progress.history
        self._callbacks.on_fit_end(history)
        digest, sha256 = self._state.digest(), ""
        if group.rank == 0:
            weights = self._trainer.export_weights()
            self._spec.store.write_verified(self._spec.result, weights)
            sha256 = hashlib.sha256(weights).hexdigest()
        model = {"model": self._spec.result, "sha256": sha256}
        return json.dumps({"history": history, **model, "digest": digest, "rank": group.rank})


def _format_some(numbers: npt.NDArray[np.int64], most: int = 8) -> str:
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
