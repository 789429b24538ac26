"""The help of every command: whole names of options in panels, and the environment variables in one line at the end.

Typer's own help cuts long names of options and variables, and leaves half of the width to the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import click

_WIDEST = 100
_TERMS = 28


class _Formatter(click.HelpFormatter):
    """Wraps lines at spaces only: names of options and files keep their hyphens."""

    _NO_BREAK = "\N{NON-BREAKING HYPHEN}"

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", self._NO_BREAK))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = _TERMS, col_spacing: int = 2) -> None:
        """Write terms and their texts side by side; the text of a long term begins below it."""
        super().write_dl([(term, text.replace("-", self._NO_BREAK)) for term, text in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        """Return what was written."""
        return super().getvalue().replace(self._NO_BREAK, "-")


class Help(click.Context):
    """The context of a command, which formats its help."""

    formatter_class = _Formatter

    def get_help(self) -> str:
        """Return the help: usage, purpose, arguments, options, commands and variables."""
        self.max_content_width = _WIDEST
        formatter = self.make_formatter()
        self.command.format_usage(self, formatter)
        self.command.format_help_text(self, formatter)
        for title, rows in _panels(self).items():
            with formatter.section(title):
                formatter.write_dl(rows)
        if text := variables_text(self):
            formatter.write_paragraph()
            formatter.write_text(text)
        return formatter.getvalue().rstrip()


def variables_text(ctx: click.Context) -> str:
    """Return a sentence with the environment variables of a command's options; empty if there are none."""
    names = [str(each.envvar) for each in settable_options(ctx.command.get_params(ctx)) if each.envvar]
    prefix = str(getattr(ctx.command, "prefix", prefix_of(ctx.command_path.split())))
    return f"Variables: {_in_one_line(names, prefix)}." if names else ""


def settable_options(parameters: Iterable[click.Parameter]) -> Iterator[click.Option]:
    """Return the options that can be set by a variable and in the user's settings file."""
    for each in parameters:
        if isinstance(each, click.Option) and each.allow_from_autoenv and not each.hidden and not each.is_eager:
            yield each


def prefix_of(path: Sequence[str]) -> str:
    """Return the beginning of the variables of a command, such as `WATTFLEET_COORDINATOR_DEVICES_`."""
    return "_".join([*path, ""]).replace("-", "_").upper()


def _panels(ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of each panel: arguments, options without a panel, other options, and commands."""
    command = ctx.command
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            kind = "Options" if isinstance(parameter, click.Option) else "Arguments"
            title = getattr(parameter, "rich_help_panel", None) or kind
            panels.setdefault(title, []).append(_plain(*record))
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            child = command.get_command(ctx, name)
            if child is not None and not child.hidden:
                title = getattr(child, "rich_help_panel", None) or "Commands"
                panels.setdefault(title, []).append((name, child.get_short_help_str(limit=1_000)))
    return {title: rows for title, rows in panels.items() if rows}


def _plain(term: str, text: str) -> tuple[str, str]:
    """Return a row without Typer's markup, and without `RANGE`, since the text states the range."""
    return term.replace(" RANGE", ""), text.replace("\\[", "[")


def _in_one_line(names: Sequence[str], prefix: str) -> str:
    """Name variables; of those with the prefix, only the first one is complete."""
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    others = [name for name in names if not name.startswith(prefix)]
    return "; ".join([*([prefix + ", _".join(own)] if own else []), *others])
