"""``run_groups.py FOLDER SCENARIOS``: run ``group_script.py`` in four ranks for each scenario; each imports torch once.

SCENARIOS is JSON: a name, and for each rank its environment, and the script's arguments. What rank r said goes to
FOLDER/NAME.said.r; the exit statuses of the ranks to the standard output, as JSON by name.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel imports it
from fake_shadow import FakePlugin

from checkmate import config
from checkmate.train import attach, bootstrap, checks


def rank_main(folder: Path, name: str, environment: dict[str, str], arguments: list[str]) -> None:
    said = os.open(folder / f"{name}.said.{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    os.environ.update(environment)
    sys.argv = [
        "bootstrap",
        str(Path(__file__).with_name("group_script.py")),
        str(folder / f"{name}.store"),
        *arguments,
    ]
    status = 1
    try:
        bootstrap.main()
        status = 0
    except SystemExit as end:
        sys.stderr.write(f"{end.code}\n")
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    folder = Path(sys.argv[1])
    logging.getLogger("checkmate").setLevel(logging.INFO)
    torch.set_num_threads(1)
    attach.load_plugin = FakePlugin
    checks.CARRIERS.append("gloo")
    bootstrap.CPU_BACKEND = "gloo"
    bootstrap.use_plugin_backend = lambda: None
    config.MIN_RANKS = 1
    statuses = {}
    for name, environments, arguments in json.loads(sys.argv[2]):
        ranks = []
        for environment in environments:
            ranks.append(pid := os.fork())
            if pid == 0:
                rank_main(folder, name, environment, arguments)
        statuses[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    main()
