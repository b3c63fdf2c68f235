"""The trainer of `ElasticKerasEstimator`: state, step, losses, metrics, callbacks. The Horovod API does not use it."""
