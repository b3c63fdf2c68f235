"""Callbacks that write the numbers of a training to TensorBoard, MLflow and W&B. Rank 0 writes; the others keep count.

The packages are imported on the workers, where they are used. They continue where they stood when another worker
becomes rank 0, or another driver resumes the run. Called from the main thread of training. A thread of its own talks
to a tracking server: a client retries for minutes before it gives up, and the other ranks would wait for rank 0.
"""

from __future__ import annotations

import atexit
import logging
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spark_elastic.checks import require_package
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput
from spark_elastic.monitoring.listener import AsyncNotifier
from spark_elastic.training.torch.callbacks import Callback, Logs, Training

log = logging.getLogger("spark_elastic")

PLACE = ("epoch", "step")  # where numbers stand, not numbers
END_WAIT = 10.0  # seconds that the end of a fit waits for a tracking server
REQUEST = 1000  # numbers that MLflow takes at once
MOST_WAITING = 50 * REQUEST  # of more, the newest are kept


class _Counting(Callback, ABC):
    """Counts the steps of all epochs. every: steps from one point of a curve to the next."""

    _module, _package = "", ""  # what it imports on every executor, and from which package

    def __init__(self, every: int) -> None:
        if every < 1:
            raise InvalidInput(f"every must be a number of steps of at least 1; got {every!r}.")
        self.steps = 0
        self._every = every

    def on_fit_begin(self, training: Training) -> None:
        self._import()

    def _import(self, part: str = "") -> Any:
        return require_package(
            self._module + part, f"{type(self).__name__}, on every executor,", self._package
        )

    def on_step_end(self, training: Training, logs: Logs) -> None:
        self.steps += 1
        if training.rank == 0 and self.steps % self._every == 0:
            shown = numbers(logs) | {"learning_rate": training.learning_rate, "world": float(training.size)}
            self.write("step", shown, self.steps)

    def on_epoch_end(self, training: Training, logs: Logs) -> None:
        if training.rank == 0:
            self.write("epoch", numbers(logs), int(logs["epoch"]))

    @abstractmethod
    def write(self, kind: str, values: Mapping[str, float], at: int) -> None:
        """Called on rank 0. kind: "step" or "epoch"; at: which one."""


class TensorBoardLogger(_Counting):
    """Event files for TensorBoard: `step/...` each `every` steps, `epoch/...` with validation and metrics.

    log_dir: a folder that every executor sees, or a place that TensorBoard can write to.
    """

    _module, _package = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, log_dir: str, every: int = 10) -> None:
        super().__init__(every)
        self._log_dir = log_dir
        self._writer: Any = None

    def write(self, kind: str, values: Mapping[str, float], at: int) -> None:
        if self._writer is None:
            # What a rank 0 that was lost had written of later steps does not count.
            self._writer = self._import().SummaryWriter(self._log_dir, purge_step=self.steps)
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, at)
        if kind == "epoch":
            self._writer.flush()

    def on_fit_end(self, training: Training, history: list[dict[str, Any]]) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Remote(_Counting):
    """Writes to a server through a thread of its own. A server that fails costs numbers and one warning."""

    _server = ""  # its name in the warning

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._notifier: AsyncNotifier | None = None
        self._run: Any = None  # this one belongs to the notifier's thread; None: not open yet
        self._failed = False

    def submit(self, call: Callable[[], object], *, replaces: bool = False) -> None:
        """Make a call in the thread, once the run is open. replaces: an earlier one of its kind that still waits."""
        if self._notifier is None:
            self._notifier = AsyncNotifier().__enter__()
            atexit.register(self._notifier.close)  # of a rank 0 that leaves before the training's end
        (self._notifier.submit_latest if replaces else self._notifier.submit)(partial(self._send, call))

    def on_fit_end(self, training: Training, history: list[dict[str, Any]]) -> None:
        if training.rank == 0:
            self.submit(self.end_run)
        if self._notifier is None:
            return
        self._notifier.close(END_WAIT)
        if self._notifier.is_alive():
            self._warn(f"no answer within {END_WAIT:g} s of the training's end")
        self._notifier = None

    @abstractmethod
    def open_run(self) -> Any:
        """Called in the thread. The run, or a new one where there is none yet."""

    @abstractmethod
    def end_run(self) -> None:
        """Called in the thread."""

    def _send(self, call: Callable[[], object]) -> None:
        try:
            if self._run is None:
                self._run = self.open_run()
            call()
        except Exception as reason:  # whatever it is, the training continues
            self._warn(reason)

    def _warn(self, reason: object) -> None:
        if not self._failed:
            log.warning("%s does not take the training's numbers: %s", self._server, reason)
        self._failed = True


