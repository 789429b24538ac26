"""Reports the state of the session with the coordinator: in the log, and for `wattfleet agent status`."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.paths import SESSION_FILE
from wattfleet.errors import InvalidInputError
from wattfleet_io.atomic_files import make_state_folder, read_regular_file, replace_file
from wattfleet_io.console import duration_text
from wattfleet_io.logs import fields
from wattfleet_io.parsing import parse_json

_log = logging.getLogger(__name__)

_REPEAT_S = 3600.0
"""A problem that stays the same is logged again after this time."""

_LINES_PER_MINUTE = 6
"""Problems that keep changing are logged at most this often."""


@dataclass(frozen=True)
class SessionStatus:
    """The state of the session after its last change.

    Attributes:
        address: the coordinator's host:port.
        problem: why there is no session; None during a session.
        unix_s: the time of the change, seconds since 1970.
        is_exposed: whether the connection leaves the machine in plaintext.
    """

    address: str
    problem: str | None
    unix_s: float
    is_exposed: bool = False


class SessionNews:
    """Records every change of a session.

    Args:
        address: the coordinator's host:port.
        path: the file for the record; None for no file. Its folder exists once the agent runs.
        now_s: a monotonic clock.
        is_exposed: whether the connection leaves the machine in plaintext.
    """

    def __init__(
        self,
        address: str = "",
        path: Path | None = None,
        now_s: Callable[[], float] = time.monotonic,
        is_exposed: bool = False,
    ) -> None:
        self._address = address
        self._is_exposed = is_exposed
        self._path = path
        self._now_s = now_s
        self._logged_s: deque[float] = deque(maxlen=_LINES_PER_MINUTE)
        self._shown: str | None = None
        self._cause: str | None = None
        self._failed_s = 0.0
        self._noted = False

    def connected(self) -> None:
        """Note that the coordinator has welcomed this device."""
        if self._shown is not None:
            lasted_s = self._now_s() - self._failed_s
            _log.info(
                "the coordinator at %s can be reached again after %s",
                self._address,
                duration_text(lasted_s),
                extra=fields(coordinator=self._address, outage_s=round(lasted_s, 1)),
            )
            self._cause = None
        if self._shown is not None or not self._noted:
            self._shown = None
            self._note()

    def failed(self, problem: str, cause: str | None = None) -> None:
        """Note why there is no session.

        Args:
            problem: the problem and what the agent does about it, as plain text.
            cause: the same value for all attempts that fail for one reason, although their texts differ; None uses the
                text.
        """
        now_s, cause = self._now_s(), cause or problem
        if self._cause is None:
            self._failed_s = now_s
        changed = cause != self._cause
        if len(self._logged_s) == _LINES_PER_MINUTE and now_s - self._logged_s[0] < 60:
            return
        if not changed and now_s - self._logged_s[-1] < _REPEAT_S:
            return
        self._logged_s.append(now_s)
        _log.warning("%s", problem, extra=fields(coordinator=self._address))
        self._cause, self._shown = cause, problem
        if changed:
            self._note()

    def _note(self) -> None:
        self._noted = True
        if self._path is None:
            return
        content = {"address": self._address, "problem": self._shown, "is_exposed": self._is_exposed}
        try:
            make_state_folder(self._path.parent)
            replace_file(self._path, json.dumps(content).encode() + b"\n")
        except OSError as error:
            _log.debug("%s: cannot be written: %s", self._path, error.strerror)


def read_session_status(state_directory: Path) -> SessionStatus | None:
    """Return the recorded state of the agent's session; None if it never began.

    Raises:
        InvalidInputError: the file cannot be read, or is damaged.
    """
    path = state_directory / SESSION_FILE
    try:
        content = parse_json(read_regular_file(path))
        address, problem, is_exposed = content["address"], content["problem"], content.get("is_exposed", False)
        if not (isinstance(address, str) and isinstance(problem, str | None) and isinstance(is_exposed, bool)):
            raise ValueError
        return SessionStatus(address, problem, path.stat().st_mtime, is_exposed)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(f"{path}: is damaged; the agent writes it again when it connects") from None
