"""The operator service: budgets, tags, drained devices, references, and a preview of the next plan."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from coordinator.budgets.budget_watch import BudgetStatus, BudgetWatch
from coordinator.errors import QuotaExceededError, UnknownRecordError, UploadTimeoutError
from coordinator.identity.access import certificate_of
from coordinator.references.published import ServedReferences, check_published
from coordinator.repository.repository import FleetRepository
from coordinator.services.audit import name_of_caller
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.services.planning import RoundPlanning
from coordinator.services.request_limits import host_of
from coordinator.state.identity_records import CertificateRecord
from coordinator.state.leases import Leases
from coordinator.state.names import require_name
from coordinator.state.power_draw import MeasuredDraw
from coordinator.state.preview import WhatIf
from coordinator.state.records import DeviceOverrides, SupplyEnergyBudget, SupplyOverride
from coordinator.state.stores import BatteryState
from wattfleet.common.tasks import background_task, stop_tasks
from wattfleet.core.budgets import Override, Period, PeriodBudget
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Workload
from wattfleet.core.planning import Selection
from wattfleet.core.planning.policies import policy_named
from wattfleet.core.prediction import Artefact
from wattfleet_proto.convert import plan_to_message, workload_from_message, workload_to_message
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.limits import MAX_MANIFEST_BYTES, MAX_WEIGHTS_BYTES, PROFILE_MODES
from wattfleet_proto.v1 import operator_pb2, operator_pb2_grpc, session_pb2

if TYPE_CHECKING:
    from coordinator.references.metadata import ReferenceMetadata


# --- Reference uploads ------------------------------------------------------------------------------------------------
# Receives reference predictors from operators, with limits on size, duration and number.


UPLOAD_S = 60.0
"""The longest duration of an upload, in seconds."""

MAX_UPLOADS = 4
"""The most simultaneous uploads; they are kept in memory."""

MAX_UPLOADS_OF_HOST = 1


class ReferenceUploads:
    """The uploads in progress."""

    def __init__(self) -> None:
        """Start without any upload."""
        self._of_host: Counter[str] = Counter()

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """Count an upload while it is received and checked.

        Raises:
            QuotaExceededError: too many uploads are in progress.
        """
        host = host_of(peer)
        if self._of_host[host] >= MAX_UPLOADS_OF_HOST or self._of_host.total() >= MAX_UPLOADS:
            raise QuotaExceededError(
                f"another upload of a reference predictor is in progress: try again within {UPLOAD_S:g} s"
            )
        self._of_host[host] += 1
        try:
            yield
        finally:
            self._of_host[host] -= 1
            self._of_host += Counter()  # drops the hosts without an upload

    async def receive(self, parts: AsyncIterator[operator_pb2.PublishReferenceRequest]) -> tuple[bytes, bytes]:
        """Receive a manifest and weights.

        Raises:
            InvalidInputError: the files are too large.
            UploadTimeoutError: the files do not arrive in time.
        """
        manifest, weights = b"", bytearray()
        try:
            async with asyncio.timeout(UPLOAD_S):
                async for part in parts:
                    manifest = manifest or part.manifest
                    weights += part.weights_chunk
                    if len(weights) > MAX_WEIGHTS_BYTES:
                        raise InvalidInputError(
                            f"the weights of a reference must not exceed {MAX_WEIGHTS_BYTES // 2**20} MiB"
                        )
                    if len(manifest) > MAX_MANIFEST_BYTES:
                        raise InvalidInputError(
                            f"the manifest of a reference must not exceed {MAX_MANIFEST_BYTES // 1024} KiB"
                        )
        except TimeoutError:
            raise UploadTimeoutError(
                f"the reference did not arrive within {UPLOAD_S:g} s: publish it over a faster connection"
            ) from None
        return manifest, bytes(weights)


# --- Operations -------------------------------------------------------------------------------------------------------

_MAX_OVERRIDE_DAYS = 366.0
"""The longest time for which `wattfleet coordinator budget set` may override a budget."""


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Translates between the operator's commands and the fleet."""

    def __init__(
        self,
        repository: FleetRepository,
        planning: RoundPlanning,
        budgets: BudgetWatch,
        references: ServedReferences,
        reconnect_all: Callable[[str], int],
        leases: Leases,
        orders: Orders,
        metadata: ReferenceMetadata | None = None,
        revoke: Callable[[Sequence[str]], Sequence[CertificateRecord]] = lambda device_ids: (),
        events: EventLog | None = None,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            planning: plans and previews rounds.
            budgets: the budgets in force.
            references: the published predictors.
            reconnect_all: ends all sessions for the given reason, so that agents reconnect; returns their number.
            leases: the sessions' leases.
            orders: sends devices their grants.
            metadata: the signed metadata of references; None if they are not signed.
            revoke: revokes the certificates of forgotten devices; returns the records to store.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._planning = planning
        self._budgets = budgets
        self._references = references
        self._uploads = ReferenceUploads()
        self._reconnect_all = reconnect_all
        self._leases = leases
        self._orders = orders
        self._signed = metadata
        self._revoke = revoke
        self._deleting: set[asyncio.Task[None]] = set()

    async def PreviewPlan(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.PreviewPlanRequest, context: Any
    ) -> operator_pb2.PreviewPlanResponse:
        """Preview the next round."""
        live = [run.run_id for run in self._fleet.flower.runs.values() if not run.finished]
        run_id = request.run_id or ("" if request.workload or not live else live[-1])
        if request.run_id and request.workload:
            raise InvalidInputError("a run has its own workload: leave out --run or --workload")
        workload = Workload(request.workload) if request.workload else None
        preview = await self._planning.preview(run_id, request.all_devices, request.epochs, workload, _what_if(request))
        record = preview.record
        return operator_pb2.PreviewPlanResponse(
            plan=await asyncio.to_thread(plan_to_message, "", record.plan, record.nodes),
            run_id=run_id,
            round=record.number,
            epochs=record.epochs,
            all_devices=request.all_devices or not run_id,
            not_looked_at=[
                operator_pb2.NotLookedAt(device_id=device_id, reason=reason)
                for device_id, reason in sorted(preview.not_considered.items())
            ],
            assumed_ended=preview.assumed_ended,
        )

    async def GetBudgets(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.GetBudgetsRequest, context: Any
    ) -> operator_pb2.GetBudgetsResponse:
        """Report the status of every supply's budget."""
        names = self._fleet.operator.allowance.supplies.names
        reserved_w = self._fleet.draw.reserved_w()
        await asyncio.sleep(0)  # sessions are answered between two passes over all devices
        measured = self._fleet.measured_draw()
        return operator_pb2.GetBudgetsResponse(
            supplies=[
                self._budget(name, self._budgets.status(name), reserved_w[name], measured[name]) for name in names
            ]
        )

    async def SetBudget(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.SetBudgetRequest, context: Any
    ) -> operator_pb2.SetBudgetResponse:
        """Override the watts of a supply's configured source, or set its energy budget."""
        if request.energy_j:
            if request.watts or request.HasField("for_s"):
                raise InvalidInputError("an energy budget has a period, and neither watts nor an end: set either")
            energy = PeriodBudget(request.energy_j, _period(request.per), request.timezone or "UTC")
            return operator_pb2.SetBudgetResponse(budget=await self._set_energy(request.supply, energy))
        if request.per or request.timezone:
            raise InvalidInputError("only an energy budget has a period: write an energy, such as 5kWh")
        until = None
        if request.HasField("for_s"):
            if not 0 < request.for_s <= _MAX_OVERRIDE_DAYS * 86_400:
                raise InvalidInputError(
                    f"a budget can be overridden for up to {_MAX_OVERRIDE_DAYS:g} days, or until it is cleared, not for"
                    f" {_days(request.for_s)}"
                )
            until = self._budgets.now + timedelta(seconds=request.for_s)
        budget, trimmed = await self._override(request.supply, Override(request.watts, until), context)
        return operator_pb2.SetBudgetResponse(budget=budget, trimmed_rounds=trimmed, told_devices=self._told_devices)

    async def ClearBudget(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ClearBudgetRequest, context: Any
    ) -> operator_pb2.ClearBudgetResponse:
        """Clear a supply's override, so that its configured source applies again; or remove its energy budget."""
        if request.energy:
            return operator_pb2.ClearBudgetResponse(budget=await self._set_energy(request.supply, None))
        budget, trimmed = await self._override(request.supply, None, context)
        return operator_pb2.ClearBudgetResponse(budget=budget, trimmed_rounds=trimmed, told_devices=self._told_devices)

    async def GetBatteries(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.GetBatteriesRequest, context: Any
    ) -> operator_pb2.GetBatteriesResponse:
        """Report the estimated energy of every battery, and what it leaves for trainings."""
        now = self._fleet.stores.now
        return operator_pb2.GetBatteriesResponse(
            batteries=[_battery(each, now) for each in self._fleet.battery_states()]
        )

    async def SetCharge(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.SetChargeRequest, context: Any
    ) -> operator_pb2.SetChargeResponse:
        """State the charge of a battery."""
        if request.name not in self._fleet.operator.allowance.supplies.names:
            self._fleet.agents.get(request.name)  # a pattern of devices would take a mistyped name
        record = self._fleet.stores.state_charge(request.name, request.share)
        await self._repository.save(record)
        [state] = [each for each in self._fleet.battery_states() if each.holder == record.holder]
        return operator_pb2.SetChargeResponse(battery=_battery(state, self._fleet.stores.now))

    async def TagDevices(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.TagDevicesRequest, context: Any
    ) -> operator_pb2.TagDevicesResponse:
        """Add tags to those of the site file, or remove added ones."""
        changed = self._fleet.operator.tag(request.device_ids, set(request.add), set(request.remove))
        await self._repository.save(*changed)
        return operator_pb2.TagDevicesResponse(devices=_overrides(changed))

    async def DrainDevices(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.DrainDevicesRequest, context: Any
    ) -> operator_pb2.DrainDevicesResponse:
        """Exclude devices from new rounds, or include them again."""
        if request.undo:
            changed = self._fleet.undrain(request.device_ids)
        else:
            changed = self._fleet.operator.drain(request.device_ids)
        await self._repository.save(*changed)
        return operator_pb2.DrainDevicesResponse(devices=_overrides(changed))

    async def ProfileWorkload(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ProfileWorkloadRequest, context: Any
    ) -> operator_pb2.ProfileWorkloadResponse:
        """Order devices to measure a workload ahead of its first run."""
        workload = workload_from_message(request.workload)
        if request.synthetic:
            require_name("a synthetic workload's name", request.synthetic)
        least, most = PROFILE_MODES
        if not least <= request.modes <= most:
            raise InvalidInputError(f"a device measures {least} to {most:,} modes, not {request.modes:,}")
        if not request.devices:
            raise InvalidInputError("name the devices: id:NAME, tag:NAME or site:NAME")
        order = session_pb2.ProfileOrder(
            workload=workload_to_message(workload), synthetic=request.synthetic, modes=request.modes
        )
        told, not_told = [], []
        for device_id in self._fleet.operator.matching(Selection(include=tuple(request.devices))):
            device = self._fleet.agents.get(device_id)
            if not self._fleet.agents.is_connected(device_id) or device.state is DeviceState.DEGRADED:
                # The agent of a degraded device would drop the order.
                reason = f"it is {device.state.value}: repeat the command when it is ready"
            else:
                try:
                    self._orders.order_profile(device_id, order)
                except QuotaExceededError as error:
                    reason = str(error)
                else:
                    told.append(device_id)
                    continue
            not_told.append(operator_pb2.NotLookedAt(device_id=device_id, reason=reason))
        if not told and not not_told:
            raise UnknownRecordError(f"no device matches {', '.join(request.devices)}")
        return operator_pb2.ProfileWorkloadResponse(device_ids=told, not_told=not_told)

    async def ForgetDevices(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ForgetDevicesRequest, context: Any
    ) -> operator_pb2.ForgetDevicesResponse:
        """Remove disconnected devices."""
        forgotten = self._fleet.forget(request.device_ids)
        device_ids = [each.device_id for each in forgotten]
        self._leases.forget(device_ids)
        self._events.forgotten(device_ids, name_of_caller(context, certificate_of))
        await self._repository.save(*forgotten, *self._revoke(device_ids))
        return operator_pb2.ForgetDevicesResponse(device_ids=device_ids)

    async def DeleteRuns(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.DeleteRunsRequest, context: Any
    ) -> AsyncIterator[operator_pb2.DeleteRunsResponse]:
        """Delete finished runs, or end and delete them: all of them, or none on an error before the first change."""
        run_ids = list(dict.fromkeys(request.run_ids))
        await self._planning.require_deletable(run_ids, request.end)
        caller = name_of_caller(context, certificate_of)
        deleted: asyncio.Queue[str | None] = asyncio.Queue()
        # It continues if the caller leaves.
        work = background_task(
            "delete runs", self._planning.delete_runs(run_ids, request.end, deleted.put_nowait, caller)
        )
        self._deleting.add(work)
        work.add_done_callback(self._deleting.discard)
        work.add_done_callback(lambda _: deleted.put_nowait(None))
        while (run_id := await deleted.get()) is not None:
            yield operator_pb2.DeleteRunsResponse(run_id=run_id)
        await work

    async def close(self) -> None:
        """Stop deleting runs, because the coordinator stops."""
        await stop_tasks(*self._deleting)

    async def ListReferences(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ListReferencesRequest, context: Any
    ) -> operator_pb2.ListReferencesResponse:
        """List the references that agents can fetch."""
        # A device counts once for each reference that any of its fronts derives from.
        used = [
            digest
            for device in self._fleet.agents.devices.values()
            for digest in {each.reference_digest for each in device.fronts}
        ]
        return operator_pb2.ListReferencesResponse(
            references=[
                operator_pb2.ReferenceView(
                    digest=digest,
                    workload=artefact.details.workload.name,
                    board=artefact.details.board,
                    predictor=artefact.details.predictor,
                    size_bytes=len(artefact.manifest) + len(artefact.weights),
                    pinned=digest in self._references.pinned,
                    from_start=digest == self._references.from_start,
                    in_force=digest in self._references.in_force,
                    device_count=used.count(digest),
                )
                for digest, artefact in self._references.artefacts.items()
            ]
        )

    async def PublishReference(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[operator_pb2.PublishReferenceRequest], context: Any
    ) -> operator_pb2.PublishReferenceResponse:
        """Publish a reference."""
        with self._uploads.admitted(context.peer()):
            manifest, weights = await self._uploads.receive(request_iterator)
            artefact = await asyncio.to_thread(Artefact, manifest, weights)
            self._references.require_room(artefact.digest)
            if artefact.digest not in self._references.artefacts:
                await asyncio.to_thread(check_published, artefact)
        stored = self._references.publish(artefact)
        await self._repository.save(*stored)
        self._references.stored(stored)
        return operator_pb2.PublishReferenceResponse(digest=artefact.digest, known=not stored)

    async def RemoveReference(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.RemoveReferenceRequest, context: Any
    ) -> operator_pb2.RemoveReferenceResponse:
        """Remove a published reference that is not in use."""
        removed = self._references.remove(request.digest)
        await self._repository.save(removed)
        return operator_pb2.RemoveReferenceResponse(digest=removed.digest)

    async def PinReference(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.PinReferenceRequest, context: Any
    ) -> operator_pb2.PinReferenceResponse:
        """Pin the references that agents transfer from."""
        if request.further_digests and not request.digest:
            raise InvalidInputError("the first digest is empty, but others are given: give all digests, or none")
        before = self._references.in_force
        changed = self._references.pin([request.digest, *request.further_digests] if request.digest else [])
        now, ended = self._references.in_force, 0
        if now != before:
            pinned = ", ".join(digest[:12] for digest in now)
            ended = self._reconnect_all(f"reference predictor {pinned} was pinned: reconnect to fetch it")
        await self._repository.save(*changed)
        self._references.stored(changed)
        return operator_pb2.PinReferenceResponse(digest=now[0], ended_sessions=ended, further_digests=now[1:])

    async def GetMetadata(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.GetMetadataRequest, context: Any
    ) -> operator_pb2.GetMetadataResponse:
        """Report which signed metadata of references is served."""
        metadata = self._metadata
        root, targets = metadata.root, metadata.targets
        return operator_pb2.GetMetadataResponse(
            online_key=metadata.online_key,
            root_version=0 if root is None else root.version,
            targets_version=0 if targets is None else targets.version,
            root_expires_unix_s=0.0 if root is None else root.expires.timestamp(),
            targets_expires_unix_s=0.0 if targets is None else targets.expires.timestamp(),
            digests=metadata.digests,
        )

    async def PublishMetadata(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.PublishMetadataRequest, context: Any
    ) -> operator_pb2.PublishMetadataResponse:
        """Accept signed metadata from the operator, and serve it."""
        metadata = self._metadata
        await asyncio.to_thread(metadata.publish, request.roots, request.targets)
        root, targets = metadata.root, metadata.targets
        return operator_pb2.PublishMetadataResponse(
            root_version=0 if root is None else root.version,
            targets_version=0 if targets is None else targets.version,
        )

    @property
    def _metadata(self) -> ReferenceMetadata:
        if self._signed is None:
            raise InvalidInputError(
                "this coordinator serves no signed references: start it with --reference-metadata DIRECTORY"
            )
        return self._signed

    async def _override(
        self, supply: str, override: Override | None, context: Any
    ) -> tuple[operator_pb2.SupplyBudget, int]:
        """Put an override in force; return the budget's status, and how many rounds in flight were trimmed."""
        rounds = self._fleet.rounds
        unfinished = [record for record in rounds.records.values() if record.wall_s is None]
        status = self._budgets.override(supply, override, name_of_caller(context, certificate_of))
        trimmed = sum(rounds.records[record.plan_id] is not record for record in unfinished)
        await self._repository.save(SupplyOverride(supply, override))
        reserved_w, measured = self._fleet.draw.reserved_w(), self._fleet.measured_draw()
        return self._budget(supply, status, reserved_w[supply], measured[supply]), trimmed

    async def _set_energy(self, supply: str, budget: PeriodBudget | None) -> operator_pb2.SupplyBudget:
        """Set or remove a supply's energy budget; return the status of its budgets."""
        self._fleet.stores.set_budget(supply, budget)
        await self._repository.save(SupplyEnergyBudget(supply, budget))
        reserved_w, measured = self._fleet.draw.reserved_w(), self._fleet.measured_draw()
        return self._budget(supply, self._budgets.status(supply), reserved_w[supply], measured[supply])

    @property
    def _told_devices(self) -> int:
        return self._fleet.rounds.grants.lowered_count

    def _budget(
        self, supply: str, status: BudgetStatus, reserved_w: float, measured: MeasuredDraw
    ) -> operator_pb2.SupplyBudget:
        in_force, override = status.in_force, status.override
        until = None if override is None else override.until
        stores = self._fleet.stores
        energy, account = stores.budgets.get(supply), stores.account(supply)
        return operator_pb2.SupplyBudget(
            energy_budget_j=None if energy is None else energy.budget_j,
            energy_per="" if energy is None else energy.per.value,
            energy_timezone="" if energy is None else energy.timezone,
            energy_until_unix_s=None if energy is None else energy.end(stores.now).timestamp(),
            energy_spent_j=None if account is None else account.spent_j,
            energy_set_aside_j=None if account is None else account.set_aside_j,
            supply=supply,
            parent=self._fleet.operator.allowance.supplies.parent_of(supply),
            watts=in_force.watts,
            source=in_force.source,
            fallback=in_force.fallback,
            reason=in_force.reason,
            since_unix_s=status.since.timestamp(),
            until_unix_s=None if until is None else until.timestamp(),
            set_aside_w=reserved_w,
            drawn_w=measured.drawn_w,
            devices=measured.devices,
            measured_devices=measured.measured,
        )


def _period(text: str) -> Period:
    try:
        return Period(text)
    except ValueError:
        raise InvalidInputError(
            f"an energy budget is per {', '.join(each.value for each in Period)}, not {text[:20]!r}"
        ) from None


def _battery(state: BatteryState, now: datetime) -> operator_pb2.Battery:
    level, charge, battery = state.level, state.charge, state.placed.battery
    return operator_pb2.Battery(
        name=state.holder.partition("/")[2],
        of_device=not state.placed.supply,
        capacity_j=battery.capacity_j,
        reserve_j=battery.reserve_j,
        energy_j=level.energy_j,
        spare_j=state.left_j,
        source=state.placed.source,
        measured_share=None if charge is None else charge.share,
        measured_unix_s=None if charge is None else charge.measured_at.timestamp(),
        problem=state.problem,
        harvest_w=(level.harvest or battery.harvest).watts(now),
        idle_w=level.idle_w,
    )


def _days(seconds: float) -> str:
    return f"{seconds / 86_400:,.4g} days"


def _overrides(overrides: Sequence[DeviceOverrides]) -> list[operator_pb2.DeviceOverrides]:
    return [
        operator_pb2.DeviceOverrides(device_id=each.device_id, tags=sorted(each.tags), drained=each.drained)
        for each in overrides
    ]


def _what_if(request: operator_pb2.PreviewPlanRequest) -> WhatIf:
    """The assumptions of a preview."""
    clients = request.clients if request.HasField("clients") else None
    deadline_s = request.deadline_s if request.HasField("deadline_s") else None
    if not request.policy and (clients is not None or deadline_s is not None):
        raise InvalidInputError("a number of devices or a deadline is an option of a policy: name the policy as well")
    return WhatIf(
        dict(request.budgets_w),
        policy_named(request.policy, count=clients, deadline_s=deadline_s) if request.policy else None,
    )
