"""Reports as single HTML pages that work offline: Plotly, styles and figures are inside the file.

Figures are plain Plotly dictionaries. The page's script adds fonts and colours for light and dark mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

INK = "@ink"
"""A placeholder colour in figures, which the page replaces with the text colour of light or dark mode."""


def write_page(
    path: Path,
    package: str,
    template: str,
    figures: Mapping[str, Any],
    filters: Mapping[str, Callable[..., Any]],
    **values: Any,
) -> None:
    """Write a page.

    Args:
        path: the file to write.
        package: the package with the template in its folder `templates`.
        template: file name of a template that extends `page.html.j2` of this package.
        figures: Plotly figures by the id of the element in which each is drawn.
        filters: filters for the template, in addition to `number`.
        **values: variables of the template.

    Raises:
        OSError: the file cannot be written.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PackageLoader("wattfleet.common")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({"number": number, **filters})
    page = environment.get_template(template).render(figures=figures, plotly=get_plotlyjs(), **values)
    path.write_text(page, encoding="utf-8")


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with thousands separators; a dash if it is unknown."""
    return "–" if value is None else f"{value:,.{digits}f}"
