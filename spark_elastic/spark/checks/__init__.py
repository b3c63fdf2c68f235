"""Whether a cluster can run a job: its hosts, its settings and its memory, judged before slots are asked for."""
