"""The communication hook reduces exactly as DDP does without it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "train_support"))
from processes import finish, start


def test_gradients_are_those_of_plain_ddp(tmp_path: Path) -> None:
    finish(start(3, "equality.py", [], tmp_path))  # 1/3 is not exact: multiplying and dividing differ
