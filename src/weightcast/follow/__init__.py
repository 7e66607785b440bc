"""The reader's side: find a route, fetch, decode and verify it, and bring a mirror or a model to a version."""
