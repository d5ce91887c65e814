"""`turnout inspect RUN_DIR [--group ID | --why-dropped | --step K | --check]`: what became of a run's groups.

Reads only, also beside a run that goes on; imports no torch. The ledger is RUN_DIR/ledger.sqlite, or a file that is
named itself, such as a checkpoint's copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from turnout.cli.find_run import find_run
from turnout.cli.options import Parser
from turnout.core.errors import ConfigError, Fault, InvariantBroken
from turnout.rollout.group_machine import GroupState
from turnout.rollout.ledger_check import problems
from turnout.rollout.ledger_read import LedgerReader
from turnout.rollout.ledger_rows import Batch, GroupRow, Move, VersionRow

LEDGER = "ledger.sqlite"
ENDS = (GroupState.DROPPED, GroupState.REQUEUED)


def command(argv: list[str]) -> int:
    """Prints what was asked for; raises ConfigError for a group or step that the ledger doesn't have."""
    arguments = _parser().parse_args(argv)
    path = Path(arguments.run)
    if not path.is_file():  # a checkpoint's folder has one as well
        path = (path if (path / LEDGER).exists() else find_run(arguments.run)) / LEDGER
    ledger = LedgerReader.of(path)
    try:
        if arguments.group is not None:
            lines = _group(ledger, arguments.group)
        elif arguments.step is not None:
            lines = _step(ledger, arguments.step)
        elif arguments.check:
            lines = _check(ledger)
        elif arguments.why_dropped:
            lines = _why(ledger)
        else:
            lines = _summary(ledger)
        for line in lines:
            print(line)
    finally:
        ledger.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turnout inspect",
        description="What became of a run's groups: without an option, their number by state.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run, or a ledger's file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--group", metavar="ID", help="the whole history of a group; a number names all its attempts"
    )
    what.add_argument("--check", action="store_true", help="read all of it, and prove what it promises")
    what.add_argument("--why-dropped", action="store_true", help="groups by the reason of their end")
    what.add_argument(
        "--step", metavar="K", type=int, help="what the batch of this step was, and what it waited for"
    )
    return parser


def _summary(ledger: LedgerReader) -> Iterator[str]:
    counts = ledger.count_states()
    yield f"run {ledger.meta('run_id') or 'without an id'}, incarnation {ledger.last_owner()}"
    yield f"{counts.total()} groups of {ledger.next_ordinal()} prompts"
    for state in GroupState:
        if counts[state]:
            yield f"  {state.value:<10} {counts[state]}"
    last = ledger.last_batch()
    yield f"last batch: {'none' if last is None else f'step {last}'}"
    versions = ledger.versions()
    for state in sorted({version.state for version in versions}):
        labels = [version.label for version in versions if version.state == state]
        yield f"versions {state}: {len(labels)}, the last is {labels[-1]}"
    steps = ledger.checkpoint_steps()
    if steps:
        yield f"checkpoints at steps {', '.join(map(str, steps[-5:]))}"


def _why(ledger: LedgerReader) -> Iterator[str]:
    for state in ENDS:
        causes = ledger.causes(state)
        yield f"{causes.total()} groups {state.value}"
        for cause, count in sorted(causes.items(), key=lambda pair: (-pair[1], str(pair[0]))):
            yield f"  {count:>8}  {cause}"


def _check(ledger: LedgerReader) -> Iterator[str]:
    found = 0
    for problem in problems(ledger):
        found += 1
        yield problem
    if found:
        raise InvariantBroken(f"the ledger breaks its promises in {found} places")
    yield f"{ledger.count_states().total()} groups, every history and every token in order"


def _group(ledger: LedgerReader, wanted: str) -> Iterator[str]:
    found = ledger.find(wanted)
    rows = [found] if found is not None else []
    if not rows and (number := wanted.removeprefix("g")).isdigit():
        rows = ledger.attempts(int(number))
    if not rows:
        raise ConfigError(Fault("--group", wanted, "the ledger has no such group", "give g00000012.0, or 12"))
    versions = {version.label: version for version in ledger.versions()}
    for row in rows:
        yield f"group {row.group_id}: attempt {row.attempt} at prompt {row.prompt_id}, {_state(row)}"
        for move in ledger.history(row.group_id):
            yield f"  {_move(move)}"
        yield from _members(ledger, row, versions)


