"""``python -m checkmate.train.bootstrap SCRIPT ARGS…``: run an unmodified training script with Checkmate attached.

Attaching and resuming happen when the script first iterates a DataLoader, calls forward or, in a job of several groups,
sends to or receives from a rank, once there is a DistributedDataParallel module, or one that ``fully_shard`` made, and
an optimizer of its parameters.
That is before anything depends on the data order, and before a rank waits for another one that already attaches.
If the run cannot be followed, one warning says why and the script runs as it would alone; but when state exists and
cannot be restored, the script stops. Without CHECKMATE_SHADOWS nothing is attached; with CHECKMATE_BACKEND=checkmate
the script still communicates through the plugin.
"""

import functools
import logging
import os
import runpy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from checkmate.config import CheckmateError
from checkmate.train import registry
from checkmate.train.attach import ATTACHED, attach_unless
from checkmate.train.checkpoint import Checkpoint, ForwardHook
from checkmate.train.checks import sharded
from checkmate.train.data import TRACKER
from checkmate.train.fleet import Unrestorable
from checkmate.train.settings import GROUP_COUNT, SHADOWS

log = logging.getLogger("checkmate")

BACKEND = "CHECKMATE_BACKEND"
CPU_BACKEND = "checkmate"
"""The back end that takes gloo's place."""


