"""The trainer of `ElasticTorchEstimator`: state, step, loss, metrics, callbacks. The Horovod API does not use it."""
