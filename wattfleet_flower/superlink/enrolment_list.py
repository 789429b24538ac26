"""Stores the coordinator's last list of enrolled SuperNodes and revoked users, for a start without the coordinator."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet_identity.identity_folder import SECRET_MODE, make_private_folder
from wattfleet_io.atomic_files import read_regular_file, replace_file

FILE = "enrolled.json"
_CONFIRMED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class EnrolmentList:
    """The enrolled SuperNodes, and the revoked certificates of users.

    Attributes:
        supernodes: device id of each public key; keys are lines of OpenSSH.
        revoked: the serial numbers of revoked certificates of Flower apps and operators, hexadecimal.
    """

    supernodes: Mapping[str, str] = field(default_factory=dict)
    revoked: tuple[str, ...] = ()


class StoredList:
    """The file with the last list. Its modification time is when the coordinator last confirmed the list."""

    def __init__(self, folder: Path) -> None:
        """Use a folder. It is made private when the list is stored."""
        self._file = folder / FILE
        self._confirmed_at = datetime.fromtimestamp(0, timezone.utc)

    def read(self) -> tuple[EnrolmentList, datetime] | None:
        """Return the list, and when the coordinator last confirmed it; None if no list is stored.

        Raises:
            InvalidInputError: it is damaged, or cannot be read.
        """
        try:
            content = json.loads(read_regular_file(self._file))
            supernodes = {str(key): str(name) for key, name in content["supernodes"].items()}
            found = EnrolmentList(supernodes, tuple(map(str, content["revoked"])))
            return found, datetime.fromtimestamp(self._file.stat().st_mtime, timezone.utc)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"{self._file} cannot be read: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError):
            raise InvalidInputError(f"{self._file} is damaged: delete it") from None

    def write(self, enrolled: EnrolmentList, now: datetime) -> None:
        """Store a list.

        Raises:
            OSError: it cannot be written; the earlier list is kept.
        """
        make_private_folder(self._file.parent)
        replace_file(self._file, json.dumps(asdict(enrolled)).encode(), mode=SECRET_MODE)
        self._note(now)

    def confirm(self, now: datetime) -> None:
        """Record that the list is still valid; the file is touched at most once a minute.

        Raises:
            OSError: the file cannot be touched.
        """
        if abs(now - self._confirmed_at) >= _CONFIRMED_EVERY:
            self._note(now)

    def _note(self, now: datetime) -> None:
        os.utime(self._file, (now.timestamp(), now.timestamp()))
        self._confirmed_at = now
