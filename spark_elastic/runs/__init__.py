"""What outlives a job and a process: snapshots, checkpoints, who owns a run."""
