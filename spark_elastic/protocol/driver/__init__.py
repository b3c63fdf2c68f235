"""The parts of the driver machine: what it knows, and how each kind of event changes that."""
