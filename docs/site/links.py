"""Links of the repository's pages, as links of the site.

The pages link to each other and to files of the repository, so that they can be read there, too. On the site, what lies
outside `docs/` is in the folder `repository`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

DOCS, OUTSIDE = "docs", "repository"

_FENCE = re.compile(r"^(?:```|~~~)")
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(#[^)\s]*)?(?=\))")
_ELSEWHERE = re.compile(r"^[a-z]+:")


def site_path(repository_path: str) -> str:
    """Where a file of the repository is on the site."""
    folder, _, rest = repository_path.partition("/")
    return rest if folder == DOCS and rest else f"{OUTSIDE}/{repository_path}"


def repository_path(site: str) -> str:
    """The file of the repository that is there on the site."""
    folder, _, rest = site.partition("/")
    return rest if folder == OUTSIDE else f"{DOCS}/{site}"


def for_site(text: str, page: str, file_of: Callable[[str], str | None]) -> str:
    """A page's text with links that work on the site.

    Args:
        text: Markdown.
        page: the page's path in the repository.
        file_of: the file that a path of the repository stands for: itself, or a folder's README; None for nothing.
    """
    lines, is_code = [], False
    for line in text.split("\n"):
        if _FENCE.match(line.lstrip()):
            is_code = not is_code
        lines.append(line if is_code else _LINK.sub(lambda found: _for_site(found, page, file_of), line))
    return "\n".join(lines)


def linked_files(text: str, page: str, file_of: Callable[[str], str | None]) -> list[str]:
    """The files of the repository that a page links to; arguments as of `for_site`."""
    found: list[str] = []

    def note(path: str) -> str | None:
        file = file_of(path)
        if file is not None:
            found.append(file)
        return file

    for_site(text, page, note)
    return found


def _for_site(found: re.Match[str], page: str, file_of: Callable[[str], str | None]) -> str:
    target, anchor = found[1], found[2] or ""
    if _ELSEWHERE.match(target):
        return found[0]
    file = file_of(posixpath.normpath(posixpath.join(posixpath.dirname(page), target)))
    if file is None:
        return found[0]  # mkdocs warns of it
    return posixpath.relpath(site_path(file), posixpath.dirname(site_path(page)) or ".") + anchor
