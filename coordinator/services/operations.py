"""The operator's side of the coordinator: budgets, tags, drained devices, references, and a look at the next plan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

from coordinator.budgets.budget_watch import BudgetWatch, Standing
from coordinator.references import MAX_BYTES, ReferenceShelf, checked
from coordinator.settings import SiteSettings
from coordinator.state.fleet import Fleet
from coordinator.state.preview import Trial
from coordinator.state.records import DeviceOverrides, SupplyOverride
from coordinator.store.archive import recalled_history, recalled_newest
from coordinator.store.writer import Writer
from wattfleet.budgets import Override
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import plan_to_message
from wattfleet_proto.v1 import operator_pb2, operator_pb2_grpc


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """The operator's side."""

    def __init__(
        self,
        fleet: Fleet,
        writer: Writer,
        budgets: BudgetWatch,
        references: ReferenceShelf,
        have_all_back: Callable[[str], int],
        clear_way: Callable[[Fleet, Sequence[int]], None],
        settings: SiteSettings = SiteSettings(),
    ) -> None:
        """Serve one fleet.

        Args:
            fleet: what is known.
            writer: keeps what changed.
            budgets: the watts in force.
            references: the predictors that are handed out.
            have_all_back: ends all sessions, saying why, so that their agents come back; returns how many.
            clear_way: what comes before every new plan (see `PlanningServicer.clear_way`).
            settings: for how long watts may be overridden.
        """
        self._fleet = fleet
        self._writer = writer
        self._budgets = budgets
        self._references = references
        self._have_all_back = have_all_back
        self._clear_way = clear_way
        self._settings = settings

    async def PreviewPlan(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.PreviewPlanRequest, context: Any
    ) -> operator_pb2.PreviewPlanResponse:
        """What the next round would be."""
        newest = next(reversed(self._fleet.runs.values()), None)
        run_id = request.run_id or ("" if newest is None or newest.finished else newest.run_id)
        if run_id:
            await recalled_history(self._fleet, self._writer, run_id)
            await recalled_newest(self._fleet, self._writer, run_id)
        trial = Trial(self._fleet, run_id, request.all_devices)
        self._clear_way(trial.fleet, trial.node_ids)
        # As with a plan that counts, agents are answered meanwhile.
        looked = await asyncio.to_thread(trial.planned, request.epochs)
        record = looked.record
        return operator_pb2.PreviewPlanResponse(
            plan=await asyncio.to_thread(plan_to_message, "", record.plan, record.nodes),
            run_id=run_id,
            round=record.number,
            epochs=record.epochs,
            all_devices=request.all_devices or not run_id,
            not_looked_at=[
                operator_pb2.NotLookedAt(device_id=device_id, reason=reason)
                for device_id, reason in sorted(looked.not_looked_at.items())
            ],
        )

    async def GetBudgets(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.GetBudgetsRequest, context: Any
    ) -> operator_pb2.GetBudgetsResponse:
        """How every supply's budget stands."""
        names = self._fleet.allowance.supplies.names
        set_aside_w = self._fleet.set_aside_w()
        return operator_pb2.GetBudgetsResponse(
            supplies=[self._budget(name, self._budgets.standing(name), set_aside_w[name]) for name in names]
        )

    async def SetBudget(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.SetBudgetRequest, context: Any
    ) -> operator_pb2.SetBudgetResponse:
        """Watts in place of a source's."""
        until = None
        if request.HasField("for_s"):
            most = self._settings.max_override_days
            if not 0 < request.for_s <= most * 86_400:
                raise InvalidInputError(
                    f"a budget can be overridden for up to {most:g} days, or until it is cleared, not for"
                    f" {_days(request.for_s)}"
                )
            until = self._budgets.now + timedelta(seconds=request.for_s)
        budget, trimmed = await self._override(request.supply, Override(request.watts, until))
        return operator_pb2.SetBudgetResponse(budget=budget, trimmed_rounds=trimmed)

    async def ClearBudget(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ClearBudgetRequest, context: Any
    ) -> operator_pb2.ClearBudgetResponse:
        """The source's watts again."""
        budget, trimmed = await self._override(request.supply, None)
        return operator_pb2.ClearBudgetResponse(budget=budget, trimmed_rounds=trimmed)

    async def TagDevices(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.TagDevicesRequest, context: Any
    ) -> operator_pb2.TagDevicesResponse:
        """Tags beside those of the site file."""
        says = self._fleet.tag(request.device_ids, set(request.add), set(request.remove))
        await self._writer.saved(*says)
        return operator_pb2.TagDevicesResponse(devices=_says(says))

    async def DrainDevices(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.DrainDevicesRequest, context: Any
    ) -> operator_pb2.DrainDevicesResponse:
        """Devices that are chosen for no new round, or are again."""
        says = self._fleet.drain(request.device_ids, not request.undo)
        await self._writer.saved(*says)
        return operator_pb2.DrainDevicesResponse(devices=_says(says))

    async def ListReferences(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.ListReferencesRequest, context: Any
    ) -> operator_pb2.ListReferencesResponse:
        """What is handed out."""
        on = [device.reference_digest for device in self._fleet.devices.values() if device.front is not None]
        return operator_pb2.ListReferencesResponse(
            references=[
                operator_pb2.ReferenceView(
                    digest=digest,
                    workload=artefact.details.workload.name,
                    board=artefact.details.board,
                    predictor=artefact.details.predictor,
                    size_bytes=len(artefact.manifest) + len(artefact.weights),
                    pinned=digest == self._references.pinned,
                    from_start=digest == self._references.from_start,
                    in_force=digest == self._references.digest,
                    device_count=on.count(digest),
                )
                for digest, artefact in self._references.artefacts.items()
            ]
        )

    async def PublishReference(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[operator_pb2.PublishReferenceRequest], context: Any
    ) -> operator_pb2.PublishReferenceResponse:
        """One reference more."""
        manifest, weights = b"", bytearray()
        async for part in request_iterator:
            manifest = manifest or part.manifest
            weights += part.weights_chunk
            if len(weights) > MAX_BYTES:
                raise InvalidInputError(f"the weights of a reference have {MAX_BYTES // 2**20} MiB at most")
        artefact = await asyncio.to_thread(checked, manifest, bytes(weights))
        stored = self._references.publish(artefact)
        await self._writer.saved(*stored)
        self._references.stored(stored)
        return operator_pb2.PublishReferenceResponse(digest=artefact.digest, known=not stored)

    async def PinReference(  # noqa: N802 - named by the protocol
        self, request: operator_pb2.PinReferenceRequest, context: Any
    ) -> operator_pb2.PinReferenceResponse:
        """What agents transfer from."""
        before = self._references.digest
        changed = self._references.pin(request.digest)
        now, ended = self._references.digest, 0
        if now != before:
            ended = self._have_all_back(f"another reference predictor counts from now on, {now[:12]}: come back for it")
        await self._writer.saved(*changed)
        self._references.stored(changed)
        return operator_pb2.PinReferenceResponse(digest=now, ended_sessions=ended)

    async def _override(self, supply: str, override: Override | None) -> tuple[operator_pb2.SupplyBudget, int]:
        """Put watts in force; how the budget stands then, and how many rounds in flight had to be trimmed."""
        flying = [record for record in self._fleet.rounds.values() if record.wall_s is None]
        standing = self._budgets.override(supply, override)
        trimmed = sum(self._fleet.rounds[record.plan_id] is not record for record in flying)
        await self._writer.saved(SupplyOverride(supply, override))
        return self._budget(supply, standing, self._fleet.set_aside_w()[supply]), trimmed

    def _budget(self, supply: str, standing: Standing, set_aside_w: float) -> operator_pb2.SupplyBudget:
        in_force, override = standing.in_force, standing.override
        until = None if override is None else override.until
        return operator_pb2.SupplyBudget(
            supply=supply,
            parent=self._fleet.allowance.supplies.parent_of(supply) or "",
            watts=in_force.watts,
            source=in_force.source,
            fallback=in_force.fallback,
            reason=in_force.reason,
            since_unix_s=standing.since.timestamp(),
            until_unix_s=None if until is None else until.timestamp(),
            set_aside_w=set_aside_w,
        )


def _days(seconds: float) -> str:
    return f"{seconds / 86_400:,.4g} days"


def _says(says: Sequence[DeviceOverrides]) -> list[operator_pb2.DeviceOverrides]:
    return [operator_pb2.DeviceOverrides(device_id=s.device_id, tags=sorted(s.tags), drained=s.drained) for s in says]
