"""The part of the estimators' training that is the same for all frameworks: epochs, step summaries, ledger."""
