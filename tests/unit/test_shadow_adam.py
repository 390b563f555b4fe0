"""The one-pass Adam kernel is torch's fused one to the bit, is used where it can be, and only there."""

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkmate import plain
from checkmate.config import CheckmateError
from checkmate.protocol import Layout, Seed, StepRecord
from checkmate.shadow.optim import adam
from checkmate.shadow.optim.replica import Replica
from checkmate.tensors import MASTER, is_same, pack_group, pack_state

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 129, 640, 1000, adam._PIECE - 1, adam._PIECE, adam._PIECE + 65]
"""Elements of parameters: beside whole units, vectors and pieces."""

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch's kernel is another one here"
)


def adamw(params: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True, **options)


class Job:
    """A trainer of plain parameters and the replica that follows it, with gradients of this data type on the wire."""

    def __init__(self, make: Make, sizes: Sequence[int], dtype: torch.dtype, master: bool = False) -> None:
        torch.manual_seed(1)
        self.dtype, self.master, self.step = dtype, master, 0
        self.params = {f"p{index}": nn.Parameter(torch.randn(size)) for index, size in enumerate(sizes)}
        self.optimizer = make(list(self.params.values()))
        self.replica = Replica(*self.seed(copies=True))
        self.ran = 0

    def seed(self, copies: bool = False) -> tuple[Seed, list[Tensor]]:
        named = list(self.params.items())
        if self.master:
            low = [(name, nn.Parameter(param.detach().to(self.dtype))) for name, param in named]
            named = [*low, *((MASTER + name, param) for name, param in named)]
        description, manifest, tensors = pack_state(named, [], self.optimizer)
        return Seed(self.step, description, manifest), [t.detach().clone() if copies else t for t in tensors]

    def follow(self, change: Callable[[Sequence[nn.Parameter]], Sequence[Mapping[str, Any]]] | None = None) -> None:
        """A step on both sides; ``change`` does something to the trainer's gradients and says what."""
        self.step += 1
        torch.manual_seed(100 + self.step)
        at, place, data = 3, [], [torch.zeros(3)]  # odd: nothing is aligned to more than an element
        for name, param in self.params.items():
            data.append(torch.randn(param.numel()) * 10.0 ** float(torch.randint(-6, 3, ())))
            place.append([name, at, param.numel()])
            at += param.numel()
        bucket = torch.cat(data).to(self.dtype)
        for (_, first, count), param in zip(place, self.params.values(), strict=True):
            param.grad = bucket[first : first + count].to(torch.float32, copy=True)
        changes = change(list(self.params.values())) if change else ()
        self.optimizer.step()
        raw = bucket.view(torch.uint8).numpy().data
        line = {"bucket": 0, "bytes": raw.nbytes, "dtype": str(self.dtype).removeprefix("torch."), "params": place}
        groups = [pack_group(group) for group in self.optimizer.param_groups]
        self.replica.apply(StepRecord(self.step, "x", groups, changes=list(changes)), Layout("x", [line]), {0: raw})
        assert self.replica.differences(*self.seed()) == []


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Data types of the gradients that the kernel stepped with."""
    found: list[torch.dtype] = []
    run = adam.Kernel.run

    def spy(self: adam.Kernel, works: Sequence[Any]) -> None:
        found.extend(work[0].dtype for work in works)
        run(self, works)

    assert adam.kernel() is not None
    monkeypatch.setattr(adam.Kernel, "run", spy)
    return found


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_every_size_and_place(kind: Any, dtype: torch.dtype, threads: int, ran: list[torch.dtype]) -> None:
    for decay in (0.0, 0.1):
        job = Job(lambda params, decay=decay: kind(params, fused=True, weight_decay=decay), EDGES, dtype)
        for _ in range(3):
            job.follow()
    reads = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert set(ran) == {reads}
    assert len(ran) == 2 * 2 * len(EDGES)  # the first step is torch's: there is no state before it


def test_hyperparameters_of_each_step_and_group(ran: list[torch.dtype]) -> None:
    def make(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2]}, {"params": params[2:], "betas": (0.3, 0.7), "weight_decay": 0, "eps": 1e-3}]
        return adamw(groups)  # type: ignore[arg-type]

    job = Job(make, [200, 70, 1000], torch.bfloat16)
    for step in range(6):
        job.optimizer.param_groups[0]["lr"] = 10.0**-step
        job.optimizer.param_groups[1]["weight_decay"] = step / 7
        job.follow()
    assert len(ran) == 5 * 3


def clip(params: Sequence[nn.Parameter], masters: bool = False) -> list[dict[str, Any]]:
    norm = nn.utils.clip_grad_norm_(params, 0.7)
    what = {"op": "clip_norm", "max_norm": 0.7, "total_norm": plain.encode(norm)}
    return [{**what, "params": None, "masters": masters, "foreach": None}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_comes_after_conversion(dtype: torch.dtype, ran: list[torch.dtype]) -> None:
    job = Job(adamw, [200, 70, 1000], dtype)
    for _ in range(4):
        job.follow(clip)
    assert ran == [torch.float32] * 9


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_small_parameters(dtype: torch.dtype, clips: bool, ran: list[torch.dtype]) -> None:
    job = Job(adamw, EDGES, dtype, master=True)
    for _ in range(3):
        job.follow(functools.partial(clip, masters=True) if clips else None)
    assert set(ran) == {torch.bfloat16 if dtype == torch.bfloat16 and not clips else torch.float32}
    assert len(ran) == 2 * len(EDGES)


OTHERS: dict[str, Make] = {
    "amsgrad": lambda params: adamw(params, amsgrad=True),
    "maximize": lambda params: adamw(params, maximize=True),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_torchs(name: str, dtype: torch.dtype, ran: list[torch.dtype]) -> None:
    job = Job(OTHERS[name], [200, 70, 1000], dtype)
    for _ in range(3):
        job.follow()
    assert ran == []


def test_values_of_a_scaler_are_for_torch(ran: list[torch.dtype]) -> None:
    """The fused step unscales by itself and is not made where something wasn't finite."""
    job = Job(adamw, [200, 70, 1000], torch.float32)
    job.follow()
    before = [param.detach().clone() for param in job.params.values()]
    grads = torch.ones(1270)
    line = {
        "bucket": 0,
        "bytes": 5080,
        "dtype": "float32",
        "params": [["p0", 0, 200], ["p1", 200, 70], ["p2", 270, 1000]],
    }
    groups = [pack_group(group) for group in job.optimizer.param_groups]
    scaler = {"grad_scale": plain.encode(torch.tensor(8.0)), "found_inf": plain.encode(torch.tensor(1.0))}
    record = StepRecord(2, "x", groups, scaler=scaler)
    job.replica.apply(record, Layout("x", [line]), {0: grads.view(torch.uint8).numpy().data})
    ours = [job.replica.tensor(name, "param") for name in job.params]
    assert ran == []
    assert all(mine is not None and is_same(mine.detach(), its) for mine, its in zip(ours, before, strict=True))


