"""``python -m checkmate.train.bootstrap`` on gloo and with a fake plugin, for machines where nothing is compiled."""

import logging
import sys
from pathlib import Path

from fake_shadow import FakePlugin

from checkmate import config
from checkmate.train import attach, bootstrap, checks

store, script, *args = sys.argv[1:]
logging.getLogger("checkmate").setLevel(logging.INFO)
attach.load_plugin = FakePlugin
checks.CARRIERS.append("gloo")
bootstrap.CPU_BACKEND = "gloo"
config.MIN_RANKS = 1
bootstrap.use_plugin_backend = lambda: None
sys.argv = ["bootstrap", str(Path(__file__).with_name(script)), store, *args]
bootstrap.main()
