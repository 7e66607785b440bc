"""Anatomy of deltas: which weights change from version to version, why so few, and what carrying them costs."""
