"""Pruning of trials by Optuna: the public name of `integrations.optuna_pruning`."""

from spark_elastic.integrations.optuna_pruning import TrialPruning

__all__ = ["TrialPruning"]
