"""The driver's state machine: its state and, by concept, what each kind of event changes."""
