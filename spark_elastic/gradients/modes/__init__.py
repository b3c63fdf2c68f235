"""The ways in which the gradients of a step come to their sums; a `GradientExchange` chooses one for each layout.

`LocalMode`: alone; `HostMode`: through memory of the host; `BulkMode`: on the GPUs themselves; `ShareMode`: added by
virtual shares, so that the sums have the same bits in every world.
"""
