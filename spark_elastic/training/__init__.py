"""The estimators' training without a framework: epochs, trailers, ledger, checkpoints; frameworks plug in."""
