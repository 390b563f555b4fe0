"""Tensors over a socket, and state in and out of a live model and optimizer, to the bit."""

import copy
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor, nn

from checkmate.tensors import (
    TensorError,
    describe,
    is_same,
    manifest_bytes,
    named_state,
    pack_group,
    pack_state,
    receive_tensors,
    send_tensors,
    set_group,
    unpack_state,
)

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.settimeout(5)
    right.settimeout(5)
    with left, right:
        yield left, right


def transfer(pair: tuple[socket.socket, socket.socket], tensors: list[Tensor]) -> list[Tensor]:
    manifest = msgpack.unpackb(msgpack.packb([describe(str(i), "param", t) for i, t in enumerate(tensors)]))
    sender = threading.Thread(target=send_tensors, args=(pair[0], tensors))
    sender.start()
    received = receive_tensors(pair[1], manifest)
    sender.join(5)
    return received


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(pair: Any, dtype: torch.dtype) -> None:
    sent = [random_bits(dtype, shape) for shape in [(), (1,), (7,), (3, 5), (0,), (4, 0, 2), (2, 3, 4, 5)]]
    received = transfer(pair, sent)
    assert all(is_same(a, b) for a, b in zip(sent, received, strict=True))


def test_layouts_in_memory(pair: Any) -> None:
    base = torch.randn(4, 6, 5, 3)
    sent = [
        base.to(memory_format=torch.channels_last),
        base.transpose(0, 2),
        base[:, ::2],
        base[1:3, 2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(5000, 600),
    ]
    received = transfer(pair, sent)
    assert all(is_same(a, b) for a, b in zip(sent, received, strict=True))
    assert [r.stride() for r in received[:2]] == [s.stride() for s in sent[:2]], "dense tensors keep their memory order"


def test_dense_tensors_are_not_copied() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.addresses: list[int] = []

        def sendall(self, data: Any) -> None:
            if isinstance(data, memoryview):
                self.addresses.append(torch.frombuffer(data, dtype=torch.uint8).data_ptr())

    tensor, recorder = torch.randn(8, 4).t(), Recorder()
    send_tensors(recorder, [tensor])  # type: ignore[arg-type]
    assert recorder.addresses == [tensor.data_ptr()]


def test_tensors_of_many_pages_arrive_whole(pair: Any) -> None:
    sent = [torch.randn(700, 1001).t(), torch.randint(0, 255, ((3 << 20) + 5,), dtype=torch.uint8)]
    sender = threading.Thread(target=send_tensors, args=(pair[0], sent))
    sender.start()
    received = receive_tensors(pair[1], [describe(str(index), "param", tensor) for index, tensor in enumerate(sent)])
    sender.join()
    assert all(is_same(*both) and both[0].stride() == both[1].stride() for both in zip(received, sent, strict=True))
    received[0].add_(1)
    assert torch.equal(received[0], sent[0] + 1), "the memory is ours to write"


def test_damage_is_named(pair: Any) -> None:
    tensor = torch.arange(4.0)
    raw = bytearray(tensor.numpy().tobytes())
    raw[5] ^= 1
    good = bytearray()
    send_tensors(type("S", (), {"sendall": lambda _, data: good.extend(data)})(), [tensor])
    pair[0].sendall(bytes(raw) + bytes(good[-4:]))
    with pytest.raises(TensorError, match=r"param 'fc.weight' is damaged: CRC32C"):
        receive_tensors(pair[1], [describe("fc.weight", "param", tensor)])


def test_crc_is_castagnoli() -> None:
    sent = bytearray()
    data = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    send_tensors(type("S", (), {"sendall": lambda _, part: sent.extend(part)})(), [data])
    assert struct.unpack("<I", sent[-4:]) == (0xE3069283,)


def test_early_close_and_silence(pair: Any) -> None:
    manifest = [describe("w", "param", torch.zeros(100))]
    pair[1].settimeout(0.05)
    pair[0].sendall(b"x" * 10)
    with pytest.raises(TimeoutError):
        receive_tensors(pair[1], manifest)
    pair[0].close()
    with pytest.raises(TensorError, match="closed in the middle of param 'w'"):
        receive_tensors(pair[1], manifest)


@pytest.mark.parametrize(
    "line",
    [
        ["w", "param", "float32", [2], [2]],
        ["w", "param", "float32", [2]],
        ["w", "param", "float33", [2], [1]],
        ["w", "param", "zeros", [2], [1]],
        ["w", "param", "float32", [-2], [1]],
        ["w", "param", "float32", [2, 2], [0, 1]],
        ["w", "param", "float32", [True], [1]],
        [7, "param", "float32", [2], [1]],
        None,
    ],
)
def test_bad_manifests_are_refused(line: Any) -> None:
    with pytest.raises(TensorError, match=r"manifest entry|data type"):
        manifest_bytes([line])


def test_sparse_is_refused() -> None:
    with pytest.raises(TensorError, match=r"'emb\.weight' is sparse"):
        describe("emb.weight", "param", torch.eye(3).to_sparse())


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(5))
    net(torch.randn(2, 3, 6, 6))
    return net.to(memory_format=torch.channels_last)


