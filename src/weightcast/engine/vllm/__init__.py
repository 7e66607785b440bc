"""The vLLM plug-in."""
