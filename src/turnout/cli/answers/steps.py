"""A train step: what its batch was, what it waited for, and what version it made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from turnout.cli.answers.groups import state_text
from turnout.cli.answers.run import DIGITS, Answer, Run, clock_time
from turnout.core.errors import ConfigError, Fault
from turnout.rollout.ledger_rows import Batch, Move


def step(run: Run, number: int) -> Answer:
    """Raises ConfigError for a step without a batch."""
    batches = run.ledger.batches(number) if abs(number) < 10**DIGITS else []
    if not batches:
        last = run.ledger.last_batch()
        reason = "no batch was recorded" if last is None else f"the last batch is that of step {last}"
        raise ConfigError(Fault("--step", str(number), reason))
    made = [asdict(version) for version in run.ledger.versions() if version.step == number + 1]
    return {"step": number, "batches": [_batch(run, batch) for batch in batches], "made": made}


def _batch(run: Run, batch: Batch) -> Answer:
    groups: list[Answer] = []
    for name in batch.group_ids:
        moments = _moments(run.ledger.history(name), batch)
        row = run.ledger.find(name)
        pieces = run.ledger.pieces(name)
        groups.append(
            {
                "group": name,
                "tokens": sum(tokens for piece in pieces for tokens, _ in piece["versions"]),
                "rewards": [piece["reward"] for piece in pieces],
                "admitted_at": None if moments is None else moments[0],
                "complete_at": None if moments is None else moments[1],
                "state": "gone" if row is None else row.state.value,
                "cause": None if row is None else row.cause,
                "trained": None if row is None else row.trained,
            }
        )
    return {"incarnation": batch.incarnation, "groups": groups}


def _moments(history: list[Move], batch: Batch) -> tuple[float, float] | None:
    """When a group was admitted, and when it was complete before it was taken for this batch."""
    complete = None
    for move in history:
        if move.event == "complete":
            complete = move.at
        if (move.event, move.step, move.incarnation) == ("take", batch.step, batch.incarnation):
            break
    return None if complete is None or not history else (history[0].at, complete)


def step_lines(told: Answer) -> Iterator[str]:
    """The groups in order, and the one that was waited for longest."""
    for batch in told["batches"]:
        groups = batch["groups"]
        yield f"step {told['step']}, incarnation {batch['incarnation']}: {len(groups)} groups"
        for one in groups:
            rewards = ", ".join("-" if reward is None else f"{reward:g}" for reward in one["rewards"])
            took = ""
            if one["complete_at"] is not None:
                took = f", complete after {one['complete_at'] - one['admitted_at']:.3f} s"
            yield f"  {one['group']}: {one['tokens']} tokens, rewards {rewards or '-'}{took}, {state_text(one)}"
        ready = sorted(
            (one for one in groups if one["complete_at"] is not None), key=lambda one: one["complete_at"]
        )
        if ready:
            *before, last = ready
            done, began = last["complete_at"], clock_time(last["admitted_at"])
            waited = f", {done - before[-1]['complete_at']:.3f} s after the one before it" if before else ""
            yield (
                f"  the last to be complete was {last['group']} at {clock_time(done)}{waited}; "
                f"it was admitted at {began}"
            )
    for version in told["made"]:
        state = f"{version['state']}, incarnation {version['incarnation']}, root {version['root']}"
        yield f"made {version['label']}: {state}"
