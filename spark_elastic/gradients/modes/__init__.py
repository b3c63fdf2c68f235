"""The ways in which the gradients of a step come to their sums; a `GradientExchange` chooses one for each layout.

`LocalMode` for a process that trains alone, `HostMode` through memory of the host, `BulkMode` on the GPUs themselves,
`ShareMode` for virtual shares, whose sums have the same bits in every world.
"""