def step(net: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    net(torch.randn(2, 3, 6, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(net: nn.Module, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    params = list(net.parameters())
    groups = [{"params": params[:2], "lr": 0.01}, {"params": params[2:], "weight_decay": weight_decay}]
    return torch.optim.AdamW(groups, lr=0.003, betas=(0.8, 0.95))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw fused": lambda net: torch.optim.AdamW(net.parameters(), fused=True),
    "adam amsgrad foreach": lambda net: torch.optim.Adam(net.parameters(), amsgrad=True, foreach=True),
    "adam tensor lr": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01)),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "sgd momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
}


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer.state_dict()})


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, Tensor):
        assert is_same(left, right) and left.device == right.device
    else:
        assert left == right and type(left) is type(right)


def reload(pair: Any, net: nn.Module, optimizer: torch.optim.Optimizer, into: tuple[nn.Module, Any]) -> None:
    description, manifest, tensors = pack_state(net.named_parameters(), net.named_buffers(), optimizer)
    description, manifest = msgpack.unpackb(msgpack.packb([description, manifest]))
    received = transfer(pair, tensors)
    unpack_state(into[0].named_parameters(), into[0].named_buffers(), into[1], description, manifest, received)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_round_trip_and_training_goes_on_identically(pair: Any, name: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for seed in range(3):
        step(net, optimizer, seed)
        scheduler.step()
    other = model(7)
    loaded = OPTIMIZERS[name](other)
    step(other, loaded, 9)
    reload(pair, net, optimizer, (other, loaded))
    assert_same(state_of(net, optimizer), state_of(other, loaded))
    step(net, optimizer, 5)
    step(other, loaded, 5)
    assert_same(state_of(net, optimizer), state_of(other, loaded))


def test_t2_packing_before_the_first_step_changes_nothing() -> None:
    net, twin = model(), model()
    optimizer, other = adamw(net), adamw(twin)
    pack_state(net.named_parameters(), net.named_buffers(), optimizer)
    assert not optimizer.state
    step(net, optimizer, 1)
    step(twin, other, 1)
    assert_same(state_of(net, optimizer), state_of(twin, other))


def test_t3_t7_loading_steps_nothing_and_takes_the_checkpoints_hyperparameters(pair: Any) -> None:
    net = model()
    optimizer = adamw(net, weight_decay=0.3)
    step(net, optimizer, 1)
    other = model(3)
    loaded = adamw(other, weight_decay=0.0)
    reload(pair, net, optimizer, (other, loaded))
    assert_same(net.state_dict(), other.state_dict())
    assert loaded.param_groups[1]["weight_decay"] == 0.3
    step(net, optimizer, 2)
    step(other, loaded, 2)
    assert_same(state_of(net, optimizer), state_of(other, loaded))


def test_loading_is_in_place_and_drops_state_that_the_checkpoint_has_not(pair: Any) -> None:
    net, other = model(), model(1)
    optimizer, loaded = adamw(net), adamw(other)
    step(other, loaded, 1)
    addresses = [p.data_ptr() for p in other.parameters()]
    reload(pair, net, optimizer, (other, loaded))
    assert [p.data_ptr() for p in other.parameters()] == addresses
    assert not loaded.state
    step(net, optimizer, 1)
    step(other, loaded, 1)
    assert_same(state_of(net, optimizer), state_of(other, loaded))


def test_groups_added_in_mid_run_are_added_again(pair: Any) -> None:
    net, other = model(), model(1)
    first, *rest = net.parameters()
    optimizer = torch.optim.AdamW([first], lr=0.1)
    step(net, optimizer, 1)
    optimizer.add_param_group({"params": rest[:1], "lr": 0.2, "betas": (0.5, 0.9)})
    optimizer.add_param_group({"params": rest[1:], "weight_decay": 0.3})
    step(net, optimizer, 2)
    loaded = torch.optim.AdamW([next(other.parameters())], lr=9.0)
    reload(pair, net, optimizer, (other, loaded))
    assert_same(state_of(net, optimizer), state_of(other, loaded))
    step(net, optimizer, 1)
    step(other, loaded, 1)
    assert_same(state_of(net, optimizer), state_of(other, loaded))


def test_step_tensor_keeps_its_dtype(pair: Any) -> None:
    net, other = model(), model(1)
    optimizer, loaded = adamw(net), adamw(other)
    step(net, optimizer, 1)
    first = next(net.parameters())
    optimizer.state[first]["step"] = optimizer.state[first]["step"].double()
    step(other, loaded, 1)
    reload(pair, net, optimizer, (other, loaded))
    assert loaded.state[next(other.parameters())]["step"].dtype is torch.float64


@pytest.mark.parametrize("what", ["shape", "missing", "extra", "dtype", "class", "groups", "taken", "order"])
def test_what_differs_is_named_and_nothing_is_changed(what: str) -> None:
    net, other = model(), model(1)
    optimizer, loaded = adamw(net), adamw(other)
    step(net, optimizer, 1)
    description, manifest, tensors = pack_state(net.named_parameters(), net.named_buffers(), optimizer)
    pattern = "'0.weight'"
    match what:
        case "shape":
            tensors[0] = torch.zeros(3)
        case "dtype":
            tensors[0] = tensors[0].double()
        case "missing":
            del manifest[0], tensors[0]
        case "extra":
            manifest.append(describe("ghost", "param", tensors[0]))
            tensors.append(tensors[0])
            pattern = "'ghost' is not in the model"
        case "class":
            description["class"], pattern = "SGD", "AdamW, the checkpoint is of SGD"
        case "groups":
            description["groups"], pattern = description["groups"][:1], "2 parameter groups, the checkpoint 1"
        case "taken":
            description["groups"].append(description["groups"][0])
            pattern = "2 parameter groups, the checkpoint 3"
        case "order":
            description["groups"][0]["params"].reverse()
    before = state_of(other, loaded)
    with pytest.raises(TensorError, match=pattern):
        unpack_state(other.named_parameters(), other.named_buffers(), loaded, description, manifest, tensors)
    assert_same(before, state_of(other, loaded))


def test_a_foreign_parameter_is_named() -> None:
    net = model()
    optimizer = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(9, 2))], lr=0.1)
    with pytest.raises(
        TensorError, match=r"parameter group 0 holds 1 parameter\(s\) that are not the model's.*\[9, 2\]"
    ):
        pack_state(net.named_parameters(), [], optimizer)


