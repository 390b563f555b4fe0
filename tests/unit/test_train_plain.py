"""State as plain values: exact, without pickle, and refusing what it cannot hold."""

import math
import random
from collections import OrderedDict
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.train import rng


def roundtrip(value: Any) -> Any:
    return plain.decode(msgpack.unpackb(msgpack.packb(plain.encode(value)), strict_map_key=False))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers() | st.just("~"), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert repr(roundtrip(value)) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in [(), (0, 3), (4, 5)]:
        tensor = (torch.randn(shape) * 100).to(dtype)
        back = roundtrip({"t": tensor})["t"]
        assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    column = torch.arange(12).reshape(3, 4).t()
    assert torch.equal(roundtrip(column), column)


def test_numpy_comes_back() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    back = roundtrip(array)
    assert back.dtype == array.dtype and np.array_equal(back, array)
    for number in (np.float32(0.1), np.float64(0.1), np.int64(-3), np.bool_(True)):
        assert type(roundtrip(number)) is type(number) and roundtrip(number) == number
    assert roundtrip(OrderedDict(a=1)) == {"a": 1}
    assert math.isnan(roundtrip(float("nan")))


@pytest.mark.parametrize("value", [10**5000, -(10**5000), "\U0001f600\0"], ids=["large", "negative", "text"])
def test_large_numbers_and_any_text_come_back(value: Any) -> None:
    assert roundtrip([value]) == [value]
    assert plain.decode({"~": "int", "text": str(2**70)}) == 2**70  # as earlier versions wrote it


@pytest.mark.parametrize(
    "value",
    [
        *(object(), {1, 2}, lambda: 0, torch.float32, np.array(["a"]), 1j),
        *(np.longdouble(1), np.complex64(1j), np.ma.array([1.0], mask=[True]), "\ud800"),
    ],
)
def test_other_values_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(CheckmateError, match=r"ema\.inner\[1\] is a "):
        plain.encode({"inner": [0, value]}, "ema")
    if isinstance(value, str):
        with pytest.raises(CheckmateError, match=r"ema key is a "):
            plain.encode({value: 0}, "ema")


def draw() -> tuple[float, ...]:
    return (torch.rand(()).item(), random.random(), random.gauss(), np.random.rand(), np.random.randn())


def test_random_states_come_back() -> None:
    draw()
    state = msgpack.unpackb(msgpack.packb(rng.capture()))
    expected = [draw() for _ in range(3)]
    rng.apply(state)
    assert [draw() for _ in range(3)] == expected
