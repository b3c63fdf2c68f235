"""What several benchmarks are made of: none of these runs by itself."""
