"""`wattfleet agent trust-references`: which operator's references the device accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.cli.options import JsonOption, StateDirOption
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, TRUST_DIRECTORY
from wattfleet_io.console import print_json, print_line


def trust_references(
    root: Annotated[Path, typer.Argument(help="The newest N.root.json from the operator's folder of keys.")],
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    json_: JsonOption = False,
) -> None:
    """Accept only references signed by the keys of ROOT, and those that ship with Wattfleet.

    Restart the agent afterwards.
    """
    from edge_agent.session.reference_trust import trust_root
    from wattfleet.errors import InvalidInputError
    from wattfleet_io.atomic_files import read_regular_file, require_own_folder
    from wattfleet_io.clock import unix_now_s

    try:
        content = read_regular_file(root)
        require_own_folder(state_dir)
    except OSError as error:
        raise InvalidInputError(f"{error.filename}: cannot be used: {error.strerror}") from None
    digest = trust_root(state_dir / TRUST_DIRECTORY, content, unix_now_s())
    if json_:
        print_json({"sha256": digest})
    else:
        print_line(f"trusted: the root with the SHA-256 {digest}")
        print_line("restart the agent to put it in force")
