"""The communication hook reduces exactly as DDP does without it."""

from pathlib import Path

from support.train.processes import finish, start


def test_gradients_are_those_of_plain_ddp(tmp_path: Path) -> None:
    finish(start(3, "equality.py", [], tmp_path))  # 1/3 is not exact: multiplying and dividing differ
