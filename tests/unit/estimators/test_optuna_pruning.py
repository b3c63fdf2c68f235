"""Optuna prunes a fit: each epoch is told once, and only a job that it cancelled becomes a pruned trial."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from spark_elastic.driver.discovery import HandleDiscovery
from spark_elastic.errors import InvalidInput, JobCancelled
from spark_elastic.integrations.optuna_pruning import TrialPruning


def _play_fit(pruning: TrialPruning, losses: list[float]) -> None:
    """The progress of a fit, which ends by its handle: several reports in each epoch."""
    orders: list[Any] = []
    discovery = HandleDiscovery(pruning.handle)
    discovery.start(orders.append)
    pruning.report({"epoch": 0, "closed": 0, "step": 1, "loss": 9.0})
    for closed, loss in enumerate(losses, 1):
        for step in (9, 1):
            pruning.report({"epoch": closed, "closed": closed, "step": step, "val_loss": loss, "loss": 9.0})
        if orders:
            raise JobCancelled(orders[0].reason)
    discovery.close()


def test_a_trial_that_is_worse_than_the_others_is_pruned() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))

    def objective(trial: optuna.Trial) -> float:
        scale = trial.suggest_categorical("scale", [1.0])
        losses = [scale * (1 + 5 * trial.number), 0.5, 0.25]
        with TrialPruning(trial) as pruning:
            _play_fit(pruning, losses)
        return losses[-1]

    study.optimize(objective, n_trials=2)
    good, bad = study.trials
    assert good.state is optuna.trial.TrialState.COMPLETE
    assert good.intermediate_values == {0: 1.0, 1: 0.5, 2: 0.25}
    assert bad.state is optuna.trial.TrialState.PRUNED
    assert bad.intermediate_values == {0: 6.0}


def test_a_job_that_the_user_cancelled_is_no_pruned_trial() -> None:
    trial = optuna.create_study().ask()
    with pytest.raises(JobCancelled, match="the user"), TrialPruning(trial):
        raise JobCancelled("the user cancelled it")


def test_numbers_that_epochs_do_not_have_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    pruning = TrialPruning(optuna.create_study().ask(), monitor="val_los")
    for closed in (1, 2):
        pruning.report({"epoch": closed, "closed": closed, "val_loss": 1.0})
    (record,) = [record for record in caplog.records if record.name == "spark_elastic"]
    assert "Optuna cannot prune by 'val_los'" in record.getMessage()
    with pytest.raises(InvalidInput, match="the progress of a training has 'loss' of single steps"):
        TrialPruning(optuna.create_study().ask(), monitor="loss")
