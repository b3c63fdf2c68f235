"""The protocol in simulation: the real state machines of driver and workers over simulated time, with invariants."""
