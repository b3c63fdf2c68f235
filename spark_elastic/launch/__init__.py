"""Puts the parts together: a job from its launcher and server to its end, and who is told of it."""
