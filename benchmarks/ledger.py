"""How many group transitions a second the ledger takes, and whether that stays so: `python -m benchmarks.ledger`.

One group is admitted, started, completed with its trajectories, taken and trained: five transitions, through
GroupBook, into a file. Groups are admitted, taken and trained by the batch and completed one by one, as a run does
it; after a checkpoint every 10 steps tokens are forgotten. Events go nowhere. `longest_ms` is the longest that one
call kept its caller; `last_over_second` compares windows by processor time, the first of which has little to forget
yet; times are of the processor and of the wall, since other work may share the machine. `journal`:
10,000 members in flight, each of which has made 32 more tokens, 1024 pieces a call.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from turnout.core.events import GroupTrained
from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.placement.real import RealClock
from turnout.rollout.book import GroupBook
from turnout.rollout.journal import PENDING_MAX
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_rows import Piece, group_id_of
from turnout.rollout.ledger_schema import open_database

TRANSITIONS = 5
BATCH, MEMBERS, TOKENS, SAVE_EVERY = 128, 8, 100, 10
IN_FLIGHT, PIECE, ROUNDS = 10_000, 32, 4
PROMPT = Prompt("p", (1, 2, 3), "")


class Nowhere:
    def emit(self, event: Any) -> None:
        pass


class Bench:
    """A run without engines and trainer. `longest` is of single calls, in seconds."""

    def __init__(self, path: Path) -> None:
        self.ledger = Ledger(open_database(path), Claim.of_this_process(RealClock()))
        self.book, self.longest, self.step = GroupBook(Nowhere(), self.ledger), 0.0, 0
        self.members = tuple(_trajectory(seed) for seed in range(MEMBERS))

    def call(self, work: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        work(*arguments)
        self.longest = max(self.longest, time.perf_counter() - began)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            first = self.step * BATCH
            groups = [RolloutGroup(group_id_of(n, 0), n, 0, PROMPT) for n in range(first, first + BATCH)]
            self.call(self.admit, groups)
            done = [replace(group, trajectories=self.members) for group in groups]
            for group in done:
                self.call(self.book.complete, group)
            self.call(self.book.take, self.step, done)
            self.call(self._train, done)
            self.step += 1
            if self.step % SAVE_EVERY == 0:
                self.call(self.ledger.put_checkpoint, self.step, "v000001-0123456789abcdef")

    def admit(self, groups: list[RolloutGroup]) -> None:
        with self.book.transaction():
            for group in groups:
                self.book.admit(group, self.step)
                self.book.start(group.group_id)

    def _train(self, groups: list[RolloutGroup]) -> None:
        self.book.train([GroupTrained(group.group_id, self.step, ["v000000-0"], 0) for group in groups])


def _trajectory(seed: int) -> Trajectory:
    source = random.Random(seed)
    count = round(TOKENS * source.uniform(0.5, 1.5))
    return Trajectory(
        tuple(source.randrange(50_000) for _ in range(count)),
        tuple(-source.expovariate(1.0) for _ in range(count)),
        (1,) * count,
        VersionSpans().extended(count, "v000001-0123456789abcdef"),
        Finish.STOP,
        "word " * count,
        Runs().extended(count, "engine-0"),
        source.getrandbits(62),
        source.random(),
    )


def measure(groups: int, windows: int, folder: Path) -> list[dict[str, float]]:
    """One row per window of groups, the same ledger throughout."""
    path = folder / "ledger.sqlite"
    bench, rows = Bench(path), list[dict[str, float]]()
    steps = max(1, groups // windows // BATCH)
    for _ in range(windows):
        bench.longest = 0.0
        wall, cpu = time.perf_counter(), time.process_time()
        bench.run(steps)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        moved = steps * BATCH * TRANSITIONS
        rows.append(
            {
                "groups": bench.step * BATCH,
                "transitions_per_second": round(moved / wall),
                "transitions_per_cpu_second": round(moved / cpu),
                "longest_ms": round(1000 * bench.longest, 1),
                "file_mb": round(path.stat().st_size / 1e6, 1),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    bench.ledger.close()
    return rows


def measure_journal(folder: Path) -> dict[str, float]:
    """All members of IN_FLIGHT / MEMBERS groups get PIECE tokens, ROUNDS times."""
    bench = Bench(folder / "journal.sqlite")
    groups = [RolloutGroup(group_id_of(n, 0), n, 0, PROMPT) for n in range(IN_FLIGHT // MEMBERS)]
    bench.admit(groups)
    parts = [trajectory.cut(PIECE) for trajectory in bench.members]
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, ROUNDS * PIECE, PIECE):
        new = [Piece(g.group_id, m, start, part) for g in groups for m, part in enumerate(parts)]
        for first in range(0, len(new), PENDING_MAX):
            bench.call(bench.ledger.journal, new[first : first + PENDING_MAX])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    bench.ledger.close()
    made = ROUNDS * IN_FLIGHT
    return {
        "pieces_per_second": round(made / wall),
        "pieces_per_cpu_second": round(made / cpu),
        "longest_ms": round(1000 * bench.longest, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="turnout-ledger-") as folder:
        rows = measure(arguments.groups, arguments.windows, Path(folder))
        journal = measure_journal(Path(folder))
    result = {
        "machine": describe(),
        "setup": {"members": MEMBERS, "tokens": TOKENS, "batch": BATCH, "checkpoint_every": SAVE_EVERY},
        "least_transitions_per_second": min(row["transitions_per_second"] for row in rows),
        "last_over_second": round(
            rows[-1]["transitions_per_cpu_second"]
            / rows[min(1, len(rows) - 1)]["transitions_per_cpu_second"],
            3,
        ),
        "least_transitions_per_cpu_second": min(row["transitions_per_cpu_second"] for row in rows),
        "windows": rows,
        "journal": journal,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
