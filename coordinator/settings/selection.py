"""Settings of client selection, and of the devices' profiling."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from wattfleet.planning.policies import POLICIES
from wattfleet_io.settings.model import Group, Names, setting
from wattfleet_proto.session_limits import PROFILE_MODES


class PolicySettings(Group):
    """Client selection: the policy and its parameters (docs/planning.md)."""

    name: str = setting(
        "progress",
        f"Client-selection policy: {', '.join(POLICIES)}, or one of an installed package (docs/planning.md).",
        option="--policy",
    )
    clients: int | None = setting(
        None,
        "Devices to select per round, for policies that take a number.",
        option="--clients",
        unset="half of the devices; with progress: as many as are useful",
    )
    seed: int = setting(0, "Seed of the policies that select at random.", option="--seed", ge=0)
    deadline_s: float | None = setting(
        None,
        "Limit a round's training to this many seconds; the policy deadline needs it.",
        unit="s",
        option="--deadline-s",
        unset="none",
    )
    utility: Literal["equal", "loss"] | None = setting(
        None,
        "Maximize the number of devices (equal) or the sum of their losses (loss), for the policy deadline.",
        unset="equal",
    )
    tiers: int | None = setting(None, "Sort devices into this many tiers, for the policy tiers.", unset="5")
    floor: float | None = setting(
        None,
        "Select every device in at least this share of the rounds, for the policy fair.",
        unset="half of an even share",
    )
    half_devices: float | None = setting(
        None,
        "Number of devices of a large fleet with which a round makes half of the possible progress, for the policy"
        " progress. Lower it if the devices' data are alike.",
        unset="3",
    )
    overhead_s: float | None = setting(
        None,
        "Time per round in addition to training, in seconds, for the policy progress.",
        unit="s",
        unset="10",
    )


class SelectionSettings(Group):
    """Devices to select from: limits that hold for every policy."""

    include: Names = setting(
        (),
        "Select only these devices: id:NAME, tag:NAME or site:NAME. Repeatable.",
        option="--include",
        unset="all devices",
    )
    exclude: Names = setting(
        (), "Never select these devices: id:NAME, tag:NAME or site:NAME. Repeatable.", option="--exclude"
    )
    over_selection: float = setting(
        0.0,
        "Select this share of devices in addition to the policy's number, 0 to 10; 0.2 adds a fifth.",
    )


class ProfilingSettings(Group):
    """Profiling: what each device measures, and the reference predictor it transfers from."""

    reference: str = setting(
        "agx_orin_resnet18",
        "Reference predictor: the name of one that ships with Wattfleet, or a directory.",
        option="--reference",
    )
    reference_metadata: Path | None = setting(
        None,
        "Serve references that the operator has signed: keep their metadata, and the coordinator's own key, in this"
        " directory (docs/references.md).",
        option="--reference-metadata",
        unset="references are not signed",
    )
    modes: int = setting(
        50,
        "Measure at most this many power modes on each device.",
        option="--profile-modes",
        ge=PROFILE_MODES[0],
        le=PROFILE_MODES[1],
    )
