"""What mkdocs does beside its own work: lists as in the repository, files outside `docs/`, a reference of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.blockprocessors import build_block_parser
from mkdocs.structure.files import File, Files

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path.insert(0, str(_HERE))  # mkdocs loads this file alone

import links  # noqa: E402
import reference  # noqa: E402

_ASSETS = ("style.css", "focus.js", "iframe-worker.js")
_GENERATED = {"commands": reference.commands, "settings": reference.settings, "protocol": reference.protocol}


class _ShortIndents(Extension):
    """Take two or three spaces as the indentation of what belongs to a list item, as the repository's view does.

    With the four spaces that Markdown otherwise needs, a block of code ends its list, and the numbers start anew.
    """

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (the library's name)
        """Set the indentation, for which Markdown has no option."""
        md.tab_length = 2
        md.parser = build_block_parser(md)  # the former one was built with four


def on_config(config: Any) -> Any:
    """Add the extension; it comes first, since others add to the parser that it replaces."""
    config.markdown_extensions.insert(0, _ShortIndents())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, the site's style, and every file outside `docs/` that a page links to."""
    for name, content in _GENERATED.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content()))
    for name in _ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(_HERE / name)))
    pages = [links.repository_path(file.src_uri) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(pages)
    while pages:
        page = pages.pop()
        for linked in links.linked_files((_ROOT / page).read_text(encoding="utf-8"), page, _file_of):
            if linked in seen or linked.startswith(f"{links.DOCS}/"):
                continue
            seen.add(linked)
            files.append(File.generated(config, links.site_path(linked), abs_src_path=str(_ROOT / linked)))
            if linked.endswith(".md"):
                pages.append(linked)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make the links of a page work on the site."""
    return links.for_site(markdown, links.repository_path(page.file.src_uri), _file_of)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the dialog of the search, which the theme does not."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _file_of(path: str) -> str | None:
    found = _ROOT / path
    if found.is_dir():
        found, path = found / "README.md", f"{path}/README.md"
    return path if found.is_file() and not path.startswith("..") else None