class MLflowLogger(_Remote):
    """One run of MLflow: metrics `step_...` each `every` steps, `epoch_...` with validation and metrics.

    tracking_uri: of a server or store that every executor reaches. A tracking server that fails costs numbers and one
    warning, never the training. Credentials: MLflow's own variables in the executors' environment. After `fit`,
    `spark_elastic.estimators.mlflow_fit.log_fit` adds parameters, data, environment and model to the same run.
    """

    _module, _package = "mlflow", "mlflow-skinny"

    def __init__(
        self, tracking_uri: str, experiment: str, run_name: str | None = None, every: int = 10
    ) -> None:
        super().__init__(every)
        self.key = uuid.uuid4().hex  # a tag, by which a later rank 0 finds the run
        self._server = f"MLflow at {tracking_uri}"
        self._tracking_uri, self._experiment, self._run_name = tracking_uri, experiment, run_name
        self._waiting: deque[Any] = deque(maxlen=MOST_WAITING)  # written, and not sent yet
        self._client: Any = None  # belongs to the notifier's thread

    @property
    def tracking_uri(self) -> str:
        return self._tracking_uri

    def write(self, kind: str, values: Mapping[str, float], at: int) -> None:
        entities = self._import(".entities")
        now = int(SystemClock().wall() * 1000)
        for name, value in values.items():
            self._waiting.append(entities.Metric(f"{kind}_{name}", value, now, at))
        self.submit(self._log_waiting, replaces=True)

    def find_run(self) -> str | None:
        """The id of the run, also on the driver; None while there is none. Asks the tracking server."""
        client = self._import().MlflowClient(self._tracking_uri)
        found = client.get_experiment_by_name(self._experiment)
        runs = found and client.search_runs([found.experiment_id], f"tags.spark_elastic = '{self.key}'")
        return str(runs[0].info.run_id) if runs else None

    def open_run(self) -> str:
        self._client = self._import().MlflowClient(self._tracking_uri)
        run = self.find_run()
        if run is not None:
            return run
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        tags = {"spark_elastic": self.key}
        made = self._client.create_run(experiment, tags=tags, run_name=self._run_name)
        return str(made.info.run_id)

    def end_run(self) -> None:
        self._client.set_terminated(self._run)

    def _log_waiting(self) -> None:
        """In as few requests as MLflow takes: steps may be faster than a server answers."""
        while self._waiting:
            count = min(len(self._waiting), REQUEST)
            self._client.log_batch(self._run, [self._waiting.popleft() for _ in range(count)])


class WandbLogger(_Remote):
    """One run of Weights & Biases: `step/...` each `every` steps, `epoch/...` with validation and metrics.

    project: of W&B. options: of `wandb.init`, such as entity, name, config, dir, or mode="offline", whose files `wandb
    sync` sends later. Credentials: W&B's own variables in the executors' environment. A server that fails costs numbers
    and one warning, never the training.
    """

    _module = _package = "wandb"
    _server = "W&B"

    def __init__(self, project: str, every: int = 10, **options: Any) -> None:
        super().__init__(every)
        self.key = uuid.uuid4().hex[:16]  # the run's id, by which a later rank 0 continues it
        self._project, self._options = project, options

    def write(self, kind: str, values: Mapping[str, float], at: int) -> None:
        row = {f"{kind}/{name}": value for name, value in values.items()}
        self.submit(lambda: self._run.log({**row, kind: at}))

    def open_run(self) -> Any:
        run = self._import().init(project=self._project, id=self.key, resume="allow", **self._options)
        for kind in ("step", "epoch"):  # points stand where the training was, whichever worker wrote them
            run.define_metric(kind, hidden=True)
            run.define_metric(f"{kind}/*", step_metric=kind)
        return run

    def end_run(self) -> None:
        self._run.finish()


def numbers(logs: Logs) -> dict[str, float]:
    """What can be a point of a curve."""
    found = {name: value for name, value in logs.items() if name not in PLACE and not isinstance(value, bool)}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
