"""States as flat bytes and a manifest, and back: every kind of tensor, sharing kept, nothing executed."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from checkmate.config import CheckmateError
from checkmate.persist.state import Span, StateError, Stored, chunk_pieces, memory_key, pack
from checkmate.tensors import is_same

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def again(state: Any) -> Any:
    """Stored and loaded."""
    packed = pack(state)
    stored = Stored.of(packed.metadata(), packed.data_bytes)
    data = torch.empty(packed.data_bytes, dtype=torch.uint8)
    for span in packed.spans.values():
        data[span.offset : span.end] = span.memory
    for span in stored.spans:
        span.memory.copy_(data[span.offset : span.end])
    return stored.unpack()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_data_type(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 256, (5, 16), dtype=torch.uint8).view(dtype)
    loaded = again({"t": tensor})["t"]
    assert loaded.dtype == dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def strided() -> dict[str, Tensor]:
    base = torch.arange(120.0)
    complex_ = torch.randn(4, dtype=torch.complex64)
    return {
        "step": base[3:50:2],
        "transposed": base.view(10, 12).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.ones(3, 1).expand(3, 7),
        "scalar": torch.tensor(2.5),
        "tail": base[117:],
        "conjugated": complex_.conj(),
        "negated": complex_.conj().imag,
        "odd offset": torch.arange(64, dtype=torch.uint8)[17:40],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


@pytest.mark.parametrize("name", strided())
def test_strides_and_views(name: str) -> None:
    tensor = strided()[name]
    loaded = again([tensor])[0]
    assert loaded.shape == tensor.shape
    assert loaded.stride() == tensor.stride()
    assert is_same(loaded, tensor)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
def test_zero_size(shape: tuple[int, ...]) -> None:
    loaded = again(torch.empty(shape, dtype=torch.float16))
    assert loaded.shape == torch.Size(shape)
    assert loaded.dtype == torch.float16


def test_shared_memory_is_stored_once_and_shared_again() -> None:
    base = torch.arange(1000.0)
    state = {"whole": base, "part": base[10:20], "bytes": base.view(torch.uint8)[41:43], "same": base}
    assert pack(state).data_bytes == 4000
    loaded = again(state)
    assert loaded["same"] is loaded["whole"]
    loaded["whole"][10] = -1.0
    assert loaded["part"][0] == -1.0
    assert torch.equal(loaded["bytes"], loaded["whole"].view(torch.uint8)[41:43])


def test_views_of_different_types_share_memory_that_begins_between_elements() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    state = {"half": memory[2:14].view(torch.bfloat16), "single": memory[4:24].view(torch.float32), "byte": memory[3:9]}
    loaded = again(state)
    for name, tensor in state.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))
    loaded["byte"][1] = 99
    assert loaded["single"].view(torch.uint8)[0] == 99


def test_only_what_is_used_of_a_large_buffer_is_stored() -> None:
    assert pack({"slice": torch.zeros(10_000)[5000:5010]}).data_bytes < 100


def test_whole_training_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
        "numbers": [1, -(2**80), 2.5, float("inf"), None, True, (1, ("x", b"y"))],
        "keys": {1: "a", (2, 3): "b", "~": "c", None: OrderedDict(d=1)},
    }
    loaded = again(state)
    equal(loaded, state)
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    other.load_state_dict(loaded["model"])
    torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.1), fused=True).load_state_dict(loaded["optimizer"])
    random.setstate(loaded["rng"]["python"])


def equal(left: Any, right: Any) -> None:
    if isinstance(right, Tensor):
        assert is_same(left, right)
    elif isinstance(right, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    elif isinstance(right, dict):
        assert list(left) == list(right)
        for key in right:
            equal(left[key], right[key])
    elif isinstance(right, list | tuple):
        assert len(left) == len(right)
        assert isinstance(left, tuple) == isinstance(right, tuple)
        for one, other in zip(left, right, strict=True):
            equal(one, other)
    else:
        assert left == right


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.randn(3).to_sparse(), "state.a is a sparse"),
        (torch.empty(3, device="meta"), "state.a is on device meta"),
        (object(), "state.a is a builtins.object"),
        ({"b": [len]}, r"state.a.b\[0\] is a builtins.builtin_function"),
    ],
)
def test_what_cannot_be_stored_is_named(value: object, text: str) -> None:
    with pytest.raises(StateError, match=text):
        pack({"a": value})


def freed(nbytes: int) -> torch.Tensor:
    """As FSDP leaves its flat parameters."""
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: freed(0), "is a Tensor without memory"),
        (lambda: freed(40), "is a Tensor without memory"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(9)), "is a FakeTensor without memory"),
        (lambda: torch.masked.masked_tensor(torch.ones(1), torch.ones(1) > 0), "is a MaskedTensor without memory"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a sparse, nested or quantized"),
        (lambda: torch.nn.LazyLinear(3).weight, "is not initialised yet"),
    ],
    ids=["freed", "cut", "fake", "masked", "nested", "lazy"],
)
@pytest.mark.filterwarnings("ignore")  # torch's, of prototypes
def test_what_has_no_memory_is_never_read(make: Callable[[], torch.Tensor], text: str) -> None:
    with pytest.raises(StateError, match=rf"state\.a {text}"):
        pack({"a": make()})


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("limit", [1000, 20_000])
def test_too_deep_is_refused(limit: int) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(StateError, match=r"nested too deeply|recursion limit"):
            pack(nested(2000)).metadata()
    finally:
        sys.setrecursionlimit(before)


def test_gated_memory_comes_last() -> None:
    tensors = {name: torch.randn(10) for name in "abc"}
    gated = {memory_key(tensors["a"])}
    assert [span.gated for span in pack(tensors, gated).spans.values()] == [False, False, True]


class Executed(Exception):
    """Raised by a payload that was run."""


BROKEN: list[tuple[str, Any]] = [
    ("no map", [1]),
    ("version", {"version": 99}),
    ("sizes", {"version": 1, "spans": [[-1, "cpu"]], "tensors": [], "tree": None}),
    ("huge", {"version": 1, "spans": [[1 << 60, "cpu"]], "tensors": [], "tree": None}),
    ("beyond", {"version": 1, "spans": [[8, "cpu"]], "tensors": [[0, "float32", [3], [1], 0, 0, 0]], "tree": None}),
    ("before", {"version": 1, "spans": [[8, "cpu"]], "tensors": [[0, "float32", [1], [1], -1, 0, 0]], "tree": None}),
    (
        "stride",
        {"version": 1, "spans": [[8, "cpu"]], "tensors": [[0, "float32", [2], [1 << 40], 0, 0, 0]], "tree": None},
    ),
    ("span", {"version": 1, "spans": [[8, "cpu"]], "tensors": [[7, "float32", [1], [1], 0, 0, 0]], "tree": None}),
    ("dtype", {"version": 1, "spans": [[8, "cpu"]], "tensors": [[0, "load", [1], [1], 0, 0, 0]], "tree": None}),
    ("none", {"version": 1, "spans": [[8, "cpu"]], "tensors": [[-1, "int8", [2], [1], "cpu", 0, 0]], "tree": None}),
    ("index", {"version": 1, "spans": [[8, "cpu"]], "tensors": [], "tree": {"~": "tensor", "index": 3}}),
    ("kind", {"version": 1, "spans": [[8, "cpu"]], "tensors": [], "tree": {"~": "pickle", "data": b""}}),
]


@pytest.mark.parametrize("manifest", [value for _, value in BROKEN], ids=[name for name, _ in BROKEN])
def test_a_manifest_that_makes_no_sense(manifest: Any) -> None:
    with pytest.raises(CheckmateError):
        Stored.of(msgpack.packb(manifest), 8).unpack()


@given(st.binary(max_size=60))
def test_any_bytes_as_a_manifest(data: bytes) -> None:
    with pytest.raises(StateError):
        Stored.of(data, 1 << 40)


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 40))
def test_chunks_cover_all_bytes_once(sizes: list[int], chunk_bytes: int) -> None:
    spans, offset = [], 0
    for size in sizes:
        spans.append(Span(torch.empty(size, dtype=torch.uint8).untyped_storage(), 0, size, offset))
        offset += size
    position = 0
    for number, (chunk, pieces) in enumerate(chunk_pieces(spans, chunk_bytes)):
        assert chunk == number
        assert sum(piece[2] for piece in pieces) == min(chunk_bytes, offset - chunk * chunk_bytes)
        for span, start, nbytes in pieces:
            assert span.offset + start == position
            position += nbytes
    assert position == offset


def test_a_device_that_is_not_here() -> None:
    packed = pack([torch.ones(4)])
    stored = Stored.of(packed.metadata(), packed.data_bytes)
    gone = replace(stored, devices=["cuda:7"])
    assert gone.unpack("cpu")[0].device.type == "cpu"
    assert gone.unpack({"cuda:7": "cpu"})[0].device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(StateError, match="map_location='cpu'"):
            gone.unpack()
        with pytest.raises(StateError, match="should go to cuda"):
            stored.unpack("cuda")
