"""A file of JSON lines that several processes append to, and that survives their being killed."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class Ledger:
    """Appends each line with one write, so that a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **entry: Any) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")


class LedgerReader:
    """Reads what was appended since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def look(self) -> list[dict[str, Any]]:
        found = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                found.append(json.loads(line))
        return found
