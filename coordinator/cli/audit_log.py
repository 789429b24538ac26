"""`wattfleet coordinator audit-log`: what operators changed."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.budget import seconds
from coordinator.cli.options import JsonOption, connected
from wattfleet_io.console import print_json, print_line


def audit_log(
    since: Annotated[
        str | None, typer.Option(help="List only requests of this last period, such as 7d. Default: all that are kept.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """List what operators changed or tried to change: when, who, and what. At most the newest 10,000 are listed."""
    import time
    from datetime import datetime, timezone

    since_unix_s = None if since is None else time.time() - seconds(since)
    with connected() as client:
        entries = client.audit_log(since_unix_s)
    content = [
        {
            "at": datetime.fromtimestamp(each.at_unix_s, timezone.utc).isoformat(timespec="seconds"),
            "caller": each.caller,
            "method": each.method,
            "request": each.request,
            "outcome": each.outcome or None,
        }
        for each in entries
    ]
    if json_:
        print_json(content)
        return
    for each in content:
        print_line(" ".join(filter(None, (each["at"], f"{each['caller']}:", each["method"], each["request"]))))
        if each["outcome"]:
            print_line(f"  {each['outcome']}")
    if not content:
        print_line("no operator has changed anything")
