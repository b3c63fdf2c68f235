"""What the estimator's workers run: epochs over a materialised data set, step by step, from any position on.

A `worker.program.Program`, shipped by cloudpickle with the user's model, optimizer and loss inside. Knows no Spark.
All methods are called from the worker's main thread.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.data.arrow_reader import ArrowReader
from spark_elastic.data.loader import StepLoader, StepRows
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Phase, Position, World
from spark_elastic.torch.checkpointing import Checkpointing, CheckpointPolicy, restore
from spark_elastic.torch.columns import Columns
from spark_elastic.torch.coupling import world_dependence
from spark_elastic.torch.exchange import GradientExchange
from spark_elastic.torch.ledger import FileLedger, Ledger, NullLedger
from spark_elastic.torch.loss import RowLoss
from spark_elastic.torch.torch_state import TorchState
from spark_elastic.torch.trailer import Verdict
from spark_elastic.torch.training import Clipping, StepTaker
from spark_elastic.worker.program import Completed, Outcome, Session, Stopped
from spark_elastic.worker.seat import engine_of_process

CHANGE = "the membership changes"


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything about a training but the user's objects.

    data, store: where the rows lie and where results go; the final model is written to `result`, a name in `store`.
    checkpoints: when and for which run, None for no checkpoints.
    features: as the model sees them. batch_size: most rows of one forward pass. ledger: folder, None for no ledger.
    """

    data: Store
    manifest: Manifest
    plan: DataPlan
    store: Store
    result: str
    features: tuple[Column, ...]
    labels: tuple[str, ...]
    weight: str | None
    batch_size: int
    epochs: int
    seed: int
    clipping: Clipping
    ledger: str | None = None
    checkpoints: CheckpointPolicy | None = None


