"""What mkdocs does beside its own work: files outside `docs/`, links to them, and the reference from the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
sys.path.insert(0, str(_HERE))  # mkdocs loads this file alone

import links  # noqa: E402
import reference  # noqa: E402

_GENERATED = {"commands": reference.commands, "settings": reference.settings, "protocol": reference.protocol}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and every file outside `docs/` that a page links to."""
    for name, content in _GENERATED.items():
        files.append(File.generated(config, f"reference/{name}.md", content=content()))
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


def _file_of(path: str) -> str | None:
    found = _ROOT / path
    if found.is_dir():
        found, path = found / "README.md", f"{path}/README.md"
    return path if found.is_file() and not path.startswith("..") else None
