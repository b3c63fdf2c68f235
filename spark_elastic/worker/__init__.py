"""What runs inside an executor: the slot's agent, and the training process it keeps alive. Never imports `driver`."""
