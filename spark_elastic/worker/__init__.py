"""The processes on an executor: the slot's agent, and the training process that it starts. Never imports `driver`."""
