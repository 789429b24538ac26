"""Pages of the reference, written from the code: commands, settings and protocol."""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from coordinator.settings import CoordinatorSettings
from edge_agent.settings import AgentSettings
from wattfleet.common.cli import wattfleet
from wattfleet.common.help import variables_text
from wattfleet.common.settings.model import Settings, keys_of

_PROTOCOL = Path(__file__).parents[2] / "proto" / "wattfleet_proto" / "v1"


def commands() -> str:
    """Every command, with its arguments and options."""
    lines = ["# Commands", "", "Every command answers `--help`. Exit code 2 means bad input, 1 that something failed."]
    for path, command in _leaves("wattfleet", wattfleet):
        lines += ["", f"## {path}", "", _prose(command.help or "")]
        context = click.Context(command, info_name=path)
        rows = [record for each in command.get_params(context) if (record := _record(each, context))]
        lines += ["", "```text", command.get_usage(context).removeprefix("Usage: "), "```"]
        if rows:
            lines += ["", "| argument or option | meaning |", "|---|---|"]
            lines += [f"| {_code(name)} | {_cell(_prose(text))} |" for name, text in rows if name != "--help"]
        if variables := variables_text(context):
            lines += ["", variables]
    return "\n".join(lines) + "\n"


def settings() -> str:
    """Every setting of the coordinator and of the agent."""
    lines = [
        "# Settings",
        "",
        "An option wins over its environment variable, and that over the settings file. A key `keep_days` of the table"
        f" `store` is `{CoordinatorSettings.variable_of('store.keep_days')}` in the environment.",
    ]
    models: list[tuple[str, type[Settings]]] = [("The coordinator", CoordinatorSettings), ("The agent", AgentSettings)]
    for title, model in models:
        lines += ["", f"## {title}", "", f"Environment variables start with `{model.prefix}`."]
        group = ""
        for key in keys_of(model):
            if key.group != group:
                group = key.group
                lines += ["", f"### {group}: {model.title_of(group)}", ""]
                lines += ["| key | option | meaning |", "|---|---|---|"]
            option = f"`{key.option}`" if key.option else ""
            lines.append(f"| `{key.name}` | {option} | {_cell(_prose(f'{key.description} {key.default_text}'))} |")
    return "\n".join(lines) + "\n"


def protocol() -> str:
    """The services and messages of agents, Flower and operators."""
    lines = [
        "# Protocol",
        "",
        "Agents, Flower's server, SuperLinks and operators call the coordinator over gRPC. Apps call the agent on its"
        " unix socket. [Security](../security.md#who-may-do-what) says which role may call what.",
    ]
    for file in sorted(_PROTOCOL.glob("*.proto")):
        lines += ["", f"## {file.stem}", "", "```protobuf", file.read_text(encoding="utf-8").strip(), "```"]
    return "\n".join(lines) + "\n"


def _leaves(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command, info_name=path)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        if child is not None and not child.hidden:
            yield from _leaves(f"{path} {name}", child)


def _record(parameter: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(context), str(getattr(parameter, "help", "") or "")
    return parameter.get_help_record(context)


def _prose(text: str) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", inspect.cleandoc(text)).replace("\b", "").replace("<", "&lt;")


def _code(text: str) -> str:
    """Code in a table's cell, where a bar would begin the next cell, even between back quotes."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
