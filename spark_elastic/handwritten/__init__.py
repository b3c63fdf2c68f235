"""Training by loops of the user: states and their commits, the run loop, the data loader, FSDP2. Knows no Spark."""
