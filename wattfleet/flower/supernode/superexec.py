"""Flower's SuperExec with a fork server that starts the processes of ClientApps.

    python -P -m wattfleet.flower.supernode.superexec SETTINGS OPTIONS

The options are those of `flower-superexec`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from logging import WARNING
from pathlib import Path
from types import SimpleNamespace

from flwr.common import log
from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec.executor import subprocess_executor

from wattfleet.flower import process_log
from wattfleet.flower.supernode.launching import Launcher

POLL_VARIABLE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
"""Flower's setting for the seconds between two requests of the SuperExec for a task."""

_INSTALLS = {"--allow-runtime-dependency-installation"}


def main() -> None:
    """Run the SuperExec; its first argument is JSON with `learn`, `imports` and `task_poll_s`."""
    settings = json.loads(sys.argv.pop(1))
    process_log.start()
    if _INSTALLS & set(sys.argv):
        # The app installs its own versions of libraries, so other versions must not be imported already.
        settings = {**settings, "learn": False, "imports": []}
    environment = dict(os.environ)
    os.environ.setdefault(POLL_VARIABLE, str(settings["task_poll_s"]))
    try:
        folder = tempfile.mkdtemp(prefix="wattfleet-supernode-")
    except OSError as error:
        log(
            WARNING,
            "Each message starts a new process without warm imports, as in Flower: %s. Set TMPDIR to a usable folder.",
            error,
        )
        flower_superexec()
        return
    launcher = Launcher(Path(folder), environment, settings["learn"], settings["imports"])
    subprocess_executor.subprocess = SimpleNamespace(Popen=launcher, DEVNULL=subprocess.DEVNULL)
    try:
        with launcher.preparing():
            flower_superexec()
    finally:
        launcher.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
