"""The soak of the simulator: thousands of worlds with all faults, and every sabotage until a world notices it.

`python -m benchmarks.simulate --seeds 10000 --json FILE`; exit status 1 where a promise was broken, a kind of fault
never hit, or a sabotage went unnoticed.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from turnout.sim.faults import KINDS
from turnout.sim.report import WorldOptions
from turnout.sim.sabotage import SABOTAGES
from turnout.sim.simulate import Simulation, Totals, simulate

NOTICED_WITHIN = 200
KEPT_EVERY = 500


def noticed(name: str, first: int) -> dict[str, object] | None:
    """After how many seeds a world notices, and how; None where none does."""
    hunt = Simulation(NOTICED_WITHIN, WorldOptions(), first, name, until_failure=True)
    for count, report in enumerate(simulate(hunt), start=1):
        if report.failures:
            return {"seeds": count, "shown_by": report.failures[0][:200]}
    return None


def write(path: Path, row: dict[str, object]) -> None:
    path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    began, found = time.monotonic(), Totals()
    for report in simulate(Simulation(asked.seeds, WorldOptions(), asked.first_seed)):
        found.add(report)
        if found.seeds % KEPT_EVERY == 0:  # what is there when somebody ends it says how many worlds it is of
            write(asked.json, found.to_json(tuple(KINDS)))
    seconds = time.monotonic() - began
    row = found.to_json(tuple(KINDS)) | {"seconds": round(seconds, 1)}
    row["sabotages"] = {name: noticed(name, asked.first_seed) for name in SABOTAGES}
    write(asked.json, row)
    unnoticed = [name for name, how in row["sabotages"].items() if how is None]
    never = [kind for kind in KINDS if not found.faults[kind]]
    print(
        f"{asked.seeds} worlds in {seconds:.0f} s, {len(found.failing)} with a broken promise: {asked.json}"
    )
    print(f"sabotages unnoticed: {unnoticed or 'none'}; faults that never hit: {never or 'none'}")
    return int(bool(found.failing or unnoticed or never))


if __name__ == "__main__":
    raise SystemExit(main())
