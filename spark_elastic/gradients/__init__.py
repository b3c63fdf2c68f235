"""The gradients of a step: hooks in backward, buckets, and their sums over all ranks.

`DistributedOptimizer` and the trainer of the estimator share this package.
"""
