"""What happened to a version, phase by phase, and where that is sent."""
