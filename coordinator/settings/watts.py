"""Settings of the site's power budgets, and of how long grants last."""

from __future__ import annotations

from pathlib import Path

from wattfleet_io.settings.model import Group, setting


class SiteSettings(Group):
    """Site: its power budgets, and how often they are checked."""

    budget_w: float | None = setting(
        None,
        "Limit the power of all devices together to this many watts.",
        unit="W",
        option="--site-budget-w",
        unset="none; pass this or --site-file",
    )
    file: Path | None = setting(
        None,
        "Read supplies, their budgets and the devices behind them from this file (docs/budgets.md).",
        option="--site-file",
        unset="none; pass this or --site-budget-w",
    )
    budget_check_s: float = setting(
        1.0, "Time between two checks for a changed schedule or a stale reading.", unit="s", gt=0
    )
    query_timeout_s: float = setting(5.0, "Time for one query of Prometheus to be answered.", unit="s", gt=0)
    trim_check_s: float = setting(
        1.0, "Time between two checks whether rounds in flight exceed their budget.", unit="s", gt=0
    )
    max_override_days: float = setting(
        366.0, "Longest time for which `wattfleet coordinator budget set` may override a budget.", unit="days", gt=0
    )


class GrantSettings(Group):
    """Grants: how long a device may draw more than its idle power without contact to the coordinator."""

    lifetime_s: float = setting(
        120.0,
        "Time for which a device may continue training after it lost the coordinator; then it parks. Its watts stay"
        " reserved until then. With a longer time, trainings survive longer outages, but a lower budget holds later"
        " (docs/reliability.md).",
        unit="s",
        ge=10,
        le=86_400,
    )
    confirm_timeout_s: float = setting(
        10.0,
        "Time for a connected device to confirm a new power limit. If it does not, other devices are trimmed instead.",
        unit="s",
        gt=0,
    )
    stop_margin_s: float = setting(
        5.0,
        "Time for a device to park after its grant has lapsed. Its watts stay reserved until then.",
        unit="s",
        ge=0,
    )
    longest_factor: float = setting(
        2.0, "End a training after its planned duration or deadline times this factor, plus longest_extra_s.", ge=1
    )
    longest_extra_s: float = setting(600.0, "Additional time after which a training is ended.", unit="s", ge=0)
    longest_unknown_s: float = setting(
        21_600.0,
        "Do not end a training before this time if its device does not know yet how many minibatches its epoch has.",
        unit="s",
        gt=0,
        le=2_592_000,
    )
