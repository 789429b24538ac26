"""The parts of a serving fleet: its state and store, the budgets in force, and the orders to devices."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.budgets.budget_watch import BudgetWatch
from coordinator.clocks import BootClock
from coordinator.listeners import await_free
from coordinator.preparation import Preparation
from coordinator.references import ServedReferences
from coordinator.repository.repository import FleetRepository
from coordinator.repository.standby import open_store
from coordinator.repository.writer import Writer
from coordinator.service_figures import ServiceFigures
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.services.state_times import StateTimes
from coordinator.services.trimmer import Trimmer
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.shared_modes import SharedModes
from coordinator.state.stored_grants import GrantLifetime
from wattfleet_identity.http_access import VIEWING
from wattfleet_io.clock import utc_now
from wattfleet_proto.device_state import DeviceState

if TYPE_CHECKING:
    from coordinator.reference_metadata import ReferenceMetadata


@dataclass(frozen=True)
class FleetInService:
    """A fleet whose store this coordinator owns.

    Attributes:
        fleet: the state.
        writer: writes to the store.
        repository: the state together with the store.
        references: the published predictors.
        metadata: the signed metadata of references; None if they are not signed.
        leases: the leases of sessions.
        orders: sends orders to devices.
        trimmer: changes rounds in flight when budgets fall.
        budgets: the budgets in force.
        figures: measurements of the coordinator itself.
        state_times: since when devices are in their states.
        events: the log of what happens to the fleet.
    """

    fleet: Fleet
    writer: Writer
    repository: FleetRepository
    references: ServedReferences
    metadata: ReferenceMetadata | None
    leases: Leases
    orders: Orders
    trimmer: Trimmer
    budgets: BudgetWatch
    figures: ServiceFigures
    state_times: StateTimes
    events: EventLog

    @classmethod
    async def opened(cls, preparation: Preparation, held: AsyncExitStack) -> FleetInService:
        """Open the store, and continue with its state.

        Args:
            preparation: what was read before; its identities are restored.
            held: closes everything that is opened here.

        Raises:
            InvalidInputError: the store or the signed metadata cannot be used, or an address stays in use.
            StoreInUseError: another coordinator uses the store, and this one is not a standby.
            StoreUnavailableError: the store's database does not answer.
        """
        settings = preparation.settings
        store = await open_store(preparation.location, settings.store)
        held.callback(store.close)
        if settings.store.standby:
            # The previous coordinator may still listen there until it notices that it has lost the store.
            await await_free(preparation.addresses, settings.store.owner_check_s + settings.server.stop_limit_s)
        if preparation.credentials is not None:
            # While this coordinator was a standby, the other may have renewed or replaced the folder's contents.
            preparation.credentials.read_again()
        # Only the store's owner writes to the folder; a standby does not.
        metadata = _metadata_in(settings.profiling.reference_metadata)
        kept = store.load()
        preparation.identities.restore(kept.invites, kept.certificates)
        references = ServedReferences(preparation.reference.artefact, kept.references, kept.pinned)
        fleet = preparation.basis.fleet(kept, settings, time.monotonic)
        # Before any device can receive a longer lifetime than that of an earlier process.
        store.save(GrantLifetime(fleet.rounds.grants.unstored.lifetime_s))
        expected = [record.device_id for record in kept.devices if record.state is not DeviceState.OFFLINE]
        leases = Leases(time.monotonic(), expected, settings.sessions, settings.grants.lifetime_s / 3)
        figures = ServiceFigures()
        writer = Writer(store, settings=settings.store, figures=figures)
        held.push_async_callback(writer.close)
        shared = SharedModes(settings.sessions.share_modes)
        identities = preparation.identities
        orders = Orders(
            fleet,
            settings.sessions.max_workloads,
            shared,
            # Devices serve metrics to these roles.
            revoked=lambda: identities.revoked(VIEWING, utc_now()),
        )
        held.push_async_callback(orders.close)
        repository = FleetRepository(fleet, writer, settings.store)
        state_times = StateTimes(fleet.agents.devices, settings.profiling.modes)
        events = EventLog(fleet, repository.save_soon, state_times.throttled_unix_s, kept.devices)
        trimmer = Trimmer(repository, orders, settings=settings.site, events=events)
        budgets = BudgetWatch(
            preparation.basis.site.budgets,
            trimmer.budget_changed,
            overrides=kept.budget_overrides,
            settings=settings.site,
            since_boot_s=BootClock.of_system().since_boot_s,
            is_clock_doubtful=kept.is_clock_doubtful,
            on_event=events.budget_changed,
        )
        held.push_async_callback(budgets.stop)
        await budgets.start()
        return cls(
            fleet,
            writer,
            repository,
            references,
            metadata,
            leases,
            orders,
            trimmer,
            budgets,
            figures,
            state_times,
            events,
        )


def _metadata_in(folder: Path | None) -> ReferenceMetadata | None:
    """The signed metadata of references, if there is a folder for it.

    Raises:
        InvalidInputError: the folder cannot be used, or a file in it is damaged.
    """
    if folder is None:
        return None
    # Imported here, because most coordinators do not need it.
    from coordinator.reference_metadata import ReferenceMetadata

    return ReferenceMetadata(folder)
