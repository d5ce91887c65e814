"""`turnout simulate`: the control plane in virtual worlds with seeded faults (docs/guides/simulate.md)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from turnout.cli.options import Parser

FAILED = 1
PROGRESS_S = 2.0


def command(argv: list[str]) -> int:
    """Runs worlds; 0 where every promise was kept in all of them, 1 otherwise."""
    from turnout.core.errors import ConfigError, Fault
    from turnout.sim.faults import KINDS, parse_kinds
    from turnout.sim.report import SCHEDULE_NAMES, WorldOptions

    asked = _parser(tuple(SCHEDULE_NAMES), tuple(KINDS)).parse_args(argv)
    if asked.list_sabotage or asked.sabotage is not None:
        from turnout.sim.sabotage import SABOTAGES

        if asked.list_sabotage:
            print("\n".join(SABOTAGES))
            return 0
        if asked.sabotage not in SABOTAGES:
            remedy = "`turnout simulate --list-sabotage` names them"
            raise ConfigError(Fault("--sabotage", asked.sabotage, "there is no such sabotage", remedy))
    options = WorldOptions(parse_kinds(asked.faults), asked.schedule, asked.trace)
    return _replay(asked, options) if asked.seed is not None else _many(asked, options)


def _parser(schedules: tuple[str, ...], kinds: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="turnout simulate", description="Runs the control plane in virtual worlds with seeded faults."
    )
    add = parser.add_argument
    add("--seeds", type=int, default=20, metavar="N", help="how many worlds (default 20)")
    add("--first-seed", type=int, default=0, metavar="S", help="the first of them (default 0)")
    add("--seed", type=int, metavar="S", help="this world alone; shows what is wrong in it")
    add("--trace", action="store_true", help="with --seed: who did what, and when")
    add("--faults", default="all", help=f"all, none, or some of: {', '.join(kinds)}")
    add("--schedule", choices=schedules, help="only this schedule (default: drawn from the seed)")
    add("--json", type=Path, metavar="FILE", help="file for the report")
    add("--sabotage", metavar="NAME", help="switch one guard off; ends with the first world that notices")
    add("--list-sabotage", action="store_true", help="print the names of guards, one a line")
    add("--processes", type=int, metavar="N", help="worlds at a time (default: one per core)")
    return parser


def _replay(asked: argparse.Namespace, options: object) -> int:
    from turnout.sim.report import WorldOptions
    from turnout.sim.simulate import Simulation, Totals, simulate

    assert isinstance(options, WorldOptions)
    found = Totals()
    for report in simulate(Simulation(1, options, asked.seed, asked.sabotage, processes=1)):
        found.add(report)
        for line in report.trace:
            print(line)
        print(report.line())
        for text in report.failures:
            print(f"  {text}")
    return _end(asked, found, options)


def _many(asked: argparse.Namespace, options: object) -> int:
    from turnout.sim.report import WorldOptions
    from turnout.sim.simulate import Simulation, Totals, simulate

    assert isinstance(options, WorldOptions)
    hunt = asked.sabotage is not None
    plan = Simulation(asked.seeds, options, asked.first_seed, asked.sabotage, hunt, asked.processes)
    found, told = Totals(), time.monotonic()
    for report in simulate(plan):
        found.add(report)
        if report.failures:
            print(f"{report.line()}; replay: turnout simulate --seed {report.seed} --trace", flush=True)
            print(f"  {report.failures[0]}")
        if sys.stderr.isatty() and time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            print(f"{found.seeds} of {asked.seeds} worlds", file=sys.stderr)
    return _end(asked, found, options)


def _end(asked: argparse.Namespace, found: object, options: object) -> int:
    from turnout.sim.report import WorldOptions
    from turnout.sim.simulate import Totals

    assert isinstance(found, Totals) and isinstance(options, WorldOptions)
    row = found.to_json(options.kinds)
    if asked.json is not None:
        asked.json.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    shown = ", ".join(f"{name} {row[name]}" for name in ("lost", "doubled", "over_bound", "stuck"))
    print(
        f"{row['seeds']} worlds: {shown}, invariant failures {row['invariant_failures']}; "
        f"{row['versions_committed']} versions, {sum(row['faults_injected'].values())} faults, "
        f"{row['virtual_seconds'] / 3600:.1f} virtual hours"
    )
    return 0 if found.ok else FAILED
