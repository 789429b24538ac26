"""Reads the charges and the harvest of the site file's batteries periodically: by queries, and from files."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

from coordinator.budgets.prometheus_budget import NameLookups, PrometheusNumber, fetch_number
from coordinator.budgets.site_file import DEVICE, ChargeFile, SiteBattery
from coordinator.errors import BudgetSourceError, NoReadingError, UnusableReadingError
from coordinator.settings import SiteSettings
from coordinator.state.fleet import Fleet
from coordinator.state.stores import CHARGE, HARVEST, OF_DEVICE, OF_SUPPLY
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.budgets import Charge, MeasuredHarvest
from wattfleet.core.errors import ImplausibleError, InvalidInputError

_log = logging.getLogger(__name__)

_LONGEST_FILE = 64
"""Bytes of a file with a charge that are read."""

_AT_ONCE = 8
"""Queries and files of one battery's devices that are read at the same time."""

Query = Callable[[PrometheusNumber], Awaitable[tuple[float, datetime]]]


class BatteryWatch:
    """The readings of all batteries, from `start` to `stop`. No error of a source ends the watch."""

    def __init__(
        self,
        batteries: Sequence[SiteBattery],
        fleet: Fleet,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        query: Query | None = None,
        settings: SiteSettings = SiteSettings(),
    ) -> None:
        """Watch batteries.

        Args:
            batteries: the batteries of the site file.
            fleet: takes their readings, and knows the devices.
            sleep: waits for some seconds.
            query: runs a query once; None for `fetch_number`.
            settings: the timeout of a query.
        """
        self._batteries, self._fleet, self._sleep = batteries, fleet, sleep
        self._query = query or partial(fetch_number, timeout_s=settings.query_timeout_s, names=NameLookups())
        self._tasks: list[asyncio.Task[None]] = []
        self._failing: dict[tuple[str, str], type[BaseException]] = {}

    async def start(self) -> None:
        """Begin to read all batteries in the background: a coordinator starts although a source does not answer."""
        for battery in self._batteries:
            every_s = [each.every_s for each in (battery.charge, battery.harvest) if each is not None]
            if every_s:
                what = f"read the battery {battery.placed.name}"
                self._tasks.append(background_task(what, self._read_forever(battery, min(every_s))))

    async def stop(self) -> None:
        """End the watch; the newest readings stay."""
        await stop_tasks(*self._tasks)
        self._tasks = []

    async def _read_forever(self, battery: SiteBattery, every_s: float) -> None:
        while True:
            await self._read(battery)
            await self._sleep(every_s)

    async def _read(self, battery: SiteBattery) -> None:
        """Read a supply's battery, or those of all devices that have one of its kind."""
        if battery.placed.supply:
            holders = [OF_SUPPLY + battery.placed.supply]
        else:
            stores = self._fleet.stores
            known = sorted(each for each in self._fleet.agents.devices if stores.battery_of(each) is battery.placed)
            holders = [OF_DEVICE + each for each in known]
        for k in range(0, len(holders), _AT_ONCE):
            await asyncio.gather(*(self._read_holder(battery, holder) for holder in holders[k : k + _AT_ONCE]))

    async def _read_holder(self, battery: SiteBattery, holder: str) -> None:
        if battery.charge is not None:
            await self._read_safely(holder, CHARGE, self._read_charge(battery.charge, holder))
        if battery.harvest is not None:
            await self._read_safely(holder, HARVEST, self._read_harvest(battery.harvest, holder))

    async def _read_safely(self, holder: str, what: str, reading: Awaitable[None]) -> None:
        """Read one source of a battery; its failure leaves the others alone."""
        name, source, problems = holder.partition("/")[2], (holder, what), self._fleet.stores.problems
        try:
            await reading
        except (BudgetSourceError, ImplausibleError) as error:
            problems[source] = str(error)
            # Once per kind of error: the texts contain figures that differ each time.
            if type(error) is not self._failing.get(source):
                self._failing[source] = type(error)
                _log.warning("battery of %s: the %s cannot be read: %s", name, what, error)
        except Exception:
            # The boundary of the watch: a bug in one battery must not freeze the others.
            _log.exception("battery of %s: unexpected error", holder)
        else:
            problems.pop(source, None)
            if self._failing.pop(source, None):
                _log.info("battery of %s: the %s is read again", name, what)

    async def _read_charge(self, charge: PrometheusNumber | ChargeFile, holder: str) -> None:
        name = holder.partition("/")[2]
        if isinstance(charge, ChargeFile):
            found = await asyncio.to_thread(charge_in, Path(charge.path.replace(DEVICE, name)))
        else:
            percent, measured_at = await self._query(_for_device(charge, name))
            found = Charge(percent / 100, measured_at)
        self._fleet.stores.report_charge(holder, found)

    async def _read_harvest(self, harvest: PrometheusNumber, holder: str) -> None:
        watts, measured_at = await self._query(_for_device(harvest, holder.partition("/")[2]))
        until = measured_at + timedelta(seconds=harvest.max_age_s)
        self._fleet.stores.report_harvest(holder, MeasuredHarvest(watts, measured_at, until))


def _for_device(query: PrometheusNumber, name: str) -> PrometheusNumber:
    return replace(query, query=query.query.replace(DEVICE, name))


def charge_in(path: Path) -> Charge:
    """Read a charge in percent from a file; it is as old as the file's last change.

    Raises:
        NoReadingError: the file cannot be read.
        UnusableReadingError: it contains no number of 0 to 100.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_FILE)
            changed_s = os.fstat(file.fileno()).st_mtime
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its name is invalid"
        raise NoReadingError(f"{path} cannot be read: {reason}") from None
    try:
        percent = float(content.decode().strip().removesuffix("%"))
        return Charge(percent / 100, datetime.fromtimestamp(changed_s, timezone.utc))
    except InvalidInputError as error:
        raise UnusableReadingError(f"{path}: {error}") from None
    except ValueError:
        text = content.decode("ascii", "replace").strip()
        raise UnusableReadingError(f"{path} contains {text[:20]!r}: write a charge of 0 to 100 percent") from None
