"""The fan, and the service that controls its speed depending on the temperature."""

from __future__ import annotations

from collections.abc import Mapping

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.knob_files import KnobNames, noting, set_value, value_of
from edge_agent.devices.tree import Tree
from wattfleet_io.programs import RunProgram

_SERVICE = "nvfancontrol"
_FULL_PWM = 255


class Fan:
    """A board's fan, if it has one.

    Args:
        tree: the board's files.
        run: runs `systemctl`.
    """

    def __init__(self, tree: Tree, run: RunProgram) -> None:
        self._tree = tree
        self._run = run
        self._path = next(iter(tree.glob("/sys/devices/platform/pwm-fan*/hwmon/hwmon*/pwm1")), None)

    @property
    def exists(self) -> bool:
        """Whether there is a fan that can be set."""
        return self._path is not None

    def share(self) -> float | None:
        """Return its speed, 0 to 1; None without a fan, or if the speed cannot be read."""
        if self._path is None:
            return None
        try:
            return int(self._tree.read(self._path)) / _FULL_PWM
        except (OSError, ValueError):
            return None

    def hold_full(self) -> None:
        """Run the fan at full speed.

        Raises:
            ModeNotAppliedError: it does not reach full speed.
        """
        if self._path is None:
            return
        if self._is_serviced():
            self._systemctl("stop")
        set_value(self._tree, self._path, _FULL_PWM)
        held = value_of(self._tree, self._path)
        if held != _FULL_PWM:
            raise ModeNotAppliedError(
                f"{self._path}: wanted {_FULL_PWM}, found {held}; stop the other program that controls the fan"
            )

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that `hold_full` changes."""
        if self._path is None:
            return {}
        return {"fan/pwm": str(value_of(self._tree, self._path)), "fan/service": str(int(self._is_serviced()))}

    def written_files(self) -> list[str]:
        """Return the files that `hold_full` writes."""
        return [self._path] if self._path else []

    def knob_names(self) -> KnobNames:
        """Return the settings that `put_back` accepts."""
        return KnobNames(required={"fan/pwm", "fan/service"} if self.exists else set())

    def put_back(self, knobs: Mapping[str, int]) -> None:
        """Restart the fan's service if it ran before; otherwise restore the fan's speed.

        Raises:
            ModeNotAppliedError: the fan cannot be set, or its service does not start.
        """
        if self._path is None:
            return
        if not knobs["fan/service"]:
            set_value(self._tree, self._path, knobs["fan/pwm"])
        elif not self._is_serviced():
            self._start_service(self._path)

    def _start_service(self, path: str) -> None:
        failed: list[str] = []
        with noting(failed):
            self._systemctl("start")
        if failed:
            # Since nothing controls the fan now, only full speed is safe.
            with noting(failed):
                set_value(self._tree, path, _FULL_PWM)
            raise ModeNotAppliedError("; ".join(failed))

    def _is_serviced(self) -> bool:
        return self._run(["systemctl", "is-active", "--quiet", _SERVICE], "").code == 0

    def _systemctl(self, verb: str) -> None:
        result = self._run(["systemctl", verb, _SERVICE], "")
        if result.code != 0:
            raise ModeNotAppliedError(f"systemctl {verb} {_SERVICE}: {result.output.strip() or 'failed'}")
