"""``checkmate persist`` and the formats of others."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.persist.checkpointer import Checkpointer
from checkmate.persist.engine import Engine, Options, create
from checkmate.persist.interchange import read_safetensors, read_torch, write_safetensors
from checkmate.persist.state import StateError
from checkmate.tensors import is_same


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(30, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    weight = model.weight.detach()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": {"a.b": torch.ones(2), "a": {"b": torch.zeros(0, 3)}},
        "pairs": {7: (1, "x", b"y", None)},
        "views": [weight.t(), torch.randn(3, dtype=torch.complex64).conj(), torch.tensor(2.5)],
        "bf16": weight.bfloat16(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "c"
    with Checkpointer(path, in_flight=2, options=Options(chunk_bytes=65536)) as checkpointer:
        checkpointer.save({"t": torch.full((30_000,), 7.0)}, 1).result(60)
        checkpointer.save(training_state(), 2).result(60)
    return path


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["persist", *map(str, arguments)])


def test_list_and_verify(path: Path) -> None:
    listed = json.loads(call("list", path, "--json").output)
    assert listed["slots"] == 3
    assert [one["step"] for one in listed["checkpoints"]] == [2, 1]
    assert "committed" in call("list", path).output
    assert call("verify", path).exit_code == 0
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(content.index(torch.full((25_000,), 7.0).numpy().tobytes()) + 50_000)
        file.write(b"x")
    result = call("verify", path, "--json")
    assert result.exit_code == 1
    assert [one["problem"] is None for one in json.loads(result.output)["checkpoints"]] == [True, False]


def test_export_and_import_of_safetensors(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert json.loads(call("export", path, out).output) == {"step": 2, "path": str(out)}
    same(read_safetensors(out), training_state())
    assert json.loads(call("import", out, tmp_path / "d", "--step", 9).output)["step"] == 9
    with Checkpointer(tmp_path / "d") as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        same(loaded.state, training_state())


def test_others_read_our_safetensors_and_we_theirs(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_safetensors(ours, training_state())
    tensors = library.load_file(ours)
    assert is_same(tensors["model.weight"], training_state()["model"]["weight"])
    assert {"odd.a.b", "odd.a.b#2"} <= tensors.keys()
    library.save_file(tensors, theirs)
    same(read_safetensors(theirs), tensors)


def test_export_for_torch_and_dcp(path: Path, tmp_path: Path) -> None:
    assert call("export", path, tmp_path / "t.pt", "--format", "torch", "--step", 1).exit_code == 0
    assert torch.equal(torch.load(tmp_path / "t.pt", weights_only=True)["t"], torch.full((30_000,), 7.0))
    plain = tmp_path / "plain"
    with Checkpointer(plain, in_flight=1) as checkpointer:
        checkpointer.save({"model": training_state()["model"], "step": 3}, 3).result(60)
    assert call("export", plain, tmp_path / "dcp", "--format", "dcp").exit_code == 0
    assert call("import", tmp_path / "dcp", tmp_path / "e", "--step", 3, "--format", "dcp", "--trust").exit_code == 0
    with Checkpointer(tmp_path / "e") as checkpointer:
        loaded = checkpointer.load()
        assert loaded
        assert loaded.state["step"] == 3
        same(loaded.state["model"], training_state()["model"])


@pytest.mark.parametrize("shape", ["[-1]", "[1e9]", "[4611686018427387904, 4]", "[100000000000000]", "[" * 5000])
def test_a_header_that_makes_no_sense(tmp_path: Path, shape: str) -> None:
    header = f'{{"x": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(StateError, match="not a safetensors file, or a damaged one"):
        read_safetensors(tmp_path / "x")


def test_torch_files_with_arrays_come_back(tmp_path: Path) -> None:
    numbers = np.random.RandomState(1)
    kept = [numbers.get_state(), np.arange(3, dtype="i2"), np.array([True]), np.float16([0.5])]
    torch.save({"kept": kept, "t": torch.ones(2)}, tmp_path / "in")
    assert call("import", tmp_path / "in", tmp_path / "c", "--step", 1, "--format", "torch").exit_code == 0
    assert call("export", tmp_path / "c", tmp_path / "out", "--format", "torch").exit_code == 0
    state = read_torch(tmp_path / "out")
    other = np.random.RandomState(2)
    other.set_state(state["kept"][0])
    assert other.random_sample() == numbers.random_sample()
    for left, right in zip(state["kept"][1:], kept[1:], strict=True):
        assert left.dtype == right.dtype and left.tobytes() == right.tobytes()


def test_torch_files_with_code_are_refused(tmp_path: Path) -> None:
    torch.save({"call": print}, tmp_path / "in")
    result = call("import", tmp_path / "in", tmp_path / "c", "--step", 1, "--format", "torch")
    assert "cannot be read as torch" in str(result.exception)


def test_verify_names_what_is_not_listed_any_more(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(content.rindex(b"CKMSLOT\n"))
        file.write(b"x")
    result = call("verify", path, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert [one["problem"] for one in answer["checkpoints"]] == [None]
    assert "slot 1 is damaged" in answer["warning"]


def test_a_checkpoint_that_is_no_state(tmp_path: Path) -> None:
    """Whoever uses the engine alone may keep what he likes in a file."""
    path = tmp_path / "c"
    create(path, slots=2, data_bytes=10, meta_bytes=10)
    assert "holds no checkpoint that verifies" in str(call("export", path, tmp_path / "out").exception)
    with Engine(path) as engine:
        ticket = engine.begin(1, 4, 3, timeout_s=60)
        ticket.write(0, b"data")
        ticket.finish(b"xyz")
        ticket.wait(60)
    result = call("verify", path, "--json")
    assert result.exit_code == 1
    assert "the manifest makes no sense" in json.loads(result.output)["checkpoints"][0]["problem"]


def test_tune(tmp_path: Path) -> None:
    answer = json.loads(call("tune", tmp_path / "c", "--mib", 4, "--json").output)
    assert answer["rate"] > 0
    assert json.loads((tmp_path / "c.tune.json").read_text()) == answer
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.tune.json"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["list", "{}/none"], "none"),
        (["list", "{}"], "directory"),
        (["verify", "{}/junk"], "junk"),
        (["export", "{}/c", "{}/junk"], "exists"),
        (["export", "{}/c", "{}/no/where"], "does not exist"),
        (["export", "{}/c", "{}/out", "--step", "5"], r"--step 5; it holds \[1, 2\]"),
        (["import", "{}/junk", "{}/d", "--step", "1"], "not a safetensors file"),
        (["import", "{}/junk", "{}/d", "--step", "1", "--format", "torch"], "cannot be read as torch"),
        (["import", "{}/junk", "{}/d", "--step", "1", "--format", "dcp"], "--trust"),
        (["import", "{}/junk", "{}/d", "--step", "1", "--format", "dcp", "--trust"], "junk is not a checkpoint folder"),
        (["tune", "{}/no/where"], "does not exist"),
        (["tune", "{}"], "is a directory"),
    ],
)
def test_bad_input(path: Path, tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    result = call(*(argument.format(tmp_path) for argument in arguments))
    assert isinstance(result.exception, CheckmateError), result.output
    with pytest.raises(CheckmateError, match=text):
        raise result.exception
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c", "junk"]


def test_an_export_that_fails_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(state: object, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    result = call("export", path, tmp_path / "out", "--format", "torch")
    assert "No space left on device" in str(result.exception)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_data_type_that_safetensors_has_not(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"state\.x is of torch\.complex128"):
        write_safetensors(tmp_path / "x", {"x": torch.ones(1, dtype=torch.complex128)})
    assert list(tmp_path.iterdir()) == []


def same(left: Any, right: Any) -> None:
    assert type(left) is type(right) or isinstance(right, dict)
    if isinstance(right, torch.Tensor):
        assert is_same(left, right)
    elif isinstance(right, dict):
        assert left.keys() == right.keys()
        for key in right:
            same(left[key], right[key])
    elif isinstance(right, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    else:
        assert left == right
