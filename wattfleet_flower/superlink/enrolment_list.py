"""The coordinator's last list of who is enrolled and who is revoked, for a start while the coordinator is away."""

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
    """Who is enrolled, and who is revoked.

    Attributes:
        supernodes: device ids by public key, a line of OpenSSH.
        revoked: the serial numbers of revoked certificates of Flower apps and operators, hexadecimal.
    """

    supernodes: Mapping[str, str] = field(default_factory=dict)
    revoked: tuple[str, ...] = ()


class StoredList:
    """The file with the last list; its time says when the coordinator last confirmed it."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which is made private when the list is stored."""
        self._file = folder / FILE
        self._confirmed_at = datetime.fromtimestamp(0, timezone.utc)

    def read(self) -> tuple[EnrolmentList, datetime] | None:
        """The list, and when the coordinator last confirmed it; None if none is stored.

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
            raise InvalidInputError(f"{self._file} is damaged: remove it") from None

    def write(self, enrolled: EnrolmentList, now: datetime) -> None:
        """Store a list.

        Raises:
            OSError: it cannot be written; the former one stays.
        """
        make_private_folder(self._file.parent)
        replace_file(self._file, json.dumps(asdict(enrolled)).encode(), mode=SECRET_MODE)
        self._note(now)

    def confirm(self, now: datetime) -> None:
        """Note that the list still holds; the file is touched once a minute.

        Raises:
            OSError: it cannot be noted.
        """
        if abs(now - self._confirmed_at) >= _CONFIRMED_EVERY:
            self._note(now)

    def _note(self, now: datetime) -> None:
        os.utime(self._file, (now.timestamp(), now.timestamp()))
        self._confirmed_at = now
