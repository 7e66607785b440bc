"""Inference engines that follow a channel: `vllm` is the plug-in, `agent` keeps an engine at the newest version."""
