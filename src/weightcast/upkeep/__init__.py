"""Maintenance of a channel: squash, collect, verify, repair."""
