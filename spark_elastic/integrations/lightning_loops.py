"""Lightning's `fit` in world after world: its loops with commits, and what a commit holds.

A commit is a checkpoint of Lightning's kept in memory: the Trainer restores callbacks, loops, schedulers and the
position of the data as from a file, this module model and optimizers. It takes the package that the program has
imported, `lightning` if it has imported none. Training thread only.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.generators import get_generators, set_generators
from spark_elastic.handwritten.torch_state import forget_gradients
from spark_elastic.integrations.trainer_adapter import TrainerAdapter
from spark_elastic.runs.snapshot import Kept, SnapshotBuilder, pickle_value
from spark_elastic.training.torch.module_state import FrozenCopies, ModelStateHandler, OptimizerStateHandler


def _choose_package() -> str:
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return "pytorch_lightning"
    return "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"


def import_lightning(module: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{module}")


_PACKAGE = _choose_package()
try:
    _EpochLoop: Any = import_lightning("loops.training_epoch_loop")._TrainingEpochLoop
    _FitLoop: Any = import_lightning("loops.fit_loop")._FitLoop
    _ = _FitLoop.restarted_mid_epoch
except AttributeError:
    raise InvalidInput("ElasticStrategy needs Lightning 2.6 or newer: pip install -U lightning.") from None

COMMIT = "the newest commit, in memory"  # in place of a checkpoint's path


class LightningFit(TrainerAdapter):
    """The `fit` of a Trainer. Lightning makes optimizers, loaders and what wraps the model again in each world."""

    @property
    def has_memory(self) -> bool:  # type: ignore[override]
        return self.divided is None

    def __init__(self, strategy: Any, commit_every: int) -> None:
        super().__init__(commit_every)
        self._strategy = strategy
        self.trainer: Any = None  # that of the `fit` under way
        self.divides = False  # whether `configure_model` divides the model by FSDP2
        # Of this world's model and optimizers, unless the model is divided; None before Lightning has made them.
        self._handlers: tuple[list[ModelStateHandler], list[OptimizerStateHandler]] | None = None
        self.is_capturing = False
        self.frozen = FrozenCopies()  # of the model of the `fit` under way
        self.generators: Any = None  # to be set when training begins with a commit
        self.resumes = False  # in this world the Trainer has begun with a commit, and trained no batch yet

    @property
    def step(self) -> int:
        return int(self.trainer.global_step)

    def forget(self) -> None:
        self._handlers = None

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self._handlers is None else list(self._strategy.optimizers)

    def list_kept(self) -> Mapping[Any, Kept]:
        return self.frozen.list_copies()

    def fit(self, trainer: Any, fit: Callable[..., Any], arguments: list[Any]) -> Any:
        """Run a Trainer's `fit` in world after world, until the last step.

        Args:
            arguments: those of `fit`; one of them is the path of a checkpoint, which counts until the first commit.
        """
        self.trainer, self.frozen = trainer, FrozenCopies()
        model = self._strategy.lightning_module
        if self.divides:
            self.divide(model, lambda: self._strategy.optimizers)
        else:
            self.frozen.take({name: p for name, p in model.named_parameters() if not p.requires_grad})
        _replace_loops(trainer, self)
        place = list(inspect.signature(fit).parameters).index("ckpt_path")

        def fit_in_world() -> Any:
            if self.has_begun:
                trainer.training = True  # the world may have ended in a validation
                trainer._teardown()  # Lightning's own end of what the former world had
            given, self.resumes = list(arguments), self.restore()
            if self.resumes:
                given[place] = COMMIT
            return fit(*given)

        return self.train_in_worlds(fit_in_world)

    def handle_values(self) -> None:
        """Take the model and the optimizers that Lightning has made for this world."""
        assert self.state is not None
        scaler = getattr(self._strategy.precision_plugin, "scaler", None)
        if scaler is not None:
            forget_gradients(scaler)
        if self.divided is not None:
            if self.pending is None:  # else callbacks come first, as before a checkpoint is loaded
                self.finish_world()
            self._handlers = [], []
            return
        model, optimizers = self._strategy.lightning_module, self._strategy.optimizers
        handlers = [OptimizerStateHandler(optimizer) for optimizer in optimizers]
        whole = ModelStateHandler(model)
        self._handlers = [whole], handlers
        whole.frozen = self.frozen
        whole.trained = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        for handler in handlers:
            handler.list_parameters = model.named_parameters
        self.state._hooked.clear()

    # ---- commits

    def capture(self, builder: SnapshotBuilder) -> dict[str, Any] | None:
        """Everything that a checkpoint of Lightning holds; None before the model is set up."""
        if self._handlers is None:
            return None
        trainer, (models, optimizers) = self.trainer, self._handlers
        self.is_capturing = True
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            self.is_capturing = False
        del checkpoint["state_dict"], checkpoint["optimizer_states"]
        connector = trainer._logger_connector
        return {
            "parts": [handler.capture(builder) for handler in (*models, *optimizers)],
            "rest": pickle_value(
                {
                    "checkpoint": checkpoint,
                    "generators": get_generators(),
                    "should stop": trainer.should_stop,
                    "position": self.loader.state_dict(),
                    "metrics": (dict(connector._callback_metrics), dict(connector._logged_metrics)),
                }
            ),
        }

    def load_checkpoint(self) -> dict[str, Any]:
        """Restore model and optimizers; returns what the Trainer restores."""
        assert self._handlers is not None
        self.finish_world()
        (values, memory), (models, optimizers) = self.pending, self._handlers
        for handler, saved in zip((*models, *optimizers), values["parts"], strict=True):
            handler.load(saved, memory)
        checkpoint: dict[str, Any] = pickle.loads(values["rest"])["checkpoint"]
        return {
            **checkpoint,
            "state_dict": self._strategy.lightning_module.state_dict(),
            "optimizer_states": [],
        }

    def finish_restoring(self) -> None:
        """The Trainer has restored what a checkpoint of Lightning holds; here is the rest."""
        if self.divided is not None:
            self.divided.reshard()
        if self.pending is None:
            return
        rest = pickle.loads(self.pending[0]["rest"])
        super().finish_restoring()
        self.trainer.should_stop = rest["should stop"]
        connector = self.trainer._logger_connector
        connector._callback_metrics, connector._logged_metrics = rest["metrics"]
        self.loader.load_state_dict(rest["position"])
        iter(self.trainer.fit_loop._data_fetcher)  # from that position on
        self.generators = rest["generators"]

    def enter_epoch(self, epoch: int) -> bool:
        """Whether the loader was in an earlier one: Lightning stops at the last batch, and may make new loaders."""
        if self.loader.epoch >= epoch:
            return False
        self.loader.set_epoch(epoch)
        return True


class _ElasticFitLoop(_FitLoop):  # type: ignore[misc]
    """Lightning's loop over epochs; commits at the start of training and at the end of each epoch."""

    adapter: LightningFit

    def run(self) -> None:
        self.setup_data()
        self.adapter.finish_restoring()
        super().run()

    def on_run_start(self) -> None:
        super().on_run_start()
        if self.adapter.resumes:
            set_generators(self.adapter.generators)
        elif not self.restarting:  # a checkpoint's file has counters that fit no commit before the first step
            self.adapter.commit()

    def on_advance_start(self) -> None:
        super().on_advance_start()
        if self.adapter.enter_epoch(self.epoch_progress.current.processed):
            iter(self._data_fetcher)

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.adapter.enter_epoch(self.epoch_progress.current.processed)
        self.adapter.commit()


class _ElasticEpochLoop(_EpochLoop):  # type: ignore[misc]
    """Lightning's loop over batches; commits between two of them, after all that Lightning does for the first."""

    adapter: LightningFit

    def reset(self) -> None:
        if self.adapter.resumes and self._num_ready_batches_reached():
            self.restarting = False  # the commit followed an epoch's end, and this is the next epoch
        super().reset()

    def advance(self, data_fetcher: Any) -> None:
        if self.adapter.resumes:
            # Nothing of the batch before is left to be done, such as its validation.
            self.adapter.resumes = self.trainer.fit_loop.restarting = False
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        super().on_advance_end(data_fetcher)
        if self.adapter.is_due() and not self.done:
            self.adapter.commit()


def _replace_loops(trainer: Any, adapter: LightningFit) -> None:
    """Give a Trainer the loops that commit, in the state of its own."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if not isinstance(fit, _ElasticFitLoop):
        if type(fit) is not _FitLoop or type(epoch) is not _EpochLoop:
            raise InvalidInput(
                "ElasticStrategy brings its own loops: leave the Trainer's fit_loop as it was made."
            )
        fit.__class__, epoch.__class__ = _ElasticFitLoop, _ElasticEpochLoop
    fit.adapter = epoch.adapter = adapter
