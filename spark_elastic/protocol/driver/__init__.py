"""The driver machine: its state, and the handlers of its events, by concept."""
