"""`wattfleet completion`: prints the script that completes commands, options and their values in a shell."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

# Click's own classes: Typer's, in Click's registry, use another protocol than the root command.
_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_WATTFLEET_COMPLETE"
"""The variable's name, as Click derives it from the command's name."""


_HELP = """Print the script that completes `wattfleet` in bash, zsh or fish.

\b
bash: wattfleet completion bash > ~/.local/share/bash-completion/completions/wattfleet
zsh:  wattfleet completion zsh > "${fpath[1]}/_wattfleet"
fish: wattfleet completion fish > ~/.config/fish/completions/wattfleet.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def print_completion(ctx: click.Context, shell: str) -> None:
    """Print the script for one shell."""
    root = ctx.find_root()
    click.echo(_SHELLS[shell](root.command, {}, "wattfleet", _VARIABLE).source())
