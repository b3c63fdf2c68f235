"""Elastic versions of what other libraries offer: trainers, process groups, loggers, exports."""
