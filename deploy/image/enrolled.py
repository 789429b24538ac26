"""Enrol with the invite in the file that WATTFLEET_INVITE names, if there is one; then become the command.

    python enrolled.py wattfleet agent run --device=simulated:agx-orin --device-id=orin-0 --state-dir=/var/lib/wattfleet

The invite is removed once it is used, so a restart does not enrol again. It uses the standard library only, since the
images differ in what they have.
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
    """How whoever runs a command enrols, and the folder of its identity."""
    if list(command[:3]) != AGENT:
        return ["wattfleet", "join"], Path(os.environ["WATTFLEET_IDENTITY"])
    options = [word for word in command if word.startswith(JOIN_OPTIONS)]
    state = next(word.partition("=")[2] for word in options if word.startswith("--state-dir="))
    return ["wattfleet", "agent", "join", *options], Path(state) / "identity"


def enrol(invite: Path, command: Sequence[str]) -> None:
    """Enrol, or exit as the enrolment does if there is no earlier identity to go on with."""
    join, folder = join_command(command)
    with invite.open("rb") as line:
        status = subprocess.run(join, stdin=line, check=False).returncode
    if status == 0:
        invite.unlink()
    elif not (folder / "certificate.pem").exists():
        sys.exit(status)


def main() -> None:
    """Enrol if invited, and run the command in place of this process."""
    command = sys.argv[1:]
    if not command:
        sys.exit("usage: enrolled.py COMMAND [ARGUMENT ...]")
    invite = os.environ.get("WATTFLEET_INVITE")
    if invite and Path(invite).exists():
        enrol(Path(invite), command)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
