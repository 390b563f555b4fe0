"""One rank of a test of drawn configurations over gloo: STORE SEED…; rank 0 has the shadow."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from checkmate import attach, config
from checkmate.protocol import Seed
from checkmate.tensors import MASTER, named_state, pack_state
from checkmate.train import attach as attach_module
from checkmate.train import checkpoint, checks
from support.train.direct import DirectClient, DirectLink, DirectShadow
from support.train.draws import STEPS, Training, draw

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def follow(seed: int) -> None:
    shadow = DirectShadow(reread=True)
    module: Any = attach_module
    module.load_plugin = lambda: shadow
    module.Client = lambda *_, **__: DirectClient(shadow)
    training = Training(draw(seed), RANK)
    followed = attach(training.ddp, training.optimizer, masters=training.masters)
    training.make_scheduler()
    assert followed.resume() is None
    for step in range(1, STEPS + 1):
        training.iterate()
        followed.before_forward()
        if RANK == 0:
            assert shadow.unfollowed == [] and followed.committed == step, (
                f"draw {seed} step {step}: {shadow.unfollowed}"
            )
            params, buffers = named_state(training.net)
            params += [(MASTER + name, master) for name, master in training.masters.items()]
            description, manifest, tensors = pack_state(params, buffers, training.optimizer)
            assert shadow.replica is not None
            differing = shadow.replica.differences(Seed(step, description, manifest), tensors)
            assert not differing, f"draw {seed}, {draw(seed)}: {differing} after step {step}"
    followed.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK, world_size=WORLD)
    config.MIN_RANKS = 1
    checks.CARRIERS.append("gloo")
    checkpoint.RecordsLink = DirectLink  # type: ignore[misc, assignment]
    for seed in map(int, sys.argv[2:]):
        follow(seed)
        print("followed", seed, flush=True)
    dist.destroy_process_group()


main()
