"""Commits and snapshots of training state, and checkpoints made of them. Knows no framework and no Spark."""
