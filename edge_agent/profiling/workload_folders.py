"""The folders of a state directory, one per workload; moves files of earlier versions into them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_agent.paths import PREDICTOR_DIRECTORY, PROFILE_FILE, WORKLOAD_FILE, WORKLOADS_DIRECTORY
from edge_agent.profiling.journal import read_header
from edge_agent.profiling.known_workload import BUILT_IN, KnownWorkload
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.modes import Workload, WorkloadFacts
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file, require_own_folder
from wattfleet_io.parsing import parse_json

_log = logging.getLogger(__name__)

_READABLE_CHARACTERS = 40


@dataclass(frozen=True)
class StoredWorkload:
    """A workload in a state directory.

    Attributes:
        known: what is known of the workload.
        folder: its folder.
        last_use: number of its last use, counted over all workloads; 0 if unknown.
    """

    known: KnownWorkload
    folder: Path
    last_use: int

    @property
    def name(self) -> str:
        """Its name."""
        return self.known.workload.name


def folder_name(workload: str) -> str:
    """Return the name of a workload's folder: readable, safe on any file system, and unique."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", workload).strip("-.")[:_READABLE_CHARACTERS]
    return f"{readable}-{hashlib.sha256(workload.encode()).hexdigest()[:12]}"


class WorkloadFolders:
    """The workloads of a state directory. Its methods may be called in any thread.

    Args:
        state_directory: the agent's state directory.
    """

    def __init__(self, state_directory: Path) -> None:
        self._state_directory = state_directory
        self._root = state_directory / WORKLOADS_DIRECTORY
        self._last_use: int | None = None
        self._noting = threading.Lock()

    def folder(self, workload: str) -> Path:
        """Return the folder of a workload; it may not exist yet."""
        return self._root / folder_name(workload)

    def stored(self) -> list[StoredWorkload]:
        """Return all workloads, the most recently used first; log and leave out folders without a usable description.

        This includes a profile that an earlier version left in the state directory itself, unless its workload has a
        folder.

        Raises:
            InvalidInputError: a folder cannot be read.
            JournalError: the profile of an earlier version is damaged.
        """
        found = []
        try:
            for folder in sorted(self._root.iterdir()) if self._root.is_dir() else []:
                if not folder.is_symlink() and folder.is_dir() and (stored := _described(folder)) is not None:
                    found.append(stored)
            earlier = self._earlier()
        except PermissionError as error:
            raise InvalidInputError(
                f"{error.filename}: no permission to read it; run this as root, or as a member of its group"
            ) from None
        if earlier is not None and all(stored.name != earlier.workload.name for stored in found):
            found.append(StoredWorkload(earlier, self._state_directory, 0))
        return sorted(found, key=lambda stored: -stored.last_use)

    def prepare(self, known: KnownWorkload) -> Path:
        """Create a workload's folder if it is missing, and note that the workload is used now.

        Raises:
            InvalidInputError: the folder cannot be created, or belongs to another user.
        """
        folder = self.folder(known.workload.name)
        self._count_uses()  # before a folder without a description can exist
        try:
            make_state_folder(folder)
            require_own_folder(self._root)
            require_own_folder(folder)
        except OSError as error:
            raise InvalidInputError(f"{folder}: {error.strerror}") from None
        self.note(known)
        return folder

    def note(self, known: KnownWorkload) -> None:
        """Store what is known of a workload, and that it is used now; log a failure."""
        path = self.folder(known.workload.name) / WORKLOAD_FILE
        with self._noting:
            self._last_use = self._count_uses() + 1
            content: Mapping[str, Any] = {**known.content(), "last_use": self._last_use}
            try:
                replace_file(path, json.dumps(content).encode() + b"\n")
            except OSError as error:
                _log.error("%s: cannot be written: %s; it is kept in memory only", path, error.strerror)

    def _count_uses(self) -> int:
        """Return the number of the last use of any workload."""
        if self._last_use is None:
            self._last_use = max((stored.last_use for stored in self.stored()), default=0)
        return self._last_use

    def known(self, workload: str) -> KnownWorkload | None:
        """Return what is stored of a workload; None if nothing is."""
        folder = self.folder(workload)
        stored = _described(folder) if folder.is_dir() else None
        return None if stored is None or stored.name != workload else stored.known

    def remove(self, workload: str) -> None:
        """Remove a workload and all its files; log a failure."""
        try:
            shutil.rmtree(self.folder(workload))
        except OSError as error:
            _log.error("%s: cannot be removed: %s", error.filename, error.strerror)

    def size_bytes(self) -> int:
        """Return the total size of all files of all workloads, bytes."""
        sizes = 0
        for folder, _, files in os.walk(self._root):
            for name in files:
                try:
                    sizes += (Path(folder) / name).lstat().st_size
                except OSError:
                    continue  # it was removed meanwhile
        return sizes

    def move_in_earlier(self, minibatches_per_epoch: int | None) -> None:
        """Move a profile and a predictor, which earlier versions kept in the state directory itself, into a folder.

        Args:
            minibatches_per_epoch: the number stated to earlier versions for their only workload; None if unknown.

        Raises:
            InvalidInputError: they cannot be moved.
            JournalError: the profile cannot be read, or its first line is damaged.
        """
        profile, predictor = self._state_directory / PROFILE_FILE, self._state_directory / PREDICTOR_DIRECTORY
        known = self._earlier()
        if known is None:
            return
        if minibatches_per_epoch is not None:
            known = known.completed(known.workload.facts, minibatches_per_epoch)
        folder = self.folder(known.workload.name)
        if (folder / PROFILE_FILE).exists():
            _log.warning("%s: is not used, but kept, since %s holds the same workload", profile, folder)
            return
        self.prepare(known)
        try:
            if predictor.is_dir() and not (folder / PREDICTOR_DIRECTORY).exists():
                os.replace(predictor, folder / PREDICTOR_DIRECTORY)
            os.replace(profile, folder / PROFILE_FILE)
        except OSError as error:
            raise InvalidInputError(f"{error.filename}: cannot be moved to {folder}: {error.strerror}") from None
        _log.info("the profile of an earlier version is now the workload %r in %s", known.workload.name, folder)

    def _earlier(self) -> KnownWorkload | None:
        path = self._state_directory / PROFILE_FILE
        header = read_header(path)
        if header is None:
            return None
        # In earlier versions, a virtual board simulated its reference's workload, which the header names.
        name = header.workload if header.provenance == "hardware" else BUILT_IN
        return KnownWorkload(Workload(name, WorkloadFacts(batch=header.minibatch)))


def _described(folder: Path) -> StoredWorkload | None:
    path = folder / WORKLOAD_FILE
    try:
        content = parse_json(read_regular_file(path))
        last_use = content["last_use"]
        stored = StoredWorkload(KnownWorkload.from_content(content), folder, last_use)
        if folder_name(stored.name) == folder.name and type(last_use) is int and last_use >= 0:
            return stored
    except PermissionError:
        raise
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, InvalidInputError):
        pass
    return _from_journal(folder)


def _from_journal(folder: Path) -> StoredWorkload | None:
    """Return the workload of a folder whose description is lost, from its journal."""
    try:
        header = read_header(folder / PROFILE_FILE)
        if header is not None and folder_name(header.workload) == folder.name:
            known = KnownWorkload(Workload(header.workload, WorkloadFacts(batch=header.minibatch)))
            return StoredWorkload(known, folder, 0)
    except WattfleetError as error:
        _log.debug("%s: %s", folder, error)
    _log.warning("%s: does not describe a workload, so it is not used; remove it", folder)
    return None
