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


@dataclass(frozen=True)
class RoundAssignment:
    """What one node is to do in one round.

    Attributes:
        plan_id: the round's plan.
        device_id: whose assignment it is.
        mode: the power mode to train in.
        epochs: local epochs that the plan counts on.
        power_limit_w: watts set aside for the device.
    """

    plan_id: str
    device_id: str
    mode: PowerMode
    epochs: float
    power_limit_w: float

    def to_record(self) -> dict[str, str | int | float]:
        """The values of the ConfigRecord."""
        return {
            "plan-id": self.plan_id,
            DEVICE_ID_KEY: self.device_id,
            "epochs": self.epochs,
            "power-limit-w": self.power_limit_w,
            **self.mode._asdict(),
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
            )
        except (KeyError, ValueError) as error:
            raise InvalidInputError(
                f"the message's {RECORD_KEY!r} record is no assignment ({error}):"
                " run the same version of Wattfleet on the server and the devices"
            ) from None
