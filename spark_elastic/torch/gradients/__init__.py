"""The gradients of a step, from the hooks that meet them in backward to their sums over the world: what
`DistributedOptimizer` and the estimator's learner have in common."""
