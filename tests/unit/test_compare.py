from pathlib import Path

import pytest
import torch

from checkmate.compare import differences, load_state
from checkmate.config import CheckmateError


def found(left: object, right: object) -> list[str]:
    return list(differences(left, right))


def test_equal_states_have_no_difference() -> None:
    state = {"a": torch.tensor([1.0, float("nan")]), "b": [1, 2.5, None, (0.9, 0.999)], "c": torch.zeros(0)}
    assert found(state, {**state, "a": state["a"].clone()}) == []  # type: ignore[attr-defined]


def test_one_bit_is_found() -> None:
    left = torch.ones(5)
    right = left.clone()
    right.view(torch.int32)[3] ^= 1
    assert found({"w": left}, {"w": right}) == [".w: 1 of 5 elements differ"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (0.1, 0.1000000001),
        (torch.zeros(1), 0.0),
        (True, 1),
    ],
)
def test_every_kind_of_difference_is_reported(left: object, right: object) -> None:
    assert found({"x": left}, {"x": right})


def test_a_scalar_tensor_is_compared() -> None:
    assert found(torch.tensor(1.0), torch.tensor(2.0)) == [": 1 of 1 elements differ"]


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"model": {}}, path)
    with pytest.raises(CheckmateError, match="not a saved training state"):
        load_state(path)
