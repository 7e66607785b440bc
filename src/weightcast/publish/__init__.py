"""The writer's side: detect changes, encode and upload them, commit a version."""
