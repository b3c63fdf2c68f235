"""The estimator's learner in Keras: state, step, objective, metrics, hooks. Horovod's Keras API knows nothing of it."""
