"""The command line's answers to wrong input: the option, its value, what is allowed; exit code 2, no traceback."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from checkmate.cli import app
from checkmate.config import CheckmateError
from checkmate.lab import LabConfig, lab_topology
from checkmate.launch import Job, run_job
from checkmate.plan import make_plan
from checkmate.planning.tables import tables
from checkmate.shadow.rx.receiver import RxConfig

WRONG = [
    (["demo", "--ranks", "1"], "--ranks"),
    (["demo", "--steps", "x"], "--steps"),
    (["demo", "--mtu", "1400"], "--mtu 1400: allowed are 1500 and 9000"),
    (["demo", "--kill", "9@1"], "the rank is 0 to 3"),
    (["demo", "--kill", "0@0"], "the step 1 to 40"),
    (["demo", "--kill", "٣@٤"], "use none, random or RANK@STEP"),
    (["demo", "--kill", ""], "use none, random or RANK@STEP"),
    (["lab", "--mtu", "1"], "--mtu 1: allowed are 1500 and 9000"),
    (["run", "-t", "/nope", "x.py"], "/nope"),
    (["run", "-t", "t", "--channels", "33", "x.py"], "--channels"),
    (["plan", "/tmp"], "Is a directory"),
    (["status", "/tmp"], "name the socket"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=lambda value: " ".join(value) if len(value) < 7 else None)
def test_wrong_arguments_are_named(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(app, arguments)
    said = str(result.exception) if isinstance(result.exception, CheckmateError) else result.output
    assert text in said
    assert result.exit_code == 2 or isinstance(result.exception, CheckmateError)


def test_a_plan_shows_all_of_an_address_in_a_narrow_window(tmp_path: Path) -> None:
    topology = lab_topology(LabConfig(2), "ckm0", tmp_path)
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(tables(make_plan(topology, {"shadow0"})))
    assert "…" not in console.export_text()


def test_run_elsewhere_than_on_the_host_says_so_at_once(tmp_path: Path) -> None:
    topology = tmp_path / "t.yaml"
    lab = lab_topology(LabConfig(2), "ckm0", tmp_path).to_dict()
    topology.write_text(str(lab | {"registrar": "192.0.2.1:7702"}))  # TEST-NET-1: nobody's address
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(CheckmateError, match=r"registrar: 192\.0\.2\.1 is not an address of this machine"):
        run_job(Job(topology, script))
    with pytest.raises(CheckmateError, match=r"--logs .*: Not a directory"):
        run_job(Job(topology, script, logs=script / "logs"))


def test_numbers_beyond_what_the_receiver_takes() -> None:
    with pytest.raises(CheckmateError, match="sets is 100000000000: it must be 1 to 4294967295"):
        RxConfig(sets=10**11)
