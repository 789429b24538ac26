"""A device's assignment as it travels inside Flower's messages: one ConfigRecord beside the strategy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode

RECORD_KEY = "wattfleet"
"""Where the record lies in a message's content."""

IDENTIFY_KEY = "identify"
"""In a request: answer with the device's id instead of training."""

DEVICE_ID_KEY = "device-id"

SHARE_KEY = "share"
"""In a reply: how much of the assigned work was done before its deadline, 0 to 1."""

CUT_KEY = "cut"
"""In a reply: its deadline ended the training early."""

APP_WEIGHS_KEY = "app-weighs"
"""In a reply: the app's own weight counts only what was done."""


@dataclass(frozen=True)
class RoundAssignment:
    """What one node is to do in one round.

    Attributes:
        plan_id: the round's plan.
        device_id: whose assignment it is.
        mode: the power mode to train in.
        epochs: local epochs that the plan counts on.
        power_limit_w: watts set aside for the device.
        deadline_s: seconds after its training began at which it stops; None for none.

    Raises:
        InvalidInputError: the deadline is not above 0.
    """

    plan_id: str
    device_id: str
    mode: PowerMode
    epochs: float
    power_limit_w: float
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InvalidInputError(f"{self.device_id}: a deadline is above 0 s, not {self.deadline_s:g}")

    def to_record(self) -> dict[str, str | int | float]:
        """The values of the ConfigRecord."""
        return {
            "plan-id": self.plan_id,
            DEVICE_ID_KEY: self.device_id,
            "epochs": self.epochs,
            "power-limit-w": self.power_limit_w,
            **self.mode._asdict(),
            **({} if self.deadline_s is None else {"deadline-s": self.deadline_s}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> RoundAssignment:
        """Read the values of a ConfigRecord.

        Raises:
            InvalidInputError: a value is missing or of the wrong kind.
        """
        try:
            return cls(
                plan_id=str(record["plan-id"]),
                device_id=str(record[DEVICE_ID_KEY]),
                mode=PowerMode(*(int(str(record[knob])) for knob in PowerMode._fields)),
                epochs=float(str(record["epochs"])),
                power_limit_w=float(str(record["power-limit-w"])),
                deadline_s=float(str(record["deadline-s"])) if "deadline-s" in record else None,
            )
        except (KeyError, ValueError) as error:
            raise InvalidInputError(
                f"the message's {RECORD_KEY!r} record is no assignment ({error}):"
                " run the same version of Wattfleet on the server and the devices"
            ) from None
