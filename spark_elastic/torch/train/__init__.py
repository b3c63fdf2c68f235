"""The estimator's learner in torch: state, step, objective, metrics, hooks. Horovod's torch API knows nothing of it."""
