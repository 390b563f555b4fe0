"""The trainer's side: what runs inside a training process (see README.md)."""
