"""Stores the duty in force in a file of the agent's state directory."""

from __future__ import annotations

from pathlib import Path

from edge_agent.paths import DUTY_FILE
from wattfleet.duties import Duty
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, remove_file, replace_file

_MAX_BYTES = 100_000


class DutyFile:
    """Stores one duty.

    Args:
        state_directory: the agent's state directory.
    """

    def __init__(self, state_directory: Path) -> None:
        self._path = state_directory / DUTY_FILE

    def read(self) -> Duty | None:
        """Return the stored duty; None if there is none.

        Raises:
            InvalidInputError: the file cannot be read, or is damaged.
        """
        try:
            content = read_regular_file(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"{self._path}: cannot be read: {error.strerror}") from None
        try:
            return Duty.from_json(content[:_MAX_BYTES].decode())
        except (InvalidInputError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"{self._path}: {error}: remove the file, and set the duty again with `wattfleet agent duty set`"
            ) from None

    def write(self, duty: Duty | None) -> None:
        """Store a duty; None removes the stored one.

        Raises:
            InvalidInputError: the file cannot be written; the stored duty is unchanged.
        """
        try:
            if duty is not None:
                make_state_folder(self._path.parent)
                replace_file(self._path, duty.to_json().encode() + b"\n")
            else:
                remove_file(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise InvalidInputError(f"{self._path}: cannot be written: {error.strerror}") from None