def test_hyperparameters_keep_value_and_kind() -> None:
    numpy = pytest.importorskip("numpy")
    group = {
        "params": [object()], "lr": torch.tensor(0.1), "betas": (0.9, 0.999), "fused": None, "nesterov": True, "n": 3,
        "weight_decay": numpy.float32(0.1), "name": "decay", "initial_lr": numpy.float64(0.1),
    }  # fmt: skip
    sent = msgpack.unpackb(msgpack.packb(pack_group(group), default=list))
    into: dict[str, Any] = {"params": [1], "lr": torch.tensor(9.0), "betas": [0.0, 0.0], "custom": 1}
    kept = into["lr"]
    set_group(into, sent)
    assert into["lr"] is kept and kept == torch.tensor(0.1)
    assert into.pop("lr") is kept
    assert into == {
        "params": [1], "betas": [0.9, 0.999], "fused": None, "nesterov": True, "n": 3, "name": "decay", "custom": 1,
        "weight_decay": float(numpy.float32(0.1)), "initial_lr": 0.1,
    }  # fmt: skip
    assert type(into["weight_decay"]) is numpy.float32  # whose arithmetic is not a float's
    with pytest.raises(TensorError, match=r"'hook' is a function: only numbers, text, .* keep anything else outside"):
        pack_group({"hook": lambda: None})


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("scale", torch.ones(1))


def test_tied_weights_travel_once_and_must_be_tied_on_both_sides() -> None:
    source, target = Tied(), Tied()
    optimizer, loaded = torch.optim.SGD(source.parameters(), lr=1), torch.optim.SGD(target.parameters(), lr=1)
    description, manifest, tensors = pack_state(*named_state(source), optimizer)
    assert [line[:2] for line in manifest] == [
        ["embed.weight", "param"], ["scale", "buffer"], ["head.weight", "alias.embed.weight"],
    ]  # fmt: skip
    unpack_state(*named_state(target), loaded, description, manifest, tensors)
    assert is_same(target.head.weight, source.embed.weight)
    apart = Tied(tied=False)
    loose = torch.optim.SGD(apart.parameters(), lr=1)
    with pytest.raises(TensorError, match=r"'head\.weight'"):
        unpack_state(*named_state(apart), loose, description, manifest, tensors)
