"""HTTP between the driver and its slots and workers: messages, proof of the job's key, server and client."""
