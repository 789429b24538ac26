"""Enrol with the invite in the file named by WATTFLEET_INVITE, if it exists; then run the command in this process.

    python enrolled.py wattfleet agent run --device=simulated:agx-orin --device-id=orin-0 --state-dir=/var/lib/wattfleet

The invite is removed once it is used, so a restart does not enrol again. It uses the standard library only, since the
images contain different packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

AGENT = ["wattfleet", "agent", "run"]
JOIN_OPTIONS = ("--device=", "--device-id=", "--state-dir=")


def join_command(command: Sequence[str]) -> tuple[list[str], Path]:
    """Return the command that enrols the role of a command, and the folder of its identity."""
    if list(command[:3]) != AGENT:
        return ["wattfleet", "join"], Path(os.environ["WATTFLEET_IDENTITY"])
    options = [word for word in command if word.startswith(JOIN_OPTIONS)]
    state = next(word.partition("=")[2] for word in options if word.startswith("--state-dir="))
    return ["wattfleet", "agent", "join", *options], Path(state) / "identity"


def enrol(invite: Path, command: Sequence[str]) -> None:
    """Enrol. If this fails and there is no earlier identity to continue with, exit with the same status."""
    join, folder = join_command(command)
    with invite.open("rb") as line:
        status = subprocess.run(join, stdin=line, check=False).returncode
    if status == 0:
        invite.unlink()
    elif not (folder / "certificate.pem").exists():
        sys.exit(status)


def main() -> None:
    """Enrol if there is an invite, and replace this process by the command."""
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: enrolled.py COMMAND [ARGUMENT ...]")
    invite = os.environ.get("WATTFLEET_INVITE")
    if invite and Path(invite).exists():
        enrol(Path(invite), command)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
