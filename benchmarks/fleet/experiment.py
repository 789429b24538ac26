"""All phases of the benchmark for one fleet size, in sequence, each with a time limit."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet.background_load import BackgroundLoad
from benchmarks.fleet.identities import FleetIdentities
from benchmarks.fleet.load import Load, percentiles_ms
from benchmarks.fleet.servers import HOST, Server, bare, coordinator
from benchmarks.fleet.swarm import Swarm
from benchmarks.fleet.throughput import downloads, reports, sessions
from coordinator.state.leases import pace_of
from wattfleet.core.prediction import Artefact, write_artefact
from wattfleet.simulation.flower import Parts

SESSIONS_AT_ONCE = 32
"""The number of agents that begin a session, drop it and begin the next one, in a closed loop."""


@dataclass(frozen=True)
class Settings:
    """Duration and load of the phases.

    Attributes:
        rate_per_s: agents that connect per second during the ramp.
        steady_s: how long leases are measured, s.
        limit_s: maximum wait until all agents are connected, after the last one was started or cut off, s.
        streams: agents that report in a closed loop.
        downloads: concurrent downloads of the reference.
        window_s: how long each turn of reports or downloads is measured, s.
        repeats: number of turns of each server.
        workloads: number of fronts of each agent, and of runs that are planned in turn.
    """

    rate_per_s: float = 300.0
    steady_s: float = 20.0
    limit_s: float = 120.0
    streams: int = 300
    downloads: int = 4
    window_s: float = 2.0
    repeats: int = 5
    workloads: int = 1


async def run(
    count: int, settings: Settings, folder: Path, artefact: Artefact, with_tls: bool = False
) -> dict[str, Any]:
    """Run all phases with a fleet of one size, on a coordinator with an empty store and on a bare server.

    Args:
        count: number of agents.
        settings: duration and load of the phases.
        folder: an empty folder for stores and logs.
        artefact: the reference that is downloaded.
        with_tls: whether all connections use mutual TLS, with one certificate for each agent.
    """
    identities = FleetIdentities(count, folder / "identity", HOST) if with_tls else None
    reference = folder / "reference"
    write_artefact(artefact, reference)
    with Parts(folder / "logs") as parts:
        ours = coordinator(parts, folder, reference, identities)
        other = bare(parts, folder, len(artefact.weights), identities)
        await ours.start()
        swarm = Swarm(count, ours.connect, workloads=settings.workloads)
        try:
            found = await _live(swarm, ours, settings)
            found |= await _storm(swarm, ours, settings)
            found |= await _restart(swarm, ours, settings)
            found["peak_rss_mb"] = max(found["peak_rss_mb"], ours.peak_rss_mb())
            found["in_use"] = await _in_use(swarm, ours, settings, count)
        finally:
            swarm.leave()
        found["ended"] = dict(swarm.ended)
        await ours.quiet(settings.limit_s)
        await other.start()
        swarm = Swarm(count, other.connect, pace_of(count), settings.workloads)
        try:
            beside = await _live(swarm, other, settings)
            beside |= await _storm(swarm, other, settings)
            beside["peak_rss_mb"] = other.peak_rss_mb()
        finally:
            swarm.leave()
        await other.quiet(settings.limit_s)
        found["bare"] = beside
        turns = (settings.window_s, settings.repeats)
        found["sessions_per_s"] = await sessions(min(count, SESSIONS_AT_ONCE), *turns).run(ours, other)
        found["reports_per_s"] = await reports(min(count, settings.streams), *turns).run(ours, other)
        found["reference_bytes_per_s"] = await downloads(artefact.digest, settings.downloads, *turns).run(ours, other)
    return {"agents": count, "tls": with_tls, **found}


async def _live(swarm: Swarm, server: Server, settings: Settings) -> dict[str, Any]:
    """Let all agents connect and stay connected for a while."""
    ramp_s = await swarm.ramp(settings.rate_per_s, settings.limit_s)
    settled = swarm.settled
    # The garbage collector need not scan the load generator's permanent objects while it measures.
    gc.collect()
    gc.freeze()
    with Load(server) as load:
        swarm.reset_measurements()
        await asyncio.sleep(settings.steady_s)
        latencies_s = swarm.latencies_s
    gc.unfreeze()
    leases = len(latencies_s)
    return {
        "ramp_s": ramp_s,
        "ramp_settled": settled,
        "lease_ms": percentiles_ms(latencies_s),
        "leases_per_s": leases / settings.steady_s,
        "lease_cpu_us": 1e6 * load.server_s / leases if leases else None,
        "generator_lease_cpu_us": 1e6 * load.generator_s / leases if leases else None,
        "rss_mb": server.rss_mb(),
        "peak_rss_mb": server.peak_rss_mb(),
        "cores": load.server_cores,
        "generator_cores": load.generator_cores,
        "generator_late_ms": load.generator_late_ms,
    }


async def _in_use(swarm: Swarm, server: Server, settings: Settings, count: int) -> dict[str, Any]:
    """Plan rounds and scrape metrics while leases are renewed."""
    async with BackgroundLoad(server, count, settings.workloads) as background:
        swarm.reset_measurements()
        await asyncio.sleep(settings.steady_s)
        latencies_s = swarm.latencies_s
        await background.measured(settings.limit_s)
    return {"lease_ms": percentiles_ms(latencies_s), "peak_rss_mb": server.peak_rss_mb(), **background.figures}


async def _storm(swarm: Swarm, server: Server, settings: Settings) -> dict[str, Any]:
    """Cut all connections at once."""
    swarm.cut()
    with Load(server) as load:
        storm_s = await swarm.settle(settings.limit_s)
    return {"storm_s": storm_s, "storm_settled": swarm.settled, **_return_cpu("storm", swarm, load)}


async def _restart(swarm: Swarm, server: Server, settings: Settings) -> dict[str, Any]:
    """Kill the server, and start it again with its store."""
    peak_rss_mb = server.peak_rss_mb()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    swarm.reset_settled()
    server.kill()
    await server.start()
    down_s = loop.time() - begun_s
    with Load(server) as load:
        settled_s = await swarm.settle(settings.limit_s)
    return {
        "restart_s": None if settled_s is None else down_s + settled_s,
        "restart_down_s": down_s,
        "restart_settled": swarm.settled,
        "peak_rss_mb": peak_rss_mb,
        **_return_cpu("restart", swarm, load),
    }


def _return_cpu(phase: str, swarm: Swarm, load: Load) -> dict[str, float]:
    """Return the CPU time of the server and of this process for each agent that came back, ms."""
    back = max(1, swarm.settled)
    return {
        f"{phase}_cpu_ms": 1e3 * load.server_s / back,
        f"generator_{phase}_cpu_ms": 1e3 * load.generator_s / back,
    }
