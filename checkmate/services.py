"""The long-running parts of a lab, each the process that it would be on a rack: switch, controller, shadows, job."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import yaml

from checkmate.config import CheckmateError
from checkmate.controlplane.preflight import check_machine, require
from checkmate.lab import Lab, LabConfig, clean_stale, sigterm_interrupts
from checkmate.status import query, status_sockets

_READY_SECONDS = 60.0
_POLL_SECONDS = 0.1


class Services:
    """Switch, controller and shadows of a lab; the lab owns the processes and ends them."""

    def __init__(self, lab: Lab, shadow_options: Sequence[str] = ()) -> None:
        self.lab = lab
        self.topology_file = lab.directory / "topology.yaml"
        self.topology_file.write_text(yaml.safe_dump(lab.topology.to_dict(), sort_keys=False))
        self._shadow_options = shadow_options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> Self:
        """Start all and wait until shadows are in their groups; raises CheckmateError with the log of what failed."""
        self.start_switch()
        for number in range(len(self.lab.topology.shadows)):
            self.start_shadow(number)
        self.start_controller()
        self.wait_for("the shadows to be in their groups", self._shadows_are_planned)
        return self

    def start_switch(self) -> None:
        """Start the switch's control process (again)."""
        switch = self.lab.topology.switch.netns
        assert switch is not None
        self._spawn("switch", switch, "switch", "up")

    def start_controller(self) -> None:
        """Start the controller (again)."""
        self._spawn("controller", self.lab.management, "controller", "--socket", self.controller_socket)

    def start_shadow(self, number: int = 0) -> None:
        """Start a shadow (again)."""
        shadow = self.lab.topology.shadows[number]
        assert shadow.netns is not None
        arguments: list[str | Path] = ["shadow", "--name", shadow.name, "--socket", self._socket(number)]
        arguments += self._shadow_options
        self._spawn(_shadow_name(number), shadow.netns, *arguments)

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """The process of "switch", "controller", "shadow", "shadow1", …."""
        return self._processes[name]

    @property
    def shadow_socket(self) -> Path:
        """Status socket of the first shadow."""
        return self.shadow_sockets[0]

    @property
    def shadow_sockets(self) -> list[Path]:
        """Status sockets of all shadows, of each for all groups that it follows."""
        return [socket for _, socket in self._followed()]

    @property
    def sockets_of(self) -> dict[str, list[Path]]:
        """The same by name of the group."""
        return {
            group.name: [socket for name, socket in self._followed() if name == group.name]
            for group in self.lab.topology.groups
        }

    def _followed(self) -> Iterator[tuple[str, Path]]:
        for number, shadow in enumerate(self.lab.topology.shadows):
            names = [group.name for group in self.lab.topology.followed(shadow)]
            yield from zip(names, status_sockets(self._socket(number), names), strict=True)

    def _socket(self, number: int) -> Path:
        """What a shadow is given as its status socket."""
        return self.lab.directory / f"{_shadow_name(number)}.sock"

    @property
    def controller_socket(self) -> Path:
        """Status socket of the controller."""
        return self.lab.directory / "controller.sock"

    def run(
        self,
        script: Path,
        args: Sequence[str],
        *,
        log: str,
        channels: int = 2,
        attach: bool = True,
        max_restarts: int = 3,
        env: Mapping[str, str] | None = None,
        topology_file: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a job (``checkmate run``) and return its process, which ends with the job.

        ``topology_file``: another one than the lab's, such as of some of its hosts.
        """
        options = ["--channels", str(channels), "--max-restarts", str(max_restarts), "--bpf", str(self.lab.bpf)]
        options += ["--logs", str(self.lab.directory / f"{Path(log).stem}-ranks")]
        options += [] if attach else ["--no-attach"]
        topology = topology_file or self.topology_file
        argv: list[str | Path] = [*_COMMAND, "run", "--topology", topology, *options, script, *args]
        return self.lab.spawn(self.lab.management, argv, log, env, trains=True)

    def wait_for(self, what: str, condition: Any, seconds: float = _READY_SECONDS) -> None:
        """Poll until ``condition()`` is true; CheckmateError when it takes too long or a service died."""
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise CheckmateError(f"waited {seconds:.0f} s for {what}; logs are in {self.lab.directory}")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise CheckmateError with the log of a service that has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = self.lab.log_tail(f"{name}.log")
                raise CheckmateError(f"the {name} ended with status {process.returncode}:\n{tail}")

    def shadow_status(self, number: int = 0) -> dict[str, Any] | None:
        """What answers at the ``number``-th of ``shadow_sockets``, None while nobody does."""
        return _try_query(self.shadow_sockets[number])

    def controller_status(self) -> dict[str, Any] | None:
        """The controller's status, None while it does not answer."""
        return _try_query(self.controller_socket)

    def _shadows_are_planned(self) -> bool:
        status = self.controller_status()
        return bool(status and status["in_sync"] and len(status["live_shadows"]) == len(self.lab.topology.shadows))

    def _spawn(self, name: str, netns: str, *arguments: str | Path) -> None:
        argv = [*_COMMAND, *arguments, "--topology", self.topology_file]
        self._processes[name] = self.lab.spawn(netns, argv, f"{name}.log")


def serve_lab(config: LabConfig, say: Callable[[str], None]) -> None:
    """Keep a lab with its services until SIGINT or SIGTERM; raises CheckmateError when one of them ends."""
    require(check_machine(mounts=False))
    for prefix in clean_stale():
        say(f"removed what the killed run {prefix} had left behind")
    command = f"{sys.executable} -P -m checkmate"
    with sigterm_interrupts(), suppress(KeyboardInterrupt), Lab(config, say=say) as lab:
        services = Services(lab).start()
        sockets = services.sockets_of
        say(
            f"ready; in another terminal:\n"
            f"  nsenter --net=/run/netns/{lab.management} {command} run --bpf {lab.bpf} "
            f"--topology {services.topology_file} YOUR_SCRIPT.py\n"
            + "".join(f"  {command} status {socket}\n" for socket in services.shadow_sockets)
            + f"  {command} status {services.controller_socket}\n"
            + "".join(f"  {command} export {' '.join(map(str, of))} {name}.pt\n" for name, of in sockets.items())
            + f"logs are in {lab.directory}; Ctrl-C ends and removes all"
        )
        while True:
            services.check()
            time.sleep(_POLL_SECONDS)


# -P: what runs is the installed package, wherever the caller stands.
_COMMAND = (sys.executable, "-P", "-m", "checkmate")


def _shadow_name(number: int) -> str:
    """Of its process, log and socket."""
    return f"shadow{number or ''}"


def _try_query(socket: Path) -> dict[str, Any] | None:
    try:
        return query(socket)
    except CheckmateError:
        return None
