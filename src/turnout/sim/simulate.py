"""Many worlds, one after another on every core, and what they came to.

Promises: a seed gives the same world alone and among others; the report's keys are fixed (docs/guides/simulate.md);
a world that gives no report within WORLD_S of real time, or whose process died, is named and ends the rest.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import islice
from multiprocessing.pool import IMapIterator
from typing import Any

from turnout.core.errors import DeadlineExceeded
from turnout.sim.faults import KINDS
from turnout.sim.folders import folder_of_worlds
from turnout.sim.report import COUNTS, SeedReport, WorldOptions

SHOWN = 20  # failing seeds in a report
TEXTS = 5  # failures of one of them
WORLD_S = 300.0  # a world takes about a second
WORLD, SABOTAGE = (
    "turnout.sim.world",
    "turnout.sim.sabotage",
)  # imported by those who run worlds: it takes a second


@dataclass(frozen=True)
class Simulation:
    """Seeds `first` to `first + count`. `until_failure` ends it with the first seed that fails."""

    count: int
    options: WorldOptions
    first: int = 0
    sabotage: str | None = None
    until_failure: bool = False
    processes: int | None = None


@dataclass
class Totals:
    """Sums over seeds."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    schedules: Counter[str] = field(default_factory=Counter)
    virtual_seconds: float = 0.0
    failing: list[SeedReport] = field(default_factory=list[SeedReport])

    def add(self, report: SeedReport) -> None:
        self.seeds += 1
        self.counts.update(report.counts)
        self.faults.update(report.faults)
        self.happened.update(report.happened)
        self.schedules[report.schedule] += 1
        self.virtual_seconds += report.virtual_seconds
        if report.failures:
            self.failing.append(report)

    @property
    def ok(self) -> bool:
        return not self.failing

    def to_json(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            **{name: self.counts[name] for name in COUNTS},
            "versions_committed": self.happened["versions_committed"],
            "faults_injected": {kind: self.faults[kind] for kind in KINDS if kind in kinds},
            "virtual_seconds": round(self.virtual_seconds, 1),
            "failing_seeds": {str(r.seed): r.failures[:TEXTS] for r in self.failing[:SHOWN]},
            "schedules": dict(sorted(self.schedules.items())),
            "happened": dict(sorted(self.happened.items())),
        }


def simulate(simulation: Simulation) -> Iterator[SeedReport]:
    """The worlds' reports, in the order of their seeds."""
    with folder_of_worlds() as folder:
        yield from _simulated(replace(simulation, options=replace(simulation.options, folder=folder)))


def _simulated(simulation: Simulation) -> Iterator[SeedReport]:
    seeds = range(simulation.first, simulation.first + simulation.count)
    wanted = simulation.processes if simulation.processes is not None else len(os.sched_getaffinity(0))
    processes = min(wanted, simulation.count)
    if processes <= 1:
        name = simulation.sabotage
        with nullcontext() if name is None else import_module(SABOTAGE).sabotaged(name):
            yield from _until(simulation, (_one((seed, simulation.options)) for seed in seeds))
        return
    # processes forked from this one would inherit the locks that its threads hold, and could wait for them for ever
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WORLD])
    with context.Pool(processes, _begin, (simulation.sabotage,)) as pool:
        reports = pool.imap(_one, ((seed, simulation.options) for seed in seeds))
        yield from _until(simulation, (_within(reports, seed) for seed in seeds))


def totals(simulation: Simulation) -> Totals:
    """All of them."""
    found = Totals()
    for report in simulate(simulation):
        found.add(report)
    return found


def _until(simulation: Simulation, reports: Iterator[SeedReport]) -> Iterator[SeedReport]:
    for report in islice(reports, simulation.count):
        yield report
        if report.failures and simulation.until_failure:
            return


def _within(reports: IMapIterator[SeedReport], seed: int) -> SeedReport:
    """The next report, of this seed. A pool starts a process anew that died, but never tells what it worked on."""
    try:
        return reports.next(timeout=WORLD_S)
    except multiprocessing.TimeoutError:
        raise DeadlineExceeded(f"the world of seed {seed} (`--seed {seed}` runs it alone)", WORLD_S) from None


def _begin(sabotage: str | None) -> None:
    """In each process, for as long as it lives."""
    if sabotage is not None:
        import_module(SABOTAGE).switch_off(sabotage)


def _one(job: tuple[int, WorldOptions]) -> SeedReport:
    return import_module(WORLD).run_seed(*job)
