"""Hugging Face Spaces: a folder for each box, put together by `python -m examples.wordle.spaces.pack`."""
