"""Connects the parts of a job: server, driver loop, launcher, discovery and monitor."""
