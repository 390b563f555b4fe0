"""Fixtures: a world of one rank over gloo in the test's own process (load with ``pytest_plugins``)."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from checkmate import config
from checkmate.train import attach as attach_module
from checkmate.train import checkpoint as checkpoint_module
from checkmate.train import checks, data
from support.train.direct import DirectClient, DirectLink, DirectShadow
from support.train.fake_shadow import FakePlugin, FakeShadow
from support.train.model import use


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, restarted: Callable[[], None]) -> FakePlugin:
    fake = FakePlugin()
    monkeypatch.setattr(attach_module, "load_plugin", lambda: fake)
    monkeypatch.setattr(config, "MIN_RANKS", 1)
    monkeypatch.setattr(checks, "CARRIERS", ["gloo"])
    return fake


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None, plugin: FakePlugin) -> Iterator[FakeShadow]:
    fake = FakeShadow(1)
    use(fake, tmp_path, monkeypatch)
    yield fake
    fake.close()


@pytest.fixture
def restarted() -> Iterator[Callable[[], None]]:
    """A call makes this process forget its DataLoaders, as a restart would."""

    def restart() -> None:
        data.TRACKER.remove()
        data.TRACKER.__init__()  # type: ignore[misc]

    restart()
    yield restart
    restart()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("checkmate")]


@pytest.fixture
def direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: None, restarted: Callable[[], None]) -> DirectShadow:
    """A shadow in this process, to which ``attach`` connects without a network."""
    shadow = DirectShadow()
    monkeypatch.setattr(attach_module, "load_plugin", lambda: shadow)
    monkeypatch.setattr(attach_module, "Client", lambda *_, **__: DirectClient(shadow))
    monkeypatch.setattr(checkpoint_module, "RecordsLink", DirectLink)
    monkeypatch.setattr(config, "MIN_RANKS", 1)
    monkeypatch.setattr(checks, "CARRIERS", ["gloo"])
    fake = FakeShadow(1)
    use(fake, tmp_path, monkeypatch)  # for the settings alone
    fake.close()
    return shadow
