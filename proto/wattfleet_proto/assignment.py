"""One device's assignment in one round, and its record in Flower's messages.

An assignment takes two ways from the plan to the device:

- `wattfleet.core.planning.Assignment` is a plan's: mode and power limit with the predictions that they rest on. The
  coordinator's grants refer to it, and `session.proto`'s `Grant` brings mode and limit to the agent. No app is believed
  about them.
- `RoundAssignment` is what Flower's message and the app need: the plan's id, the epochs and the deadline. Its messages
  are the ConfigRecord in Flower's message and `local.proto`'s `StartTraining`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from wattfleet.core.errors import InvalidInputError
from wattfleet_proto.limits import LARGEST_COUNT

RECORD_KEY = "wattfleet"
"""The record's key in a message's content."""

IDENTIFY_KEY = "identify"
"""In a request: reply with the device id instead of training."""

DEVICE_ID_KEY = "device-id"

PAIRING_PROBLEM_KEY = "pairing-problem"
"""In a reply with a device id: why the node cannot train on the device; empty if it can, absent if this is unknown."""

SHARE_KEY = "share"
"""In a reply: the share of the assigned work that was done before the deadline, 0 to 1."""

CUT_KEY = "cut"
"""In a reply: whether the deadline ended the training early."""

APP_WEIGHS_KEY = "app-weighs"
"""In a reply: whether the app's own weight counts only what was done."""


MEASURED_KEY = "measured"
"""In a reply: whether the training ended early, since it was run in order to measure; the reply holds no update."""

TOOK_EPOCHS_KEY = "took-epochs"
"""In a reply: whether the app asked how many local epochs the plan has chosen; absent if the plan has chosen none."""

UNPROFILED_KEY = "unprofiled"
"""In a reply: why the app has reported no minibatches to the agent, so that no mode was measured; absent if it has."""

OBSERVED_EPOCH_S_KEY = "observed-epoch-s"
"""In a reply: seconds of an epoch, as the agent has observed them."""

OBSERVED_POWER_W_KEY = "observed-power-w"
"""In a reply: mean power of the training, as the agent has observed it, watts."""

PREDICTION_KEY = "wattfleet-prediction"
"""The key, in a training message's content, of the record of what is predicted of the training."""


WORK_KEY = "wattfleet-work"
"""The key, in a training message's content, of the record of the work that the plan has chosen (`AssignedWork`)."""


@dataclass(frozen=True)
class AssignedWork:
    """The work that a plan has chosen for one device in one round; None for what it has not chosen.

    Attributes:
        batch: samples in a minibatch.
        lr_scale: factor of the learning rate that the app uses with its own batch size.
        passes: passes over the data that make the progress of one pass with the app's own batch size. An epoch of the
            plan has so many.
        epochs: local epochs.

    Raises:
        InvalidInputError: a number is out of range.
    """

    batch: int | None = None
    lr_scale: float = 1.0
    passes: float = 1.0
    epochs: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and not 1 <= self.batch <= LARGEST_COUNT:
            raise InvalidInputError(f"a batch must have 1 to {LARGEST_COUNT:,} samples, not {self.batch}")
        if self.epochs is not None and not 1 <= self.epochs <= LARGEST_COUNT:
            raise InvalidInputError(f"a device trains 1 to {LARGEST_COUNT:,} local epochs, not {self.epochs}")
        if not (0 < self.lr_scale < math.inf and 0 < self.passes < math.inf):
            raise InvalidInputError(
                f"the scale of the learning rate and the passes must be finite and above 0, not {self.lr_scale:g} and"
                f" {self.passes:g}"
            )

    def to_record(self) -> dict[str, int | float]:
        """Return the values of the ConfigRecord."""
        record: dict[str, int | float] = {}
        if self.batch is not None:
            record |= {"batch": self.batch, "lr-scale": self.lr_scale, "passes": self.passes}
        if self.epochs is not None:
            record["epochs"] = self.epochs
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> AssignedWork:
        """Read the work from the values of a ConfigRecord.

        Raises:
            InvalidInputError: a value is missing, has the wrong type or is out of range.
        """
        try:
            epochs = int(str(record["epochs"])) if "epochs" in record else None
            if "batch" not in record and epochs is not None:
                return cls(epochs=epochs)
            return cls(int(str(record["batch"])), float(str(record["lr-scale"])), float(str(record["passes"])), epochs)
        except (KeyError, ValueError) as error:
            raise InvalidInputError(
                f"the message's {WORK_KEY!r} record states no work ({error}): run the same version of Wattfleet on the"
                " server and the devices"
            ) from None


@dataclass(frozen=True)
class RoundAssignment:
    """What one device does in one round.

    Attributes:
        plan_id: the round's plan.
        device_id: the device.
        epochs: local epochs to train.
        deadline_s: seconds from the start of training after which it stops; None for no deadline.
        measures: whether the training is run in order to measure, so that it ends when nothing is left to measure.

    Raises:
        InvalidInputError: the deadline is not above 0.
    """

    plan_id: str
    device_id: str
    epochs: float
    deadline_s: float | None = None
    measures: bool = False

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InvalidInputError(f"{self.device_id}: the deadline must be above 0 s, got {self.deadline_s:g} s")

    def to_record(self) -> dict[str, str | int | float | bool]:
        """Return the values of the ConfigRecord."""
        return {
            "plan-id": self.plan_id,
            DEVICE_ID_KEY: self.device_id,
            "epochs": self.epochs,
            **({} if self.deadline_s is None else {"deadline-s": self.deadline_s}),
            **({"measures": True} if self.measures else {}),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> RoundAssignment:
        """Read an assignment from the values of a ConfigRecord.

        Raises:
            InvalidInputError: a value is missing or has the wrong type.
        """
        try:
            return cls(
                plan_id=str(record["plan-id"]),
                device_id=str(record[DEVICE_ID_KEY]),
                epochs=float(str(record["epochs"])),
                deadline_s=float(str(record["deadline-s"])) if "deadline-s" in record else None,
                measures=bool(record.get("measures", False)),
            )
        except (KeyError, ValueError) as error:
            raise InvalidInputError(
                f"the message's {RECORD_KEY!r} record is not an assignment ({error}):"
                " run the same version of Wattfleet on the server and the devices"
            ) from None