def _state(row: GroupRow) -> str:
    if row.trained is not None:
        return f"trained by step {row.trained}"
    return row.state.value + (f" ({row.cause})" if row.cause else "")


def _move(move: Move) -> str:
    step = "" if move.step is None else f", step {move.step}"
    cause = f": {move.cause}" if move.cause else ""
    return f"{_time(move.at)}  {move.event:<8} -> {move.state:<9} incarnation {move.incarnation}{step}{cause}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _members(ledger: LedgerReader, row: GroupRow, versions: dict[str, VersionRow]) -> Iterator[str]:
    pieces = ledger.pieces(row.group_id)
    stored = ledger.is_stored(row.group_id)
    if pieces:
        yield f"  tokens {'are stored' if stored else 'are forgotten'}"
    for member in sorted({piece["member"] for piece in pieces}):
        own = [piece for piece in pieces if piece["member"] == member]
        last = own[-1]
        runs = [(tokens, name) for piece in own for tokens, name in piece["versions"]]
        count = sum(tokens for tokens, _ in runs)
        end = "not ended" if last["finish"] == "abort" else f"ended by {last['finish']}"
        scored = "unscored" if last["reward"] is None else f"reward {last['reward']:g}"
        yield f"  member {member}: {count} tokens, {end}, {scored}"
        for first, stop, name in _ranges(runs):
            yield f"    tokens {first}-{stop - 1}: {_version(name, versions, row)}"
        engines = _ranges([(tokens, name) for piece in own for tokens, name in piece["engines"]])
        yield "    made by " + ", ".join(f"{name} ({first}-{stop - 1})" for first, stop, name in engines)


def _ranges(runs: list[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """(first token, one after the last, name) of runs, neighbours of one name as one."""
    found: list[tuple[int, int, str]] = []
    at = 0
    for tokens, name in runs:
        if found and found[-1][2] == name:
            found[-1] = (found[-1][0], at + tokens, name)
        elif tokens:
            found.append((at, at + tokens, name))
        at += tokens
    return found


def _version(label: str, versions: dict[str, VersionRow], row: GroupRow) -> str:
    version = versions.get(label)
    if version is None:
        return label
    lag = "" if row.trained is None else f", lag {row.trained - version.step}"
    return f"{label} ({version.state}, of {version.step} train steps{lag})"


def _step(ledger: LedgerReader, step: int) -> Iterator[str]:
    batches = ledger.batches(step)
    if not batches:
        last = ledger.last_batch()
        reason = "no batch was recorded" if last is None else f"the last batch is that of step {last}"
        raise ConfigError(Fault("--step", str(step), reason))
    for batch in batches:
        yield f"step {step}, incarnation {batch.incarnation}: {len(batch.group_ids)} groups"
        yield from _batch(ledger, batch)
    for version in ledger.versions():
        if version.step == step + 1:
            yield f"made {version.label}: {version.state}, incarnation {version.incarnation}, root {version.root}"


def _batch(ledger: LedgerReader, batch: Batch) -> Iterator[str]:
    """The groups in order, and the one that was waited for longest."""
    ready: dict[str, tuple[float, float]] = {}
    for name in batch.group_ids:
        at = _moments(ledger.history(name), batch)
        if at is not None:
            ready[name] = at
        row = ledger.find(name)
        pieces = ledger.pieces(name)
        tokens = sum(run[0] for piece in pieces for run in piece["versions"])
        rewards = ", ".join("-" if p["reward"] is None else f"{p['reward']:g}" for p in pieces)
        now = "gone" if row is None else _state(row)
        took = "" if at is None else f", complete after {at[1] - at[0]:.3f} s"
        yield f"  {name}: {tokens} tokens, rewards {rewards or '-'}{took}, {now}"
    if ready:
        last = max(ready, key=lambda name: ready[name][1])
        began, done = ready[last]
        before = [complete for name, (_, complete) in ready.items() if name != last]
        waited = f", {done - max(before):.3f} s after the one before it" if before else ""
        yield f"  the last to be complete was {last} at {_time(done)}{waited}; it was admitted at {_time(began)}"


def _moments(history: list[Move], batch: Batch) -> tuple[float, float] | None:
    """When a group was admitted, and when it was complete before it was taken for this batch."""
    complete = None
    for move in history:
        if move.event == "complete":
            complete = move.at
        if (move.event, move.step, move.incarnation) == ("take", batch.step, batch.incarnation):
            break
    return None if complete is None or not history else (history[0].at, complete)
