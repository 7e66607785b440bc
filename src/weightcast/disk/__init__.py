"""Checkpoints and patches on a local disk: durable writes, staging, applying."""
