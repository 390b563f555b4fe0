"""Checkpoints on disk: PCcheck's engine (``engine``) and what is built on it."""
