"""Training scripts to run with and without Checkmate; ``TRAIN`` is the one that ``checkmate demo`` runs."""

from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
EXPLICIT = Path(__file__).with_name("train_explicit.py")
