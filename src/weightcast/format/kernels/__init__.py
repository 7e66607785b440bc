"""Compiled loops over bits. Nothing here checks its input: callers do."""
