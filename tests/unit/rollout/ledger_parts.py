"""What ledger tests share: groups with tokens that differ, ledgers in files, what a file holds."""

from __future__ import annotations

import shutil
from pathlib import Path

from turnout.core.types import Finish, Prompt, RolloutGroup, Trajectory
from turnout.core.version import Runs, VersionSpans
from turnout.placement.real import RealClock
from turnout.rollout.ledger import Ledger
from turnout.rollout.ledger_owner import Claim
from turnout.rollout.ledger_rows import group_id_of
from turnout.rollout.ledger_schema import open_database

LABELS = ("v000001-00000000000000aa", "v000002-00000000000000bb")


def fresh(ordinal: int, attempt: int = 0) -> RolloutGroup:
    """A group without tokens."""
    return RolloutGroup(group_id_of(ordinal, attempt), ordinal, attempt, prompt(ordinal))


def prompt(ordinal: int) -> Prompt:
    return Prompt(f"p{ordinal}", (ordinal,), f"text {ordinal}")


def part(seed: int, start: int, tokens: int, finish: Finish = Finish.ABORT) -> Trajectory:
    """Tokens `start` and on of the response with this seed: each number tells both. Every second token is masked,
    versions and engines change after each third one."""
    spans, engines = VersionSpans(), Runs()
    places = range(start, start + tokens)
    for place in places:
        spans = spans.extended(1, LABELS[place // 3 % 2])
        engines = engines.extended(1, f"engine-{place // 3 % 2}")
    return Trajectory(
        tuple(1000 * seed + place for place in places),
        tuple(-(place + 1) / 3 - seed for place in places),
        tuple(place % 2 for place in places),
        spans,
        finish,
        "" if finish is Finish.ABORT else f"answer {seed}",
        engines,
        seed,
        None if finish is Finish.ABORT else seed / 7,
        tuple(int(place % 5 == 4) for place in places),
    )


def whole(ordinal: int, members: int = 2, tokens: int = 4, attempt: int = 0) -> RolloutGroup:
    """A complete group; the seed of member m is 10 * ordinal + m."""
    made = tuple(part(10 * ordinal + m, 0, tokens + m, Finish.STOP) for m in range(members))
    return RolloutGroup(group_id_of(ordinal, attempt), ordinal, attempt, prompt(ordinal), made)


def claim(pid: int = 1, host: str = "here", incarnation: int | None = None, lives: bool = False) -> Claim:
    return Claim(RealClock(), host, pid, incarnation, lambda pid: lives)


def file_ledger(folder: Path, **how: object) -> Ledger:
    return Ledger(open_database(folder / "ledger.sqlite"), claim(**how))  # type: ignore[arg-type]


def as_killed(folder: Path, target: Path) -> Path:
    """What a kill at this moment leaves: a copy of the files, with nothing closed."""
    target.mkdir(parents=True)
    for path in folder.glob("ledger.sqlite*"):
        shutil.copy(path, target / path.name)
    return target
