"""Named operations: collectives that ranks may ask for in different orders, on numpy arrays; below every framework."""