class AutoAttach:
    """Attaches when a script is ready for it."""

    def __init__(self) -> None:
        self._modules: list[weakref.ReferenceType[nn.Module]] = []
        self._is_over = False
        self._checkpoint: Checkpoint | None = None

    def install(self) -> None:
        """Follow what the script makes."""
        registry.install()
        TRACKER.install()
        TRACKER.before_iterate = self._try_attach
        if int(os.environ.get(GROUP_COUNT) or 1) > 1:
            _before_point_to_point(self._before_message)
        original = DistributedDataParallel.__init__

        @functools.wraps(original)
        def init(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            self._note(ddp)

        DistributedDataParallel.__init__ = init  # type: ignore[method-assign,assignment]
        _after_sharding(self._note)

    def close(self, finished: bool) -> None:
        """The script is over; ``finished`` False: by an error."""
        if self._checkpoint is not None:
            self._checkpoint.close(finished)

    def _note(self, module: nn.Module) -> None:
        self._modules.append(weakref.ref(module))
        module.register_forward_pre_hook(ForwardHook(self._before_forward), prepend=True)

    def _before_forward(self) -> None:
        if self._is_over:
            return
        self._try_attach()
        if self._checkpoint is not None:
            self._checkpoint.before_forward()  # its own hook takes effect from the next forward

    def _before_message(self) -> None:
        if not self._is_over:
            self._try_attach()

    def _try_attach(self) -> None:
        modules = _outermost([module for reference in self._modules if (module := reference()) is not None])
        optimizers = [item for item in registry.optimizers() if any(_trains(item, module) for module in modules)]
        if self._is_over or not optimizers:
            self._refuse_shards()
            return
        self._is_over = True
        TRACKER.before_iterate = None
        if any(module in ATTACHED for module in modules):
            return  # the script did it
        problem = _own_loop(modules[0])
        if len(modules) > 1:
            problem = (
                f"the script has {len(modules)} modules of DistributedDataParallel or fully_shard side by side: one "
                "is supported, around all that is trained"
            )
        elif len(optimizers) > 1:
            problem = f"the script has {len(optimizers)} optimizers of the model: one must hold all parameters"
        try:
            self._checkpoint = attach_unless(problem, modules[0], optimizers[0], {}, {})
        except Unrestorable:
            raise
        except CheckmateError as error:
            log.warning("not attached: %s; training goes on without checkpoints", error)
        except Exception:
            log.exception("not attached because of an error of Checkmate's own; training goes on without checkpoints")
        if self._checkpoint is not None:
            self._checkpoint.resume()

    def _refuse_shards(self) -> None:
        """A script without a module to follow whose parameters are spread over ranks will never have one."""
        params = [param for item in registry.optimizers() for group in item.param_groups for param in group["params"]]
        if not self._is_over and not self._modules and (problem := sharded(params)) is not None:
            self._is_over = True
            TRACKER.before_iterate = None
            log.warning("not attached: %s; training goes on without checkpoints", problem)


def _before_point_to_point(work: Callable[[], None]) -> None:
    """Call ``work`` before each message between two ranks: a stage without data of its own begins with one."""
    modules: list[Any] = [dist, dist.distributed_c10d]
    for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv"):
        original = getattr(dist, name)

        def wrapped(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            work()
            return _original(*args, **kwargs)

        for module in modules:
            setattr(module, name, functools.wraps(original)(wrapped))


def _after_sharding(work: Callable[[nn.Module], None]) -> None:
    """Call ``work`` with each module that ``fully_shard`` makes."""
    original = fsdp.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        made: Any = original(module, *args, **kwargs)
        for one in [made] if isinstance(made, nn.Module) else made:
            work(one)
        return made

    packages: list[Any] = [fsdp, fsdp._fully_shard]
    for package in packages:
        package.fully_shard = fully_shard


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _own_loop(module: nn.Module) -> str | None:
    """What a framework needs whose own loop goes wrong when a restart repeats it from the top; None: nothing."""
    bare = module.module if isinstance(module, DistributedDataParallel) else module
    bases = [base.__module__ for base in type(bare).__mro__]
    if any(base.startswith(("lightning.pytorch.", "pytorch_lightning.")) for base in bases):
        return "Lightning counts steps itself: give its Trainer checkmate.train.lightning.CheckmateCallback()"
    transformers = sys.modules.get("transformers.trainer")
    if transformers is not None and registry.alive(transformers.Trainer):
        return (
            "transformers counts steps itself: give its Trainer checkmate.train.huggingface.CheckmateCallback(trainer)"
        )
    return None


def _trains(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    params = {id(param) for param in module.parameters()}
    return any(id(param) in params for group in optimizer.param_groups for param in group["params"])


def use_plugin_backend() -> None:
    """Let ``init_process_group`` use our back end for CPU tensors where the script would use gloo."""
    import checkmate.nccl_plugin.ring.backend  # noqa: F401, PLC0415 - registers the back end

    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original(plugin_backend(backend), *args, **kwargs)

    modules: list[Any] = [dist, dist.distributed_c10d]
    for module in modules:
        module.init_process_group = init_process_group


def plugin_backend(backend: str | None) -> str | None:
    """``backend`` with gloo on the CPU replaced; None means gloo where there is no accelerator."""
    if backend is None:
        return None if torch.cuda.is_available() else CPU_BACKEND
    if backend.lower() == "gloo":
        return CPU_BACKEND
    return ",".join(f"cpu:{CPU_BACKEND}" if part.lower() == "cpu:gloo" else part for part in backend.split(","))


def run(script: str, args: list[str]) -> None:
    """Run the script as ``python SCRIPT ARGS…`` would."""
    auto = AutoAttach()
    if os.environ.get(BACKEND) == CPU_BACKEND or os.environ.get(SHADOWS):
        use_plugin_backend()
    if os.environ.get(SHADOWS):
        auto.install()
    sys.argv = [script, *args]
    if sys.flags.safe_path:  # as `checkmate run` starts us: no folder of the launcher's is in the path
        sys.path.insert(0, "")
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        auto.close(finished=end.code in (None, 0))
        raise
    except BaseException:
        auto.close(finished=False)
        raise
    auto.close(finished=True)


def main() -> None:
    """Entry point."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m checkmate.train.bootstrap SCRIPT [ARGS…]")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("checkmate: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    try:
        run(sys.argv[1], sys.argv[2:])
    except CheckmateError as error:
        sys.exit(f"checkmate: {error}")  # says what to fix; a traceback would hide it


if __name__ == "__main__":
    main()
