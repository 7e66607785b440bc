"""Loops over bits, compiled. Nothing here checks its input: callers do."""
