"""What people see of a job: the progress line and the story of its worlds. Decides nothing."""