def _next(number: float) -> float:
    return float(torch.nextafter(torch.tensor(number), torch.tensor(2 * number)))


@pytest.mark.parametrize("field", ["keep", "lerp", "beta2", "beta2_left", "root", "eps", "size"])
def test_a_kernel_that_is_off_by_a_bit_is_found(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, hyper = adam.kernel(), adam.Kernel.hyper
    assert kernel is not None

    def wrong(self: adam.Kernel, group: Mapping[str, Any], step: float) -> Any:
        by = hyper(self, group, step)
        setattr(by, field, _next(getattr(by, field)))
        return by

    monkeypatch.setattr(adam.Kernel, "hyper", wrong)
    with pytest.raises(CheckmateError, match=r"differs from this torch .* elements of"):
        adam.prove(kernel)


@pytest.mark.parametrize("broken", ["differs", "missing"])
def test_without_the_kernel_torch_makes_the_same_steps(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ran: list[torch.dtype]
) -> None:
    def refuse(*_: Any) -> Any:
        raise CheckmateError("as wanted")

    monkeypatch.setattr(*((adam, "prove") if broken == "differs" else (adam.native, "library")), refuse)
    monkeypatch.setattr(adam, "kernel", adam.kernel.__wrapped__)
    job = Job(adamw, [200, 70, 1000], torch.bfloat16)
    for _ in range(3):
        job.follow()
    assert ran == []
    assert "stepped by torch alone, which is slower: as wanted" in caplog.text


def test_a_torch_with_other_arithmetic_is_noticed() -> None:
    """torch's code for processors without fused multiply-add rounds otherwise."""
    code = "from checkmate.shadow.optim import adam; print(adam.kernel())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "None\n", done.stderr
    assert "CPU capability DEFAULT" in done.stderr


def test_the_proof_has_every_kind_of_number() -> None:
    values = torch.stack(adam._numbers(3))
    kinds = [values.isnan(), values.isinf(), values == 0, (values.abs() < 2**-126) & (values != 0), values.abs() > 1e30]
    for kind, row in itertools.product(kinds, range(3)):
        assert int(kind[row].sum()) > 0
