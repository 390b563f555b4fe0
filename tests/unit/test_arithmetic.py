"""A shadow whose optimizer steps have other bits than the trainer's is found out before it follows any."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from checkmate.protocol import Hello
from checkmate.shadow.optim.arithmetic import problem
from checkmate.train.arithmetic import measure


def params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, dtype=dtype)), nn.Parameter(torch.zeros(2, 2, dtype=dtype))]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: AdamW(params()),
    "adamw fused amsgrad": lambda: AdamW(params(), fused=True, amsgrad=True),
    "adam foreach maximize": lambda: Adam(params(), foreach=True, maximize=True, weight_decay=0.1),
    "adam of a tensor": lambda: Adam(params(torch.float64), lr=torch.tensor(0.0)),
    "adam of 16 bits": lambda: Adam(params(torch.bfloat16), betas=(0.5, 0.9)),
    "sgd nesterov": lambda: SGD(params(torch.float16), momentum=0.9, nesterov=True),
    "sgd fused": lambda: SGD(params(), momentum=0.9, dampening=0.1, fused=True),
    "several": lambda: AdamW([{"params": params()}, {"params": params(torch.bfloat16), "weight_decay": 0.3}]),
}
MEASURE = """
import json, torch
from checkmate.train.arithmetic import measure
{setting}
weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
print(json.dumps(measure(torch.optim.AdamW([weight]))))
"""


def sent(measured: dict[str, Any] | None) -> Any:
    """As the shadow gets it, in one message of a handshake."""
    encoded = Hello("job", b"", "begin", 0, 2, 0, arithmetic=measured).encode()
    assert len(encoded) < 4096
    return json.loads(json.dumps(measured))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_shadow_makes_the_trainers_steps(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    measured = measure(optimizer)
    assert measured is not None and measured["digest"] and len(measured["cases"]) == len(optimizer.param_groups)
    assert problem(sent(measured)) is None
    assert not optimizer.state and not any(param.any() for param in optimizer.param_groups[0]["params"])


def test_every_option_shows() -> None:
    digests = [measure(make())["digest"] for make in OPTIMIZERS.values()]  # type: ignore[index]
    assert len(set(digests)) == len(OPTIMIZERS)


def test_a_scripts_hooks_into_all_steps_do_not_see_it() -> None:
    seen: list[Any] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *given: seen.append(given)),
        register_optimizer_step_post_hook(lambda *given: seen.append(given)),
    ]
    measure(AdamW([nn.Parameter(torch.zeros(3))]))
    for hook in hooks:
        hook.remove()
    assert not seen


def test_a_schedule_that_begins_at_0_hides_nothing() -> None:
    first, second = (measure(AdamW(params(), lr=lr)) for lr in (0.0, 0.1))
    assert first == second


OTHERS = {
    "with DEFAULT": ("default", ""),
    ", denormals flushed": ("", "torch.set_flush_denormal(True)"),
    ", torch.float64 by default": ("", "torch.set_default_dtype(torch.float64)"),
}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this processor has no AVX2")
@pytest.mark.parametrize("what", OTHERS)
def test_a_trainer_that_calculates_otherwise_is_refused(what: str) -> None:
    capability, setting = OTHERS[what]
    environment = os.environ | ({"ATEN_CPU_CAPABILITY": capability} if capability else {})
    script = MEASURE.format(setting=setting)
    said = subprocess.run(
        [sys.executable, "-P", "-c", script], env=environment, check=True, capture_output=True, text=True
    )
    theirs = json.loads(said.stdout)
    assert theirs["of"].endswith(what)
    reason = problem(theirs)
    assert reason is not None and f"the trainer computes them by {theirs['of']}, this shadow by torch" in reason


@pytest.mark.parametrize(
    "arithmetic",
    [7, {}, {"of": "x", "cases": 3, "digest": 1}, {"of": "x", "cases": [["LAMB", {}, "float32"]], "digest": 1},
     {"of": "x", "cases": [["SGD", {"lr": "fast"}, "float32"]], "digest": 1},
     {"of": "x", "cases": [["SGD", {"lr": 0.1}, "int7"]], "digest": 1}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arithmetic: Any) -> None:
    reason = problem(arithmetic)
    assert reason is not None and reason.startswith("malformed hello: arithmetic is ")