class TorchTrainTask:
    """optimizer: over the model's parameters (pickled together with it), or a function that makes one."""

    def __init__(
        self,
        spec: TrainSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
        loss: Callable[..., torch.Tensor],
    ) -> None:
        self._spec = spec
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._begun = False
        self._checkpointing: Checkpointing | None = None

    def prepare(self) -> None:
        spec = self._spec
        torch.manual_seed(spec.seed)
        self._model.train()
        optimizer = self._optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(self._model.parameters())
        self._state = TorchState(
            self._model,
            optimizer,
            history=[],
            loss=0.0,
            divisor=0.0,
            rows=0,
            seconds=0.0,
            sizes=[],
            warned=False,
        )
        self._exchange = GradientExchange(self._model.named_parameters(), engine=engine_of_process)
        self._ledger: Ledger = NullLedger() if spec.ledger is None else FileLedger(spec.ledger, SystemClock())
        self._taker = StepTaker(
            self._state,
            RowLoss(self._loss, weighted=spec.weight is not None),
            self._exchange,
            spec.batch_size,
            spec.clipping,
            self._ledger,
            spec.seed,
        )
        used = [c.name for c in spec.features] + [*spec.labels, *([spec.weight] if spec.weight else [])]
        columns = [spec.manifest.column(name) for name in dict.fromkeys(used)]
        self._reader = ArrowReader(spec.data, spec.manifest, [c.name for c in columns])
        self._loader = StepLoader(spec.plan, self._reader, columns)
        self._columns = Columns(spec.features, spec.labels, spec.weight, self._exchange.parameters[0].dtype)
        self._clock = SystemClock()

    def position(self) -> Position | None:
        return self._state.position if self._begun else None

    def sync(self, world: World, group: Group) -> Position:
        assert world.source is not None
        self._mark("formed", group)
        if world.resume and group.rank == world.source:
            assert self._spec.checkpoints is not None
            restore(self._spec.store, self._spec.checkpoints.run_id, world.resume, self._state)
        position = self._state.sync(group, world.source, world.receivers)
        self._begun = True
        self._mark("synced", group)
        return position

    def run(self, world: World, group: Group, session: Session) -> Outcome:
        self._begun = True
        self._mark("runs", group)
        self._warn(group)
        if group.rank == 0 and self._spec.checkpoints is not None and self._checkpointing is None:
            tell = session.wrote_checkpoint
            self._checkpointing = Checkpointing(self._spec.store, self._spec.checkpoints, self._clock, tell)
        try:
            return self._epochs(world, group, session)
        except CollectiveError:
            self._mark("broke", group)
            if self._checkpointing is not None:
                self._checkpointing.unsealed()
            raise

    def _epochs(self, world: World, group: Group, session: Session) -> Outcome:
        while self._state.position.epoch < self._spec.epochs:
            if self._state.position.phase is Phase.TRAIN and not self._train(world, group, session):
                return Stopped(CHANGE)
            self._close_epoch(world, group, session)
        return Completed(self._finish(group))

    def close(self) -> None:
        if self._checkpointing is not None:
            self._checkpointing.close()
        self._exchange.close()
        self._reader.close()
        self._ledger.close()

    def _train(self, world: World, group: Group, session: Session) -> bool:
        """The rest of an epoch's steps; False when it stopped at a boundary."""
        here = self._state.position
        session.tell(here)
        with self._loader.steps(here.epoch, here.step, group.rank, group.size) as steps:
            for rows in steps:
                if rows.step == here.step:
                    self._mark("read", group)
                began = self._clock.now()

                def account(verdict: Verdict, began: float = began) -> Position:
                    return self._account(verdict, group.size, self._clock.now() - began)

                with self._located(rows):
                    share = self._columns.share(rows)
                    verdict = self._taker.take(group, share, session.membership_version(), account)
                session.tell(self._state.position)
                self._keep(world, applied=True)
                self._report(group, session, verdict)
                if verdict.version > world.version and self._state.position.phase is Phase.TRAIN:
                    return False
        return True

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

    def _account(self, verdict: Verdict, size: int, seconds: float) -> Position:
        """The epoch's sums, part of the state, and the position after the step."""
        sums, here = self._state.extras, self._state.position
        sums["loss"] += verdict.loss
        sums["divisor"] += verdict.denominator or 1.0
        sums["rows"] += verdict.rows
        sums["seconds"] += seconds
        if size not in sums["sizes"]:
            sums["sizes"].append(size)
        if here.step + 1 == self._spec.plan.steps:
            return Position(here.epoch, Phase.CLOSE, 0)
        return Position(here.epoch, here.phase, here.step + 1)

    def _keep(self, world: World, applied: bool) -> None:
        """An exchange is complete, so that the step before it is sealed; `applied`: and its own step was applied."""
        if self._checkpointing is not None:
            self._checkpointing.sealed(world.fence)
            if applied:
                self._checkpointing.applied(self._state)

    def _close_epoch(self, world: World, group: Group, session: Session) -> None:
        """R1: the barrier seals the epoch's last step; then it enters the history, identical on all ranks."""
        group.barrier()
        self._keep(world, applied=False)
        sums, here = self._state.extras, self._state.position
        sums["history"].append(
            {
                "epoch": here.epoch,
                "loss": sums["loss"] / sums["divisor"],
                "rows": sums["rows"],
                "steps": self._spec.plan.steps,
                "seconds": sums["seconds"],
                "worlds": sums["sizes"],
            }
        )
        sums.update(loss=0.0, divisor=0.0, rows=0, seconds=0.0, sizes=[])
        self._state.position = Position(here.epoch + 1, Phase.TRAIN, 0)
        session.tell(self._state.position)

    def _warn(self, group: Group) -> None:
        """R9: once a training, at its first world of several workers; that it was said is part of the state."""
        if group.size > 1 and not self._state.extras["warned"]:
            self._state.extras["warned"] = True
            sentence = world_dependence(self._model)
            if sentence is not None and group.rank == 0:
                warnings.warn(sentence, UserWarning, stacklevel=2)

    def _mark(self, event: str, group: Group) -> None:
        self._ledger.mark(event, group.fence, self._state.position)

    def _report(self, group: Group, session: Session, verdict: Verdict) -> None:
        here = self._state.position
        session.report(
            {
                "epoch": here.epoch,
                "epochs": self._spec.epochs,
                "step": here.step if here.phase is Phase.TRAIN else self._spec.plan.steps,
                "steps": self._spec.plan.steps,
                "loss": verdict.loss / (verdict.denominator or 1.0),
                "rows": verdict.rows,
                "world": group.size,
            }
        )

    def _finish(self, group: Group) -> str:
        """R15: rank 0 writes the final model; whoever is rank 0 when it is asked for holds the same one."""
        digest, written = self._state.digest(), ""
        if group.rank == 0:
            buffer = io.BytesIO()
            torch.save(self._state.model.state_dict(), buffer)
            self._spec.store.write_bytes(self._spec.result, buffer.getvalue())
            written = hashlib.sha256(buffer.getbuffer()).hexdigest()
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
    """All of a few, some of many."""
    shown = ", ".join(str(number) for number in numbers[:most])
    return shown if len(numbers) <= most else f"{shown} and {len(numbers) - most} more"
